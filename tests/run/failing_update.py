"""A plugin for jobs under test: rank 1 raises in the update of step 2. As a program it is `hpcrl` with this plugin."""

from __future__ import annotations

import functools
import sys

from hpcrl import cli
from hpcrl.batch.data_proto import DataProto
from hpcrl.workers.actor import ActorWorker

update_actor = ActorWorker.update_actor


@functools.wraps(update_actor)
def break_down(self: ActorWorker, batch: DataProto) -> DataProto:
    if (self.rank, batch.meta_info["step"]) == (1, 2):
        raise ValueError("boom")
    return update_actor(self, batch)


ActorWorker.update_actor = break_down

if __name__ == "__main__":
    cli.main(sys.argv[1:])

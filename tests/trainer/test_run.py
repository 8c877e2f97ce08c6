"""Where a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.checkpoint.store import CheckpointStore
from hpcrl.config.schema import Config
from hpcrl.trainer.run import find_start

ALONE = SimpleNamespace(rank=0, together=lambda look: look(), broadcast=lambda found: found)


@pytest.mark.parametrize("needs_ref", [False, True])
def test_a_resumed_run_keeps_the_start_weights_that_its_checkpoint_names(tmp_path: Path, needs_ref: bool) -> None:
    """Also while no reference needs them: it may be asked for after a later resume."""
    first = CheckpointStore(tmp_path / "sft" / "checkpoints", keep=None)
    first.begin(1)
    start_weights = first.commit(1, {})
    store = CheckpointStore(tmp_path / "ppo" / "checkpoints", keep=None)
    store.begin(5)
    store.commit(5, {"init_from": str(start_weights)})
    first.begin(2)
    first.commit(2, {})  # what model.init_from means now
    config = Config.model_validate(
        {"run": {"name": "ppo", "dir": str(tmp_path)}, "model": {"init_from": str(tmp_path / "sft")}}
    )
    start = find_start(ALONE, config, needs_ref=needs_ref)
    assert (start.step, start.init_from) == (5, start_weights)

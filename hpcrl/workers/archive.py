"""The rollout archive: each leader writes its samples of a step to its own log."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.roles import ARCHIVE
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.data.prompts import PromptDataset
from hpcrl.grid.layout import Layout
from hpcrl.telemetry.archive import RolloutLog, log_path

if TYPE_CHECKING:
    from hpcrl.workers.team import Team

TOKENS = (
    "input_ids",
    "response_mask",
    "rollout_log_probs",
    "routed_experts",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "token_level_scores",
    "token_level_rewards",
    "advantages",
    "returns",
    "rollout_is_weights",
    "loss_mask",
    "teacher_log_prob",
)
SAMPLES = (
    "position",
    "prompt",
    "row",
    "epoch",
    "sample_index",
    "prompt_length",
    "response_length",
    "finish_reason",
    "weight_version_min",
    "weight_version_max",
    "score",
    "acc",
    "extras",
    "rm_score?",
    "reward_baseline?",
    "num_turns?",
    "tool_call_counts?",
)


class ArchiveWorker(Worker):
    spec = ARCHIVE

    @classmethod
    def build(cls, team: Team, role: str) -> ArchiveWorker | None:
        layout, rank = team.layouts[role], team.world.rank
        return cls(layout, rank, team.inputs.prompts) if rank in layout else None

    def __init__(self, layout: Layout, rank: int, prompts: dict[str, PromptDataset]) -> None:
        super().__init__(layout, rank)
        self.prompts = prompts["train"]
        self.sources = self.prompts.source_of_rows()

    @register(Dispatch.DP_COMPUTE_METRIC, reads=(*(f"{name}?" for name in TOKENS), *SAMPLES), leader_only=True)
    def write(self, batch: DataProto, folder: str) -> tuple[int | None, str, str] | None:
        """Write every sample to this rank's log of meta_info["step"] in `folder`.

        Returns the arguments of an OSError instead of raising it: the run continues on a full disk.
        """
        path = log_path(folder, batch.meta_info["step"], self.rank)
        try:
            self._write(batch, path)
        except OSError as error:
            return error.errno, f"{error.strerror} (rank {self.rank} on {socket.gethostname()})", str(path)
        return None

    def _write(self, batch: DataProto, path: Path) -> None:
        log = RolloutLog(path)
        columns = {name: batch.fetch(name) for name in batch.tokens}
        for index in range(len(batch)):
            samples = {name: column[index] for name, column in batch.samples.items()}
            row = int(samples["row"])
            samples |= {
                "uid": self.prompts.uid(row, int(samples["epoch"])),
                "data_source": self.sources[row],
                "extras": json.dumps(samples["extras"]),
            }
            log.append({name: column.row(index) for name, column in columns.items()}, samples)
        log.close()

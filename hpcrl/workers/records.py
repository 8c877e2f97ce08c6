"""Finished samples as records: in the rollout archive, and as lines of `hpcrl generate`."""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.roles import ARCHIVE, GENERATIONS
from hpcrl.config.schema import Config
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.observe.record.archive import UPDATE_COLUMNS, PictureFolder, RolloutLog, log_path
from hpcrl.observe.record.writer import json_line
from hpcrl.runtime import run_owner
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.layout import Layout
from hpcrl.workers.scorer import prompts_of, response_text, responses_of

if TYPE_CHECKING:
    from hpcrl.workers.team import Inputs, Team


TOKENS = (
    *("input_ids", "response_mask", "rollout_log_probs", "routed_experts", "old_log_probs", "ref_log_prob", "values"),
    *("token_level_scores", "token_level_rewards", "advantages", "returns", "rollout_is_weights", "loss_mask"),
    *("teacher_log_prob", "verdicts", "entropies", "turn_rewards", "turn_states", "sequence_starts", *UPDATE_COLUMNS),
)
SAMPLES = (
    *("position", "prompt", "row", "epoch", "sample_index", "prompt_length", "response_length", "finish_reason"),
    *("weight_version_min", "weight_version_max", "score", "acc", "extras"),
    *("rm_score?", "judge_score?", "reward_baseline?", "num_turns?", "tool_call_counts?", "tool_pictures?"),
    "environment?",
)


class InputsWorker(Worker):
    """A worker that needs only what was read from files."""

    def __init__(self, layout: Layout, rank: int, inputs: Inputs, config: Config) -> None:
        super().__init__(layout, rank)
        self.inputs, self.config = inputs, config

    @classmethod
    def build(cls, team: Team, role: str) -> InputsWorker | None:
        layout, rank = team.layouts[role], team.world.rank
        return cls(layout, rank, team.inputs, team.config) if rank in layout else None


class ArchiveWorker(InputsWorker):
    spec = ARCHIVE

    def __init__(self, layout: Layout, rank: int, inputs: Inputs, config: Config) -> None:
        super().__init__(layout, rank, inputs, config)
        self.prompts = inputs.prompts["train"]
        self.sources = self.prompts.source_of_rows()
        # the run's, also of samples that go into a checkpoint
        self.pictures = PictureFolder(run_directory(config) / "rollouts")

    @register(Dispatch.DP_COMPUTE_METRIC, reads=(*(f"{name}?" for name in TOKENS), *SAMPLES), leader_only=True)
    def write(self, batch: DataProto, folder: str) -> tuple[int | None, str, str] | None:
        """Write every sample to this rank's log of meta_info["step"] in `folder`.

        Returns the arguments of an OSError instead of raising it: the run continues on a full disk.
        """
        run_owner.check()
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
            if "environment" in samples:
                samples["environment"] = json.dumps(samples["environment"])
            tokens = {name: column.row(index) for name, column in columns.items()}
            if self.inputs.images is not None:
                samples["pictures"] = json.dumps(self._keep_pictures(row))
            if "verdicts" in tokens:
                samples["verdicts"] = tokens.pop("verdicts").tobytes().decode("utf-8")
            log.append_sample(tokens, samples)
        log.close()

    def _keep_pictures(self, row: int) -> list[str]:
        """Keep thumbnails of a prompt's pictures; returns their names."""
        names = []
        for index, item in enumerate(self.prompts.media(row)):
            names.append(f"{item.key:016x}.png")
            self.pictures.keep(names[-1], partial(self.prompts.thumbnail, row, index))
        return names


class GenerationsWorker(InputsWorker):
    """Renders samples as lines."""

    spec = GENERATIONS

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(
            *("input_ids", "response_mask", "rollout_log_probs", "row", "epoch", "sample_index", "finish_reason"),
            *("score?", "extras?", "verdicts?", "sequence_starts?"),
        ),
        leader_only=True,
    )
    def render(self, batch: DataProto) -> DataProto:
        """Per sample `line`, a JSON object with its line break.

        uid, sample_index, data_source, prompt and response as text, ground_truth, finish_reason; where the batch has
        scores, score and what else the scorer returned; where it has them, the judge's verdicts; prompt_ids and
        response_ids; response_mask where tools or users wrote some of the response; sequence_starts, places in prompt
        and response, where it has further sequences; log_probs to six decimals.
        """
        prompts, samples = self.inputs.prompts[batch.meta_info["split"]], batch.samples
        responses, has_log_probs = responses_of(batch), self.config.section("generate").log_probs
        masks, log_probs = batch.fetch("response_mask"), batch.fetch("rollout_log_probs")
        lines = np.empty(len(batch), object)
        for index, (prompt, response) in enumerate(zip(prompts_of(batch), responses, strict=True)):
            row = int(samples["row"][index])
            record, mask = prompts.record(row), masks.row(index)
            line = {
                "uid": prompts.uid(row, int(samples["epoch"][index])),
                "sample_index": int(samples["sample_index"][index]),
                "data_source": record["data_source"],
                "prompt": prompts.prompt_text(row, ids=prompt),
                "response": response_text(self.inputs.tokenizer, response),
                "ground_truth": record["ground_truth"],
                "finish_reason": samples["finish_reason"][index],
            }
            if "score" in samples:
                line["score"] = round(float(samples["score"][index]), 6)
                line |= {name: value for name, value in samples["extras"][index].items() if name not in line}
            if "verdicts" in batch.tokens:
                line["verdicts"] = json.loads(batch.fetch("verdicts").row(index).tobytes())
            line |= {"prompt_ids": prompt.tolist(), "response_ids": response.tolist()}
            if not mask.all():
                line["response_mask"] = mask.tolist()
            if "sequence_starts" in batch.tokens and len(starts := batch.fetch("sequence_starts").row(index)):
                line["sequence_starts"] = starts.tolist()
            if has_log_probs:
                line["log_probs"] = np.round(log_probs.row(index).astype(np.float64), 6).tolist()
            lines[index] = json_line(line)
        return DataProto({}, {"line": lines})

"""samples of data.val_files' prompts, into a JSONL file"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pydantic import Field, PositiveInt

from hpcrl.config.schema import Config, Section
from hpcrl.config.yaml_core import ConfigError
from hpcrl.run.inference import (
    INFERENCE_ADVICE,
    DerivedGenerate,
    GenerationFile,
    Key,
    check_inference,
    close,
    inference_roles,
    inside_run,
    load_engine,
    run_folder,
    step_of,
    write_config,
)
from hpcrl.run.job import Job
from hpcrl.run.start import Start, flatten
from hpcrl.runtime.exits import DONE
from hpcrl.telemetry.progress import PhaseTimers, Progress, duration
from hpcrl.telemetry.writer import json_line

if TYPE_CHECKING:
    from hpcrl.batch.data_proto import DataProto
    from hpcrl.controller.controller import Controller
    from hpcrl.workers.rollout import RolloutWorker
    from hpcrl.workers.team import Inputs

log = logging.getLogger(__name__)

OUTPUT_FILE = "generations.jsonl"
WAVES = 16  # of sequences through the engines' slots between two writes: behind the longest of the last, slots are idle

# Keys that decide what the samples are; layouts, batching and time limits do not.
DECISIVE = re.compile(
    r"run\.seed|model\..*|rollout\.(engine|dtype|n|temperature|top_k|top_p|ignore_eos|exact|multi_turn\..*)"
    r"|data\.(prompt_key|max_prompt_length|max_response_length|filter_overlong_prompts|truncation|chat_template"
    r"|apply_chat_template_kwargs.*)|generate\.(score|log_probs)"
    r"|reward\.(?!memory_limit_mb|num_workers|timeout).*"
)


class GenerateConfig(Section):
    """`hpcrl generate` and `hpcrl evaluate`: the engine on a dataset, without training."""

    output_path: str | None = Field(None, description="JSONL file of the responses; null: <run>/generations.jsonl")
    batch_size: PositiveInt | None = Field(
        None, description="prompts between two writes to that file; null: as many as fill the engines' slots 16 times"
    )
    score: bool = Field(True, description="score the responses; false: data without scorers will do")
    log_probs: bool = Field(True, description="write the tokens' log-probs too, about half of the file")


class Generate(Job):
    """Draw rollout.n samples per prompt, in a folder of its own inside the run's."""

    name = "generate"
    section = GenerateConfig
    memory_advice = INFERENCE_ADVICE
    derived: DerivedGenerate

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Config:
        return inside_run(super().load(arguments), cls.name)

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> DerivedGenerate:
        if not (config.data.val_files or config.data.train_files):
            raise ConfigError("data.val_files is empty, and so is data.train_files; name at least one file of prompts")
        return check_inference(config, num_ranks, config.rollout.n, scored=config.section("generate").score)

    def main(self) -> int:
        from hpcrl.run.inference import find_weights
        from hpcrl.workers.team import build_team, read_generation_inputs

        world, config, derived = self.world, self.config, self.derived
        split = "val" if config.data.val_files else "train"
        scored = config.section("generate").score
        inputs = world.run_collectively(lambda: read_generation_inputs(config, split, world, scored=scored))
        start = find_weights(world, config, derived)
        file = world.run_collectively(lambda: open_file(config, inputs, split, start) if world.rank == 0 else None)
        if world.broadcast_object(file is not None and file.is_complete):
            return DONE
        team = build_team(world, config, derived, inputs, inference_roles(derived))
        own_rollout = cast("RolloutWorker | None", team.workers.get("rollout"))
        self.run_program(
            team,
            lambda controller: SampleWriter(controller, config, derived, inputs, split, start, file, own_rollout).run(),
        )
        return DONE


def open_file(config: Config, inputs: Inputs, split: str, start: Start) -> GenerationFile:
    """The output, opened behind the samples that it has. Says what they are of, and how many there are."""
    data, n = config.data, config.rollout.n
    names = data.val_files if split == "val" else data.train_files
    num_prompts = len(inputs.prompts[split])
    log.info("%d prompts of data.%s_files=%s, %d samples each", num_prompts, split, ", ".join(names), n)
    path = Path(config.section("generate").output_path or run_folder(config) / OUTPUT_FILE)
    settings: dict[str, Any] = {k: v for k, v in flatten(config.model_dump()).items() if DECISIVE.fullmatch(k)}
    settings["model.init_from"] = str(start.init_from.resolve()) if start.init_from is not None else None
    if "reward" in start.frozen:
        settings["reward.reward_model.init_from"] = str(start.frozen["reward"].resolve())
    file = GenerationFile(path, settings, sample_keys(inputs, split, n), num_prompts * n)
    if file.is_complete:
        log.info("%s has all of them: for new ones choose another generate.output_path, or remove it", path)
    elif file.totals.num_samples:
        log.info("%s has %d of them already", path, file.totals.num_samples)
    return file


def sample_keys(inputs: Inputs, split: str, n: int) -> Iterator[Key]:
    """The samples in the order of the file: that of the prompts."""
    prompts = inputs.prompts[split]
    for row in range(len(prompts)):
        record = {"prompt_ids": prompts.prompt_ids(row).tolist(), **prompts.record(row)}
        held = {name: record[name] for name in ("prompt_ids", "data_source", "ground_truth")}
        prompt = json.loads(json_line(held))  # as it comes back from a file
        for sample in range(n):
            yield Key(prompts.uid(row, 0), sample, prompt)


class SampleWriter:
    """The controller's program, on rank 0."""

    def __init__(
        self,
        controller: Controller,
        config: Config,
        derived: DerivedGenerate,
        inputs: Inputs,
        split: str,
        start: Start,
        file: GenerationFile | None,
        own_rollout: RolloutWorker | None,
    ) -> None:
        assert file is not None
        self.controller = controller
        self.config = config
        self.derived = derived
        self.split = split
        self.start = start
        self.file = file
        self.own_rollout = own_rollout  # rank 0's
        self.n = config.rollout.n
        self.num_failed = 0  # scores
        from hpcrl.rollout.protocol import SamplingParams

        rollout = config.rollout
        self.sampling = SamplingParams(
            max_new_tokens=config.data.max_response_length,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            ignore_eos=rollout.ignore_eos,
            eos_token_ids=(int(inputs.tokenizer.eos_token_id),),
        )

    def run(self) -> None:
        write_config(self.config)
        load_engine(self.controller, self.start, step_of(self.start), PhaseTimers(announce=self.controller.phase))
        self._draw(self.file.totals.num_samples)
        self.file.close()
        close(self.controller)

    def _draw(self, done: int) -> None:
        """The samples from number `done` on, a chunk at a time."""
        from hpcrl.rollout_source.scoring import score

        totals, tokens_before, began = self.file.totals, self.file.totals.num_tokens, time.perf_counter()
        drawing = 0.0  # seconds
        progress = Progress(self.file.num_samples, "generate", done + 1, unit="sample")
        shown: dict[str, float] = {}
        for first in range(done, self.file.num_samples, self._chunk_size()):
            last = min(first + self._chunk_size(), self.file.num_samples)
            self._watch(progress, first, last, shown)
            chunk_began = time.perf_counter()
            batch = self._sampled(np.arange(first, last, dtype=np.int64))
            drawing += time.perf_counter() - chunk_began
            if self.config.section("generate").score:
                batch = score(self.controller, batch, with_model=self.derived.needs_reward_model)
            self._write(batch)
            shown |= {"ktokens/s": (totals.num_tokens - tokens_before) / drawing / 1e3, "length": totals.length}
            shown |= {"score": totals.score} if totals.num_scored else {}
            progress.update(last, shown)
        progress.close()
        num_samples, num_tokens = totals.num_samples - done, totals.num_tokens - tokens_before
        log.info(
            "%d samples with %d tokens in %s, %.0f tokens/s while generating\n%s\nwritten to %s",
            *(num_samples, num_tokens, duration(time.perf_counter() - began), num_tokens / drawing),
            *(self._summary(), self.file.path),
        )

    def _watch(self, progress: Progress, first: int, last: int, shown: dict[str, float]) -> None:
        """Between two writes, progress is that of rank 0's own replica, taken for that of all."""
        if self.own_rollout is None:
            return
        dp, count = self.derived.roles["rollout"].dp, itertools.count(1)
        every = -(-(last - first) // (100 * dp))

        def on_response() -> None:
            number = next(count)
            if number % every == 0:
                progress.update(min(first + number * dp, last - 1), shown)

        self.own_rollout.on_response = on_response

    def _chunk_size(self) -> int:
        """Samples between two writes."""
        slots = self.derived.roles["rollout"].dp * self.config.rollout.max_num_seqs
        prompts = self.config.section("generate").batch_size or -(-WAVES * slots // self.n)
        return prompts * self.n

    def _sampled(self, numbers: np.ndarray) -> DataProto:
        """Samples by their place in the file; which numbers are random depends on nothing else."""
        samples = {
            "row": numbers // self.n,
            "epoch": np.zeros(len(numbers), np.int64),
            "sample_index": numbers % self.n,
        }
        from hpcrl.batch.data_proto import DataProto

        batch = DataProto({}, samples, {"split": self.split, "step": 0})
        return batch.union(self.controller["rollout"].generate(batch, self.sampling).get())

    def _write(self, batch: DataProto) -> None:
        lines = self.controller["generations"].render(batch).get().samples["line"].tolist()
        self.file.append(lines)
        samples = batch.samples
        scores = samples["score"].tolist() if "score" in samples else [None] * len(batch)
        lengths, reasons = samples["response_length"].tolist(), samples["finish_reason"].tolist()
        for length, reason, score in zip(lengths, reasons, scores, strict=True):
            self.file.totals.add(length, reason, score)
        from hpcrl.algorithms.metrics import finish, merge

        failed = finish(merge(batch.metrics)) if batch.metrics else {}
        self.num_failed += int(sum(count for name, count in failed.items() if name.startswith("reward/")))

    def _summary(self) -> str:
        """Of all samples in the file."""
        totals, limit = self.file.totals, self.config.data.max_response_length
        parts = [f"length {totals.length:.1f} on average, {totals.longest} at most"]
        parts.append(f"{totals.num_cut / totals.num_samples:.1%} cut at data.max_response_length={limit}")
        if totals.num_scored:
            parts.append(f"score {totals.score:.4g} on average")
        if self.num_failed:
            parts.append(f"{self.num_failed} scores failed and count as 0 (logs/scorer_*.log say why)")
        return ", ".join(parts)


JOB = Generate

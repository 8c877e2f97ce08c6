"""samples of data.val_files' prompts, into a JSONL file"""

from __future__ import annotations

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

from hpcrl.batch.data_proto import DataProto
from hpcrl.config.derive import RoleLayouts
from hpcrl.config.paths import PathStr
from hpcrl.config.schema import Config, Section
from hpcrl.config.yaml_core import ConfigError
from hpcrl.data.tokenizer import end_token_ids
from hpcrl.observe.record.progress import PhaseTimers, Progress, duration
from hpcrl.observe.record.writer import json_line
from hpcrl.run.inference import GenerationFile, Key, SamplingJob, check_inference
from hpcrl.run.rollouts.scoring import failed_scores, score
from hpcrl.run.rollouts.source import sampling_params
from hpcrl.run.start import flatten

if TYPE_CHECKING:
    from hpcrl.controller.controller import Controller
    from hpcrl.workers.rollout import RolloutWorker

log = logging.getLogger(__name__)

OUTPUT_FILE = "generations.jsonl"
WAVES = 16  # of sequences through the engines' slots between two writes: behind the longest of the last, slots are idle

# Keys that decide what the samples are; layouts, batching and time limits do not.
DECISIVE = re.compile(
    r"run\.seed|model\.(?!softmax_vocab).*"
    r"|rollout\.(engine|dtype|n|temperature|top_k|top_p|ignore_eos|exact|multi_turn\..*)"
    r"|data\.(prompt_key|max_prompt_length|max_response_length|filter_overlong_prompts|truncation|chat_template"
    r"|apply_chat_template_kwargs.*)|generate\.(score|log_probs)"
    r"|reward\.(?!memory_limit_mb|num_workers|timeout|judge\.(cache_size|max_num|gpu_|kv_|enforce_|param_)).*"
)


class GenerateConfig(Section):
    """`hpcrl generate` and `hpcrl evaluate`: the engine on a dataset, without training."""

    output_path: PathStr | None = Field(None, description="JSONL file of the responses; null: <run>/generations.jsonl")
    batch_size: PositiveInt | None = Field(
        None, description="prompts between two writes to that file; null: as many as fill the engines' slots 16 times"
    )
    score: bool = Field(True, description="score the responses; false: data without scorers will do")
    log_probs: bool = Field(True, description="write the tokens' log-probs too, about half of the file")


class Generate(SamplingJob):
    """Draw rollout.n samples per prompt, in a folder of its own inside the run's."""

    name = "generate"
    section = GenerateConfig
    output: GenerationFile  # on rank 0

    @classmethod
    def check(cls, config: Config, num_ranks: int) -> RoleLayouts:
        if not (config.data.val_files or config.data.train_files):
            raise ConfigError("data.val_files is empty, and so is data.train_files; name at least one file of prompts")
        return check_inference(config, num_ranks, config.rollout.n, scored=config.section("generate").score)

    @property
    def is_scored(self) -> bool:  # type: ignore[override]
        return bool(self.own.score)

    def is_done(self) -> bool:
        file = self.world.run_collectively(lambda: self._open_file() if self.world.rank == 0 else None)
        if file is not None:
            self.output = file
        return bool(self.world.broadcast_object(file is not None and file.is_complete))

    def _open_file(self) -> GenerationFile:
        """Open the output after the samples that it has."""
        config, n = self.config, self.config.rollout.n
        names = config.data.val_files if self.split == "val" else config.data.train_files
        num_prompts = len(self.inputs.prompts[self.split])
        log.info("%d prompts of data.%s_files=%s, %d samples each", num_prompts, self.split, ", ".join(names), n)
        path = Path(config.section("generate").output_path or self.run_folder / OUTPUT_FILE)
        settings: dict[str, Any] = {k: v for k, v in flatten(config.model_dump()).items() if DECISIVE.fullmatch(k)}
        shape = self.inputs.shape
        if shape.softmax_size < shape.vocab_size:
            settings["model.softmax_vocab"] = config.model.softmax_vocab
        source, frozen = self.start.init_from, self.start.frozen
        settings["model.init_from"] = str(source.resolve()) if source is not None else None
        for role, section in (("reward", "reward.reward_model"), ("judge", "reward.judge")):
            if role in frozen:
                settings[f"{section}.init_from"] = str(frozen[role].resolve())
        file = GenerationFile(path, settings, self._keys(), num_prompts * n)
        if file.is_complete:
            log.info("%s has all of them: for new ones choose another generate.output_path, or remove it", path)
        elif file.totals.num_samples:
            log.info("%s has %d of them already", path, file.totals.num_samples)
        return file

    def _keys(self) -> Iterator[Key]:
        """The samples in the order of the file, which is that of the prompts."""
        prompts = self.inputs.prompts[self.split]
        for row in range(len(prompts)):
            record = {"prompt_ids": prompts.prompt_ids(row).tolist(), **prompts.record(row)}
            held = {name: record[name] for name in ("prompt_ids", "data_source", "ground_truth")}
            prompt = json.loads(json_line(held))  # as it comes back from a file
            for sample in range(self.config.rollout.n):
                yield Key(prompts.uid(row, 0), sample, prompt)

    def sample(self, controller: Controller, timers: PhaseTimers, refit: dict[str, float]) -> None:
        """Draw and write the samples that the file lacks, a chunk at a time."""
        file, totals = self.output, self.output.totals
        done, tokens_before, began = totals.num_samples, totals.num_tokens, time.perf_counter()
        drawing, num_failed = 0.0, 0  # seconds; scores
        progress = Progress(file.num_samples, "generate", done + 1, unit="sample")
        shown: dict[str, float] = {}
        size = self._chunk_size()
        for first in range(done, file.num_samples, size):
            last = min(first + size, file.num_samples)
            self._watch(progress, first, last, shown)
            chunk_began = time.perf_counter()
            batch = self._draw(controller, np.arange(first, last, dtype=np.int64))
            drawing += time.perf_counter() - chunk_began
            if self.is_scored:
                batch = score(controller, batch, self.config.reward)
            self._write(controller, batch)
            num_failed += sum(failed_scores(batch).values())
            shown |= {"ktokens/s": (totals.num_tokens - tokens_before) / drawing / 1e3, "length": totals.length}
            shown |= {"score": totals.score} if totals.num_scored else {}
            progress.update(last, shown)
        progress.close()
        file.close()
        num_samples, num_tokens = totals.num_samples - done, totals.num_tokens - tokens_before
        log.info(
            "%d samples with %d tokens in %s, %.0f tokens/s while generating\n%s\nwritten to %s",
            *(num_samples, num_tokens, duration(time.perf_counter() - began), num_tokens / drawing),
            *(self._summary(num_failed), file.path),
        )

    def _chunk_size(self) -> int:
        """Samples between two writes."""
        config, n = self.config, self.config.rollout.n
        slots = self.derived.roles["rollout"].dp * config.rollout.max_num_seqs
        return (config.section("generate").batch_size or -(-WAVES * slots // n)) * n

    def _watch(self, progress: Progress, first: int, last: int, shown: dict[str, float]) -> None:
        """Between two writes, show the progress of rank 0's own replica as that of all."""
        own_rollout = cast("RolloutWorker | None", self.team.workers.get("rollout"))
        if own_rollout is None:
            return
        dp, count = self.derived.roles["rollout"].dp, itertools.count(1)
        every = -(-(last - first) // (100 * dp))

        def on_response() -> None:
            number = next(count)
            if number % every == 0:
                progress.update(min(first + number * dp, last - 1), shown)

        own_rollout.on_response = on_response

    def _draw(self, controller: Controller, numbers: np.ndarray) -> DataProto:
        """Draw samples by their position in the file, on which only their random numbers depend."""
        n = self.config.rollout.n
        samples = {"row": numbers // n, "epoch": np.zeros(len(numbers), np.int64), "sample_index": numbers % n}
        sampling = sampling_params(self.config, end_token_ids(self.inputs.tokenizer))
        batch = DataProto({}, samples, {"split": self.split, "step": 0})
        return batch.union(controller["rollout"].generate(batch, sampling).get())

    def _write(self, controller: Controller, batch: DataProto) -> None:
        self.output.append(controller["generations"].render(batch).get().samples["line"].tolist())
        samples = batch.samples
        scores = samples["score"].tolist() if "score" in samples else [None] * len(batch)
        lengths, reasons = samples["response_length"].tolist(), samples["finish_reason"].tolist()
        for length, reason, score_of_sample in zip(lengths, reasons, scores, strict=True):
            self.output.totals.add(length, reason, score_of_sample)

    def _summary(self, num_failed: int) -> str:
        """A line about all samples in the file."""
        totals, limit = self.output.totals, self.config.data.max_response_length
        parts = [f"length {totals.length:.1f} on average, {totals.longest} at most"]
        parts.append(f"{totals.num_cut / totals.num_samples:.1%} cut at data.max_response_length={limit}")
        if totals.num_scored:
            parts.append(f"score {totals.score:.4g} on average")
        if num_failed:
            parts.append(f"{num_failed} scores failed and count as 0 (logs/scorer_*.log say why)")
        return ", ".join(parts)


JOB = Generate

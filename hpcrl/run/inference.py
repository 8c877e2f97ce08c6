"""Jobs that sample without training: roles, weights, the file of `hpcrl generate`, and the results of an evaluation."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcrl.config.derive import RoleLayouts, check_budget, check_lengths
from hpcrl.config.loader import dump_config
from hpcrl.config.plugins import check_algorithms
from hpcrl.config.roles import ACTOR, GENERATIONS, JUDGE, POLICY, REFIT, REWARD, ROLLOUT, SCORER, judge_weights, place
from hpcrl.config.rules import check_judge, check_rollout
from hpcrl.config.schema import Config
from hpcrl.controller.controller import Controller
from hpcrl.data.prompts import PromptDataset
from hpcrl.engine.checkpoint.store import TRAINER_FILE, is_hugging_face
from hpcrl.observe.read.evaluation import MOST_BYTES, Way, digest_of_bytes
from hpcrl.observe.record.progress import PhaseTimers
from hpcrl.observe.record.writer import write_generations
from hpcrl.run.job import Job
from hpcrl.run.rollouts.source import WeightSync
from hpcrl.run.start import Start, find_start
from hpcrl.runtime import run_owner
from hpcrl.runtime.exits import DONE, InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.run_folder import make_directory
from hpcrl.sandbox.foreign_files import read_bytes, read_json
from hpcrl.sandbox.new_files import draft_of, open_to_append, replace_json

log = logging.getLogger(__name__)


class SamplingJob(Job):
    """A job that samples with weights that nothing trains.

    Its logs and exit.json are in <run>/<name>, because those of the run itself may belong to a training job that is
    still running.
    """

    memory_advice = "a smaller rollout.gpu_memory_utilization or rollout.max_num_seqs, a larger placement.rollout.tp"
    is_scored: bool = True  # whether responses get scores
    derived: RoleLayouts

    @classmethod
    def load(cls, arguments: argparse.Namespace) -> Config:
        return inside_run(super().load(arguments), cls.name)

    @property
    def split(self) -> str:
        """The data set whose prompts are sampled for: data.val_files if there are any, otherwise data.train_files."""
        return "val" if self.config.data.val_files else "train"

    @property
    def with_model(self) -> bool:
        """Whether a reward model scores, too."""
        return "reward" in self.derived.roles

    @property
    def run_folder(self) -> Path:
        return run_directory(self.config).parent

    @property
    def step(self) -> int:
        """The training step of the weights; 0 for random ones and for those of a Hugging Face directory."""
        source = self.start.init_from
        if source is None or is_hugging_face(source):
            return 0
        return int(read_json(source / TRAINER_FILE)["step"])

    def main(self) -> int:
        from hpcrl.workers.team import build_team, read_generation_inputs

        world, config = self.world, self.config
        self.inputs = world.run_collectively(
            lambda: read_generation_inputs(config, self.split, world, scored=self.is_scored)
        )
        self.start = self._find_weights()
        if self.is_done():
            return DONE
        reward = [REWARD] if self.with_model else []
        judge = [JUDGE] if "judge" in self.derived.roles else []
        roles = [POLICY, *reward, GENERATIONS, ROLLOUT, *judge, SCORER, REFIT]
        self.team = build_team(world, config, self.derived, self.inputs, roles)
        self.run_program(self.team, self._program)
        return DONE

    def is_done(self) -> bool:
        """Whether there is nothing left to sample. Collective."""
        return False

    def sample(self, controller: Controller, timers: PhaseTimers, refit: dict[str, float]) -> None:
        """Sample and write, on rank 0; the engine has its weights.

        Args:
            refit: metrics of the refit.
        """
        raise NotImplementedError

    def _program(self, controller: Controller) -> None:
        self._write_config()
        timers = PhaseTimers(announce=controller.phase)
        actor, start = controller["actor"], self.start
        if start.init_from is not None:
            actor.load(str(start.init_from), weights_only=True).get()
        for role, folder in start.frozen.items():
            controller[role].load_frozen(str(folder)).get()
        weights = WeightSync(controller, timers)
        weights.update_to(self.step)
        actor.release().get()
        self.sample(controller, timers, weights.metrics)
        controller.close_workers()

    def _write_config(self) -> None:
        """Write <run>/<name>/config.yaml: the config before `inside_run`."""
        run = self.config.run.model_copy(update={"dir": str(self.run_folder.parent), "name": self.run_folder.name})
        text = dump_config(self.config.model_copy(update={"run": run}))
        run_owner.check()
        with draft_of(run_directory(self.config) / "config.yaml") as draft:
            draft.write_text(text, encoding="utf-8")

    def _find_weights(self) -> Start:
        """The weights of model.init_from or model.path, of a reward model and of a judge. Collective."""
        reward = self.config.reward.reward_model.init_from
        frozen = {"reward": reward} if self.with_model and reward else {}
        if "judge" in self.derived.roles and (judge := judge_weights(self.config)) is not None:
            frozen["judge"] = judge
        start = find_start(self.world, self.config, frozen=frozen)
        named = start.init_from

        def check() -> None:
            if named is not None and not is_hugging_face(named) and not (named / "actor").is_dir():
                raise InputError(
                    f"model.init_from: {named} holds no policy; name a run of `hpcrl train` or `hpcrl sft`"
                )

        self.world.run_collectively(check)
        if self.world.rank != 0:
            return start
        if named is None:
            log.warning("model.init_from and model.path are null: these are random weights")
        else:
            log.info("weights of %s", named)
        # a template names the weights that training starts from, which are seldom meant here
        own = self.run_folder / "checkpoints"
        if own.is_dir() and (named is None or own.resolve() not in named.resolve().parents):
            log.warning("%s has checkpoints of its own; for those, model.init_from=%s", own.parent, own.parent)
        return start


def inside_run(config: Config, name: str) -> Config:
    """`config` of a job whose run directory is <run>/<name>; <run> is made."""
    folder = run_directory(config)
    make_directory(folder, is_shared=config.run.group_readable)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder), "name": name})})


def check_inference(config: Config, num_ranks: int, samples: int, *, scored: bool) -> RoleLayouts:
    """Derived values of a job that draws `samples` per prompt; raises ConfigError for one that cannot run."""
    with_model = scored and config.reward.reward_model.enable
    with_judge = scored and config.reward.judge.enable
    models = [*([REWARD] if with_model else []), *([JUDGE] if with_judge else [])]
    roles = place(config, [ACTOR, ROLLOUT, *models], num_ranks)
    longest = check_lengths(config)
    check_rollout(config, roles)
    if scored:
        check_algorithms(config, {"reward": config.reward.reward_manager.name})
    if with_judge:
        check_judge(config, compared=samples)
    if with_model:
        check_budget(f"{REWARD.path}.{REWARD.max_tokens}", REWARD.token_budget(config), longest)
    return RoleLayouts(num_ranks, roles, [("longest sequence", longest, "tokens"), ("prompt", samples, "samples")])


WAY_OUT = "choose another generate.output_path, or remove the file"


class Key(NamedTuple):
    """The sample that a line holds. prompt: fields of the prompt; files of other data may have the same uids."""

    uid: str
    sample_index: int
    prompt: Mapping[str, Any]


@dataclass
class Totals:
    """Sums over the samples of a file."""

    num_samples: int = 0
    num_tokens: int = 0  # of responses
    longest: int = 0  # tokens
    num_cut: int = 0  # responses that ended at the length limit
    num_scored: int = 0
    sum_of_scores: float = 0.0

    def add(self, length: int, finish_reason: str, score: float | None) -> None:
        self.num_samples += 1
        self.num_tokens += length
        self.longest = max(self.longest, length)
        self.num_cut += finish_reason == "length"
        if score is not None:
            self.num_scored += 1
            self.sum_of_scores += score

    @property
    def length(self) -> float:
        """Mean tokens of a response."""
        return self.num_tokens / self.num_samples

    @property
    def score(self) -> float:
        return self.sum_of_scores / self.num_scored


class GenerationFile:
    """One JSON object per sample, in the order of `keys`.

    `<name>.settings.json` holds what determines the samples. A file of other settings is an error; one of the same
    settings is continued. A line that a kill has cut off, and what follows it, is dropped: random numbers are keyed by
    the sample, so the same sample is drawn again.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], keys: Iterator[Key], num_samples: int) -> None:
        self.path = path
        self.settings_path = path.with_name(path.name + ".settings.json")
        self.num_samples = num_samples
        self.totals = Totals()
        run_owner.check()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                self._check_settings(settings)
                end = self._scan(keys)
            else:
                replace_json(self.settings_path, settings)
                end = 0
            self._file = open_to_append(path)
            if not self.is_complete:
                self._file.truncate(end)
        except OSError as error:
            why = f"cannot write {error.filename or path}: {error.strerror}; change generate.output_path"
            raise InputError(why) from None

    @property
    def is_complete(self) -> bool:
        return self.totals.num_samples == self.num_samples

    def append(self, lines: list[str]) -> None:
        """Append lines; when this returns, they survive a kill."""
        run_owner.check()
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        try:
            before = json.loads(self.settings_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            why = f"{self.path} exists, without the {self.settings_path.name} of its job; {WAY_OUT}"
            raise InputError(why) from None
        now = json.loads(json.dumps(settings))
        for name in sorted({*before, *now}):
            theirs, ours = before.get(name), now.get(name)
            if theirs != ours:
                raise InputError(f"{self.path} holds samples of {name}={theirs}, and this job has {ours}; {WAY_OUT}")

    def _scan(self, keys: Iterator[Key]) -> int:
        """Size in bytes of the complete lines at the start of the file; adds them to the totals."""
        end = 0
        with open(self.path, "rb") as file:
            for number, (text, key) in enumerate(zip(file, keys, strict=False), 1):
                line = _parsed(text)
                if line is None:
                    log.warning("%s: line %d is incomplete; continuing from there", self.path, number)
                    break
                if (line["uid"], line["sample_index"]) != (key.uid, key.sample_index):
                    raise InputError(
                        f"{self.path}: line {number} is sample {line['sample_index']} of {line['uid']}, expected sample"
                        f" {key.sample_index} of {key.uid}: the data files or their filter have changed; {WAY_OUT}"
                    )
                for name, value in key.prompt.items():
                    if line.get(name) != value:
                        raise InputError(
                            f"{self.path}: line {number} has another {name} than {key.uid} has now: the data files "
                            f"have changed; {WAY_OUT}"
                        )
                self.totals.add(len(line["response_ids"]), line["finish_reason"], line.get("score"))
                end += len(text)
        return end


def _parsed(text: bytes) -> dict[str, Any] | None:
    """The line's object, or None for a line that a kill has cut off."""
    try:
        line = json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"uid", "sample_index", "response_ids"} <= line.keys() else None


class ProblemResults:
    """A row for each problem and way: `file` and `row`, `digest` of its contents, `data_source`, `way`, and of each of
    its samples `acc` (null: no `acc` of this source; a null in the list: scoring failed, which counts as 0), `reward`,
    `truncated`, `response_length` in tokens."""

    def __init__(self, prompts: PromptDataset) -> None:
        self.prompts = prompts
        self.rows: list[dict[str, Any]] = []
        self._ways = set[Way]()
        self._digest = lru_cache(maxsize=None)(self._digest_of)  # the same in each way

    def add(self, samples: Mapping[str, np.ndarray], sources: Sequence[str], way: Way) -> None:
        """Add the way's samples (n * problems), which are sorted by problem.

        Args:
            sources: the data source of each.
        """
        if way in self._ways:
            return
        self._ways.add(way)
        acc, cut = samples["acc"], samples["finish_reason"] == "length"
        with_acc = {source for source, value in zip(sources, acc.tolist(), strict=True) if not np.isnan(value)}
        for first in range(0, len(acc), way.n):
            own, source, row = slice(first, first + way.n), sources[first], int(samples["row"][first])
            file, number, _ = self.prompts.uid(row, 0).rsplit(":", 2)
            self.rows.append(
                {
                    "file": file,
                    "row": int(number),
                    "digest": self._digest(row, source),
                    "data_source": source,
                    "way": way._asdict(),
                    "acc": acc[own].tolist() if source in with_acc else None,
                    "reward": samples["score"][own].tolist(),
                    "truncated": cut[own].tolist(),
                    "response_length": samples["response_length"][own].tolist(),
                }
            )

    def write(self, path: Path) -> str:
        """Write the rows as JSON lines, atomically; returns the digest of the file."""
        write_generations(path, self.rows)
        return digest_of_bytes(read_bytes(path, most=MOST_BYTES))

    def _digest_of(self, row: int, source: str) -> str:
        """A digest of what is asked and how it is scored; the same in every file and for every tokenizer. Pictures are
        not part of it."""
        record = self.prompts.record(row)
        content = [source, record["prompt"], record["ground_truth"]]
        text = json.dumps(content, sort_keys=True, default=str)
        return blake2b(text.encode(), digest_size=8).hexdigest()

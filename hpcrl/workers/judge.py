"""The judge: a second generation engine, of frozen weights, that is asked about responses; its answers are kept."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
from torch import Tensor

from hpcrl.algorithms.metrics import Mean
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.roles import JUDGE, judge_weights, offloaded
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.data.judge_prompts import Encoded, JudgePrompts
from hpcrl.data.tokenizer import end_token_ids
from hpcrl.engine.checkpoint.manifest import MANIFEST
from hpcrl.engine.checkpoint.store import is_hugging_face
from hpcrl.engine.engine import TrainEngine
from hpcrl.engine.offload import HostMemory, Offload, Offloadable, storages_of
from hpcrl.model.build import DTYPES, copy_boxes, initial_weight
from hpcrl.model.hf_files import open_weights
from hpcrl.model.params import Shard, engine_layout, shards
from hpcrl.model.shape import ModelShape
from hpcrl.rewards.judge import Question, Sample, sample_scores
from hpcrl.rollout.engines.native.engine import native_engine
from hpcrl.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from hpcrl.runtime import platform
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.sandbox.foreign_files import read_text, writable
from hpcrl.workers.scorer import response_text, responses_of

if TYPE_CHECKING:
    from hpcrl.config.schema import Config, JudgeConfig
    from hpcrl.runtime.groups import RoleGroups
    from hpcrl.workers.team import Inputs, Team

log = logging.getLogger(__name__)


def answer_key(*parts: str | int | float) -> str:
    """Name of what determines an answer: the judge, its sampling, its prompt."""
    return blake2b(json.dumps(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class VerdictCache:
    """Key -> the judge's answer, at most `size` of them: the ones used last.

    Lives on a leader. `path` is this rank's own file, which an earlier attempt may have written. A line that a kill has
    cut off is ignored.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._path: Path | None = path
        self._file: TextIO | None = None
        self._num_lines = 0  # in the file
        if path.exists():
            self._read(path)

    def get(self, key: str) -> str | None:
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key]

    def put(self, key: str, answer: str) -> None:
        """Keep an answer; when this returns, it survives a kill of the process."""
        self._keep(key, answer)
        try:
            self._write(key, answer)
        except OSError as error:
            log.warning("judge: answers are no longer kept in %s: %s", self._path, error.strerror)
            self._path = None

    def _keep(self, key: str, answer: str) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            log.warning("judge: answers of an earlier attempt are not used: %s: %s", path, error.strerror)
            return
        self._num_lines = len(lines)
        for line in lines:
            try:
                key, answer = json.loads(line)
            except (ValueError, TypeError):
                continue
            if isinstance(key, str) and isinstance(answer, str):
                self._keep(key, answer)

    def _write(self, key: str, answer: str) -> None:
        """Append to the file, or write it anew without what was dropped. Raises OSError."""
        if self._path is None:
            return
        if self._num_lines >= 2 * self._size:
            draft = self._path.with_suffix(".tmp")
            draft.write_text("".join(map(cache_line, self._answers.items())), encoding="utf-8")
            os.replace(draft, self._path)
            self._file, self._num_lines = None, len(self._answers)
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8")
        self._file.write(cache_line((key, answer)))
        self._file.flush()
        self._num_lines += 1


def cache_line(item: tuple[str, str]) -> str:
    """A line of the file. Its line break comes first, and so ends a line that a kill has cut off."""
    return f"\n{json.dumps(item)}"


RETRY_TEMPERATURE = 1.0  # where the first answer is the likeliest one: that would come again
SHOWN = 200  # characters of an answer in the log


class JudgeWorker(Worker):
    """Asks the judge about responses. Questions and answers are on leaders; the other ranks generate with them."""

    spec = JUDGE

    def __init__(
        self, groups: RoleGroups, engine: RolloutEngine, shape: ModelShape, config: Config, inputs: Inputs
    ) -> None:
        super().__init__(groups.layout, groups.rank)
        self.cfg: JudgeConfig = config.reward.judge
        self.engine = engine
        self.seed = config.run.seed
        self.datasets, self.policy_tokenizer = inputs.prompts, inputs.tokenizer
        assert inputs.judge is not None
        self.prompts: JudgePrompts = inputs.judge
        self.end_ids = end_token_ids(self.prompts.tokenizer)
        self.shape, self.groups = shape, groups
        self.shards = shards(shape, engine_layout(shape, self.layout.tp), groups.coord.tp)
        self.weights_name = answer_key(str(shape), self.seed)
        if judge_weights(config) is None:
            log.warning("reward.judge.init_from and model.path are null: the judge has random weights")
            draw_weights(engine.weights(), shape, self.shards, self.seed)
        device = platform.device()
        weights = Offloadable(lambda: storages_of(engine.weights().values()), HostMemory(pinned=device.type == "cuda"))
        self.offload = Offload({"parameters": weights} if offloaded(config, JUDGE) else {}, device)
        self.cache: VerdictCache | None = None
        if self.is_leader:
            path = run_directory(config) / "judge" / f"rank_{self.rank:05d}.jsonl"
            self.cache = VerdictCache(path, self.cfg.cache_size)
        self.engine.sleep()
        self.offload.unload()

    @classmethod
    def build(cls, team: Team, role: str) -> JudgeWorker | None:
        groups = team.groups.get(role)
        if groups is None:
            return None
        config, cfg = team.config, team.config.reward.judge
        model, shape = JUDGE.architecture(config), team.shape_of(role)
        longest = cfg.max_prompt_length + cfg.max_response_length
        ranks_on_node = team.world.local_size
        engine = native_engine(groups, shape, cfg, DTYPES[model.dtype], longest, ranks_on_node=ranks_on_node)
        return cls(groups, engine, shape, config, team.inputs)

    def host_buffers(self) -> int:
        return self.offload.host_bytes

    @register(Dispatch.ONE_TO_ALL)
    def load_frozen(self, folder: str) -> None:
        """Load the judge's weights: those of a Hugging Face directory, or the policy of a checkpoint."""
        path, weights = Path(folder), self.engine.weights()
        with self.offload.on_device("parameters"):
            if is_hugging_face(path):
                open_weights(path, self.shape).load(self.shape, self.shards, weights)
            else:
                self._load_checkpoint(path / "actor", weights)
        self.weights_name = name_of(path)

    def _load_checkpoint(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        from hpcrl.engine.checkpoint.sharded_load import load_sharded

        if self.shape.routed is not None and self.layout.tp > 1:
            raise InputError(
                f"reward.judge.init_from: {path.parent} is a checkpoint of a mixture of experts, and "
                f"placement.judge.tp={self.layout.tp} splits each expert; make a Hugging Face directory of it (`hpcrl "
                "convert`)"
            )
        model = TrainEngine(self.shape, self.groups, head="lm", dtype=next(iter(weights.values())).dtype)
        load_sharded(model, path, optimizer=False, adapters=False)
        for name, tensor in model.named_shards().items():
            weights[name].copy_(tensor)
        del model
        gc.collect()  # modules hold each other

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=("input_ids", "response_mask", "row", "epoch", "prompt?"),
        writes=("verdicts",),
        group_by="row",
        phase="judge",
    )
    def judge(self, batch: DataProto) -> DataProto:
        """Per sample `judge_score`, float32, NaN where no verdict can be read; and the column `verdicts`: the judge's
        answers about the sample, in the order of the questions, as JSON in UTF-8, uint8; null where it was not asked.

        An answer depends on the judge and the text of its prompt. Equal prompts are asked about once.
        """
        samples = self._samples(batch) if self.is_leader else []
        questions = self.prompts.judging.questions(samples)
        counts = Counter[str]()  # answers that this call needs, and those of them that are there already
        answers = self._answers(questions, counts)
        if not self.is_leader:
            return DataProto()
        last_answers = [answers[question.text] for question in questions]
        values = [self._value(question, answer) for question, answer in zip(questions, last_answers, strict=True)]
        scores = sample_scores(len(samples), questions, values)
        self._warn(last_answers, values)
        about: list[list[str | None]] = [[] for _ in samples]
        for question, answer in zip(questions, last_answers, strict=True):
            for index in (question.first, question.second):
                if index is not None:
                    about[index].append(answer)
        known = [score for score in scores if score is not None]
        metrics = {
            "reward/judge/mean": Mean(float(sum(known)), float(len(known))),
            "reward/judge/unparsed_ratio": Mean(float(len(scores) - len(known)), float(len(scores))),
            "perf/judge/cached_ratio": Mean(float(counts["cached"]), float(counts["needed"])),
        }
        return DataProto(
            {"verdicts": Ragged.from_rows([encoded(answers) for answers in about], np.uint8)},
            {"judge_score": np.array([np.nan if score is None else score for score in scores], np.float32)},
            {"metrics": metrics},
        )

    def _samples(self, batch: DataProto) -> list[Sample]:
        dataset, columns = self.datasets[batch.meta_info["split"]], batch.samples
        rows = columns["row"].tolist()
        prompts = columns["prompt"].tolist() if "prompt" in columns else rows
        groups = zip(rows, columns["epoch"].tolist(), prompts, strict=True)
        return [
            self.prompts.sample(dataset.record(row), response_text(self.policy_tokenizer, response), group)
            for row, response, group in zip(rows, responses_of(batch), groups, strict=True)
        ]

    def _answers(self, questions: Sequence[Question], counts: Counter[str]) -> dict[str, str | None]:
        """Text of each question -> the judge's last answer, on the leader; collective over the replica."""
        asked = {question.text: question for question in questions}
        prompts = {text: self.prompts.encode(text) for text in asked}
        answers: dict[str, str | None] = dict.fromkeys(asked)
        unanswered = {text: question for text, question in asked.items() if prompts[text].ids is not None}
        with self.offload.on_device("parameters"):
            self.engine.wake()
            for attempt in range(1 + self.cfg.num_retries):
                answers |= self._attempt({text: prompts[text] for text in unanswered}, attempt, counts)
                unanswered = {text: one for text, one in unanswered.items() if self._value(one, answers[text]) is None}
            self.engine.sleep()
        return answers

    def _attempt(self, prompts: dict[str, Encoded], attempt: int, counts: Counter[str]) -> dict[str, str | None]:
        """An answer to each prompt, cached or drawn."""
        temperature = self.cfg.temperature or (RETRY_TEMPERATURE if attempt else 0.0)
        judge = self.weights_name, self.seed, self.cfg.max_response_length, temperature, attempt
        names = {text: answer_key(*judge, prompt.text) for text, prompt in prompts.items()}  # in the cache
        answers: dict[str, str | None] = {}
        if self.cache is not None:
            answers = {text: answer for text, name in names.items() if (answer := self.cache.get(name)) is not None}
        counts.update(needed=len(prompts), cached=len(answers))
        uncached = [text for text in prompts if text not in answers]
        requests = [Request(prompts[text].ids or [], answer_key(prompts[text].text), attempt) for text in uncached]
        requests = self.context.broadcast(self.layout, requests if self.is_leader and requests else None) or []

        def finished(index: int, done: Completion) -> None:
            if self.cache is not None:
                text = uncached[index]
                answers[text] = self.prompts.tokenizer.decode(done.token_ids.tolist(), skip_special_tokens=True)
                self.cache.put(names[text], str(answers[text]))

        sampling = SamplingParams(self.cfg.max_response_length, temperature, eos_token_ids=self.end_ids)
        options: dict[str, Any] = {"on_finished": finished, "on_step": self._on_step}
        self.engine.generate(requests, sampling, seed=self.seed, step=0, **options)
        return answers

    def _value(self, question: Question, answer: str | None) -> float | None:
        return None if answer is None else self.prompts.judging.value(question, answer)

    def _warn(self, answers: Sequence[str | None], values: Sequence[float | None]) -> None:
        unread = [answer for answer, value in zip(answers, values, strict=True) if value is None]
        if not unread:
            return
        shown = next((answer for answer in unread if answer is not None), None)
        log.warning(
            "judge: %d of %d questions have no verdict that reward.judge.pattern finds; %s",
            *(len(unread), len(values)),
            f"an answer: {shown[:SHOWN]!r}"
            if shown is not None
            else "their prompts are longer than "
            "reward.judge.max_prompt_length, or have characters that the judge's tokenizer lacks",
        )

    def _on_step(self) -> None:
        """Called between two tokens: send other ranks the rows that they need."""
        self.tick()
        if self.is_leader:
            self.context.poll()


def draw_weights(weights: Mapping[str, Tensor], shape: ModelShape, own: Sequence[Shard], seed: int) -> None:
    """Fill an engine's buffers with random weights, equal in every layout."""
    with torch.no_grad():
        for shard in own:
            whole = initial_weight(shape, shard.name, shard.global_shape, seed, shard.initial)
            copy_boxes(whole, weights[shard.name], shard)


def name_of(folder: Path) -> str:
    """A name for the weights in a checkpoint or a Hugging Face directory, without reading them."""
    if (folder / MANIFEST).is_file():
        return answer_key(read_text(folder / MANIFEST))
    files = sorted(file for file in folder.iterdir() if file.suffix in (".json", ".safetensors"))
    return answer_key(*(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files))


def encoded(answers: Sequence[str | None]) -> np.ndarray:
    """uint8 (bytes,)"""
    text = json.dumps(answers, ensure_ascii=False)
    return np.frombuffer(writable(text).encode(), np.uint8)

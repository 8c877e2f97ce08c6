"""Scoring of responses: each leader of the rollout role scores those of its replica, as they finish."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrl.algorithms.metrics import Sum
from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.plugins import parameters
from hpcrl.config.roles import SCORER
from hpcrl.controller.register import Dispatch, Worker, register
from hpcrl.data.prompts import PromptDataset
from hpcrl.data.tokenizer import end_token_ids
from hpcrl.rewards.manager import REWARD_MANAGERS, RewardManager, ScoreRequest, Scores
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.job import run_directory
from hpcrl.runtime.layout import Layout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpcrl.config.schema import RewardConfig
    from hpcrl.workers.team import Team


@dataclass(eq=False)
class ResponseScorer:
    """Scores responses on a leader. The rollout role starts the scoring, the scorer role takes the scores.

    Without a manager every score is 0, to which a reward model's score is added.
    """

    manager: RewardManager | None
    tokenizer: PreTrainedTokenizerBase
    prompts: dict[str, PromptDataset]

    @classmethod
    def build(cls, team: Team) -> ResponseScorer:
        config, manager = team.config, None
        if config.uses_rules:
            log_path = run_directory(config) / "logs" / f"scorer_{team.world.rank:05d}.log"
            chosen = REWARD_MANAGERS.get(config.reward.reward_manager.name)
            params = parameters(config, "reward", chosen.name)
            manager = chosen.function(config.reward, params, config.data.max_response_length, str(log_path))
        return cls(manager, team.inputs.tokenizer, team.inputs.prompts)

    def begin(
        self,
        split: str,
        row: int,
        response: np.ndarray,
        finish_reason: str,
        turns: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start scoring a response to a prompt; `response` int32 (length,). Does not wait.

        Args:
            turns: added to extra_info for a response of several turns. A recorded response is scored without it.
        """
        if self.manager is None:
            return
        record = self.prompts[split].record(row)
        text, extra = response_text(self.tokenizer, response), {**record["extra_info"], **turns}
        source, truth = record["data_source"], record["ground_truth"]
        request = ScoreRequest(source, text, truth, extra, finish_reason, len(response))
        self.manager.submit(key_of(split, row, response, finish_reason), request)

    def is_ready(self, split: str, row: int, response: np.ndarray, finish_reason: str) -> bool:
        """Whether the score of a response that has begun is available, so that `take` would not wait for it."""
        return self.manager is None or self.manager.is_ready(key_of(split, row, response, finish_reason))

    def pump(self) -> None:
        """Advance scoring. Does not wait."""
        if self.manager is not None:
            self.manager.pump()

    def take_scores(
        self, split: str, rows: Sequence[int], responses: Sequence[np.ndarray], finish_reasons: Sequence[str]
    ) -> Scores:
        """As `RewardManager.collect`; starts the scoring of responses for which it has not begun."""
        if self.manager is None:
            zeros = np.zeros(len(rows), np.float32)
            return Scores(zeros, zeros, [{} for _ in rows], {})
        keys = [key_of(split, *one) for one in zip(rows, responses, finish_reasons, strict=True)]
        needed: Counter[Hashable] = Counter()
        for key, row, response, reason in zip(keys, rows, responses, finish_reasons, strict=True):
            needed[key] += 1
            if self.manager.submitted(key) < needed[key]:
                self.begin(split, row, response, reason)
        return self.manager.collect(keys)

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()


class ScorerWorker(Worker):
    """Returns scores as columns. `scorer` is None on ranks that are not leaders."""

    spec = SCORER

    @classmethod
    def build(cls, team: Team, role: str) -> ScorerWorker | None:
        rollout = team.workers.get(team.specs[role].on[0])
        if rollout is None:
            return None
        return cls(team.layouts[role], team.world.rank, rollout.scorer, team.config.reward)  # type: ignore[attr-defined]

    def __init__(self, layout: Layout, rank: int, scorer: ResponseScorer | None, cfg: RewardConfig) -> None:
        super().__init__(layout, rank)
        self.scorer = scorer
        self.cfg = cfg

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=(
            *("input_ids", "response_mask", "row", "finish_reason", "rm_score?", "judge_score?"),
            *("turn_rewards?", "environment?", "show?"),
        ),
        writes=("token_level_scores",),
        leader_only=True,
        reentrant=True,
    )
    def score(self, batch: DataProto) -> DataProto:
        """Scores of whole responses, placed on their last token. Per sample: `score`, float32; `acc`, float32, the
        scorer's, else its score, and NaN where scoring failed; `extras`, what else the scorer returned, {} where
        scoring failed.

        The rewards of an environment, `turn_rewards`, are on the last tokens of turns, and are added. Its last info,
        `environment`, is in the extras, its `acc` in place of the scorer's; `acc` is NaN where the environment failed.

        A reward model's `rm_score` and a judge's `judge_score` are added: score = rule_weight * rule + the sum of
        weight * score over the two. Then the extras hold all parts, as `rule_score`, `rm_score` and `judge_score`;
        InputError where the score is not finite. A `judge_score` of NaN is not in the extras, and counts as
        reward.judge.default_score. Where the batch has a bool column `show`, the texts of those rows come back too.
        """
        assert self.scorer is not None
        responses = responses_of(batch)
        lengths = batch.fetch("response_mask").lengths
        rows, reasons = batch.samples["row"].tolist(), batch.samples["finish_reason"].tolist()
        split = batch.meta_info["split"]
        scores, acc, extras, counts = self.scorer.take_scores(split, rows, responses, reasons)
        models: dict[str, np.ndarray] = {
            name: batch.samples[name] for name in ("rm_score", "judge_score") if name in batch.samples
        }
        if models:
            scores = self._add_models(scores, extras, models, rows)
            acc = acc if self.scorer.manager is not None else scores
        values = np.zeros(int(lengths.sum()), np.float32)
        values[lengths.cumsum()[lengths > 0] - 1] = scores[lengths > 0]
        if "turn_rewards" in batch.tokens:
            rewards = batch.fetch("turn_rewards").values
            values += rewards
            owners = np.repeat(np.arange(len(lengths)), lengths)
            scores = scores + np.bincount(owners, rewards, len(lengths)).astype(np.float32)
            acc = _environment_accuracy(batch, scores if self.scorer.manager is None else acc, extras)
        samples = {"score": scores, "acc": acc, "extras": np.array(extras, object)}
        if "show" in batch.samples:
            dataset, tokenizer, mask = self.scorer.prompts[split], self.scorer.tokenizer, batch.samples["show"]
            texts = [
                (dataset.prompt_text(row, ids=prompt), response_text(tokenizer, response)) if show else ("", "")
                for row, prompt, response, show in zip(rows, prompts_of(batch), responses, mask.tolist(), strict=True)
            ]
            samples["prompt_text"], samples["response_text"] = np.array(texts, object).reshape(-1, 2).T
        metrics = {name: Sum(count) for name, count in counts.items()}
        return DataProto({"token_level_scores": Ragged.from_lengths(values, lengths)}, samples, {"metrics": metrics})

    def _add_models(
        self,
        scores: np.ndarray,
        extras: list[dict[str, float | str]],
        models: Mapping[str, np.ndarray],
        rows: Sequence[int],
    ) -> np.ndarray:
        parts = {"rule_score": scores, **models}
        for index, extra in enumerate(extras):
            numbers = {name: float(part[index]) for name, part in parts.items()}
            extra |= {name: part for name, part in numbers.items() if name != "judge_score" or not math.isnan(part)}
        total = self.cfg.rule_weight * scores
        if "rm_score" in models:
            total = total + self.cfg.reward_model.weight * models["rm_score"]
        if "judge_score" in models:
            judge, judged = self.cfg.judge, models["judge_score"]
            total = total + judge.weight * np.where(np.isnan(judged), np.float32(judge.default_score), judged)
        total = total.astype(np.float32)
        for bad in np.flatnonzero(~np.isfinite(total))[:1]:  # it would spoil the whole batch
            name, part = next(
                (item for item in models.items() if not math.isfinite(item[1][bad])), ("rule_score", scores)
            )
            model, check = {
                "rm_score": ("reward model", "reward.reward_model's checkpoint and dtype"),
                "judge_score": ("judge", "reward.judge.pattern and scale"),
                "rule_score": ("rule", "the weights of the scores in reward"),
            }[name]
            raise InputError(
                f"the {model} gave {name}={part[bad]} for a response to row {rows[bad]}, whose score is {total[bad]} "
                f"with it; expected a finite number: check {check}"
            )
        return total

    @register(Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        if self.scorer is not None:
            self.scorer.close()


def response_text(tokenizer: PreTrainedTokenizerBase, response: np.ndarray) -> str:
    """A response, int32 (length,), as text, without the token that ended it.

    Other special tokens are shown, so that a scorer does not accept an answer that contains one.
    """
    ids = response.tolist()
    return str(tokenizer.decode(ids[:-1] if ids and ids[-1] in end_token_ids(tokenizer) else ids))


def _environment_accuracy(batch: DataProto, acc: np.ndarray, extras: list[dict[str, float | str]]) -> np.ndarray:
    """Add the infos of environments to the extras, and return the accuracy of each sample, float32 (N,): theirs, else
    `acc`, and NaN where they failed."""
    found, samples = acc.copy(), batch.samples
    for index, (info, reason) in enumerate(zip(samples["environment"], samples["finish_reason"], strict=True)):
        extras[index] = extras[index] | info
        value = info.get("acc", found[index])
        found[index] = np.nan if reason == "error" or isinstance(value, str) else value
    return found


def key_of(split: str, row: int, response: np.ndarray, finish_reason: str) -> Hashable:
    """A key of what is scored, not of the sample: equal responses to one prompt have equal scores, so a score that was
    not taken cannot go to another response."""
    return split, row, finish_reason, np.asarray(response, np.int32).tobytes()


def prompts_of(batch: DataProto) -> list[np.ndarray]:
    """The prompt tokens of every row, int32 (length,); those of an environment are among them."""
    sequences, lengths = batch.fetch("input_ids"), batch.fetch("response_mask").lengths.tolist()
    return [sequences.row(index)[: sequences.lengths[index] - length] for index, length in enumerate(lengths)]


def responses_of(batch: DataProto) -> list[np.ndarray]:
    """The response tokens of every row, int32 (length,)."""
    sequences = batch.fetch("input_ids")
    lengths = batch.fetch("response_mask").lengths.tolist()
    ends = sequences.offsets[1:].tolist()
    return [sequences.values[end - length : end] for end, length in zip(ends, lengths, strict=True)]

"""Responses as columns of a batch: those that are drawn, and those of a recording."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpcrl.algorithms.metrics import Metric, Sum
from hpcrl.batch.data_proto import NOT_RECORDED, Columns, DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.observe.read.archive import read_step
from hpcrl.observe.record.archive import step_path
from hpcrl.rollout.environments.turn_handler import turn_columns, turn_metrics
from hpcrl.rollout.protocol import Request, Trajectory
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpcrl.config.schema import MultiTurnConfig
    from hpcrl.workers.rollout import RolloutWorker

# Metrics that rank 0 reads.
ROLLOUT_BUSY_S, ROLLOUTS_REUSED, ROLLOUTS_STALE = "perf/rollout_busy_s", "perf/rollouts_reused", "perf/rollouts_stale"
TOWER_FLOPS = "perf/tower_flops"

RECORDED = ("input_ids", "response_mask", "rollout_log_probs")
WRITTEN = (*RECORDED, "routed_experts?", "pictures?", "turn_rewards?", "turn_states?", "sequence_starts?")


def response_columns(
    requests: Sequence[Request], trajectories: Sequence[Trajectory], routed_width: int = 0
) -> DataProto:
    """Responses as columns: sequences are prompt then response; `response_mask` and `rollout_log_probs` have an entry
    per response token, `routed_experts`, if responses have them, a row per token of the sequence.

    Args:
        routed_width: numbers in such a row, if there is to be one although no response may have run; 0: as responses
            have them.
    """
    pairs = zip(requests, trajectories, strict=True)
    prompts = [it.prompt_ids if one.prompt_ids is None else one.prompt_ids for it, one in pairs]
    prompt_length = np.array([len(prompt) for prompt in prompts], np.int32)
    response_length = np.array([len(one.token_ids) for one in trajectories], np.int32)
    ids = [np.concatenate([prompt, one.token_ids]) for prompt, one in zip(prompts, trajectories, strict=True)]
    columns: Columns = {
        "input_ids": Ragged.from_rows(ids, np.int32),
        "response_mask": Ragged.from_rows([one.mask for one in trajectories], np.int32),
        "rollout_log_probs": Ragged.from_rows([one.log_probs for one in trajectories], np.float32),
    }
    parts = [one.routed_experts for one in trajectories]
    if width := routed_width or next((part.shape[1] for part in parts if part is not None), 0):
        columns["routed_experts"] = _experts(parts, prompt_length + response_length, width)
    reasons = np.array([one.finish_reason for one in trajectories], dtype=object)
    samples = {"prompt_length": prompt_length, "response_length": response_length, "finish_reason": reasons}
    return DataProto(columns, samples, {"metrics": _prefill_metrics(trajectories)})


def _prefill_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    """Return the prefilled tokens of engines that count them."""
    computed, reused = (sum(counts) for counts in zip((0, 0), *(one.prefill for one in trajectories), strict=True))
    if not computed + reused:
        return {}
    return {
        "perf/prefill_tokens": Sum(float(computed)),
        "perf/prefix_cache_hit_tokens": Sum(float(reused)),
    }


def conversation_columns(trajectories: Sequence[Trajectory], cfg: MultiTurnConfig) -> DataProto:
    """`sequence_starts` and counts of turns; of an environment also `turn_rewards` and `turn_states`, on the last
    tokens of turns, and `environment`, its last info of each sample."""
    nothing, counts = np.zeros(len(trajectories), np.int64), dict(turn_columns(trajectories))
    starts = _optional([one.sequence_starts for one in trajectories], np.int32, nothing)
    batch = DataProto({"sequence_starts": starts}, counts, {"metrics": turn_metrics(trajectories)})
    if not cfg.has_environment:
        return batch
    lengths = np.array([len(one.token_ids) for one in trajectories])
    columns: Columns = {
        "turn_rewards": _optional([one.rewards for one in trajectories], np.float32, lengths),
        "turn_states": _optional([one.states for one in trajectories], np.int32, lengths),
    }
    infos = np.empty(len(trajectories), object)
    infos[:] = [dict(one.info or {}) for one in trajectories]
    return batch.union(DataProto(columns, {"environment": infos}))


def _optional(rows: Sequence[np.ndarray | None], dtype: DTypeLike, lengths: np.ndarray) -> Ragged:
    """Column of the rows, with as many zeros as in `lengths` for those that are None."""
    pairs = zip(rows, lengths, strict=True)
    return Ragged.from_rows([np.zeros(length, dtype) if row is None else row for row, length in pairs], dtype)


def _experts(parts: Sequence[np.ndarray | None], lengths: np.ndarray, width: int) -> Ragged:
    """Column `routed_experts` (see `hpcrl.engine.microbatch`); tokens that were not run, such as the last one, have no
    record."""
    values = np.full((int(lengths.sum()), width), NOT_RECORDED, np.int16)
    ends = lengths.cumsum().tolist()
    for part, end, length in zip(parts, ends, lengths.tolist(), strict=True):
        if part is not None:  # else its environment failed before the model had run
            values[end - length :][: len(part)] = part
    return Ragged.from_lengths(values.reshape(-1), lengths * width)


def recorded_responses(worker: RolloutWorker, batch: DataProto, folder: str, *, scores: bool) -> DataProto:
    """Responses of meta_info["step"] in the archive `folder`, for a worker's prompts; `position` is the row there.

    Args:
        scores: whether to read their scores as well.
    """
    needs_experts = worker.config.actor.router_replay.mode == "R3"
    names = [*RECORDED, *["token_level_scores"] * scores, *["routed_experts?"] * needs_experts]
    names += ["turn_rewards?", "turn_states?", "sequence_starts?"]
    tokens, samples, _ = read_step(step_path(Path(folder), batch.meta_info["step"]), names)
    if needs_experts and "routed_experts" not in tokens:
        raise InputError(
            f"{folder}: the recording has no routed_experts, which actor.router_replay.mode=R3 "
            "replays; record with R3, or use another mode"
        )
    rows = batch.samples["position"]
    samples = {name: values[rows] for name, values in samples.items()}
    _check_fit(worker, folder, tokens, [samples[name].tolist() for name in ("uid", "row", "epoch")])
    columns: Columns = {name: Ragged(values, offsets).take(rows) for name, (values, offsets) in tokens.items()}
    optional = ["num_turns", "tool_call_counts", "tool_pictures", "environment"]
    if "environment" in samples:
        samples["environment"] = np.array([json.loads(text) for text in samples["environment"]], object)
    if scores:
        optional += ["score", "acc", "extras", "rm_score", "judge_score"]
        samples["extras"] = np.array([json.loads(text) for text in samples["extras"]], object)
        if "verdicts" in samples:
            verdicts = [np.frombuffer(text.encode("utf-8"), np.uint8) for text in samples["verdicts"]]
            columns["verdicts"] = Ragged.from_rows(verdicts, np.uint8)
    given = ["prompt_length", "response_length", "finish_reason", *(name for name in optional if name in samples)]
    responses = DataProto(columns, {name: samples[name] for name in given})
    return responses if worker.pictures is None else responses.union(worker.pictures.recorded(folder, samples))


def _check_fit(
    worker: RolloutWorker, folder: str, tokens: Mapping[str, tuple[np.ndarray, np.ndarray]], samples: Sequence[list]
) -> None:
    """Raise InputError for a recording with other data files or a larger vocabulary.

    Args:
        samples: uid, row and epoch of each sample.
    """
    prompts, softmax_size = worker.prompts["train"], worker.softmax_size
    for uid, row, epoch in zip(*samples, strict=True):
        uid_now = prompts.uid(row, epoch) if row < len(prompts) else "no such row"
        if uid != uid_now:
            raise InputError(
                f"{folder}: recorded sample {uid} is {uid_now} in data.train_files; "
                "replay with the data files and the filter of the recording"
            )
    largest = tokens["input_ids"][0].max(initial=0)
    if largest >= softmax_size:
        raise InputError(
            f"{folder}: the recording has the token id {largest}, and the vocabulary ends at "
            f"{softmax_size - 1}; replay with model.softmax_vocab=config, or with the model of the recording"
        )

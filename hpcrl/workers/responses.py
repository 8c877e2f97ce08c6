"""Responses as columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcrl.batch.data_proto import Columns, DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.model.router import NOT_RECORDED
from hpcrl.rollout.protocol import Request, Trajectory


def response_columns(requests: Sequence[Request], trajectories: Sequence[Trajectory]) -> DataProto:
    """Sequences are prompt then response; `response_mask` and `rollout_log_probs` have an entry per response token,
    `routed_experts`, if responses have them, a row per token of the sequence."""
    prompt_length = np.array([len(request.prompt_ids) for request in requests], np.int32)
    response_length = np.array([len(found.token_ids) for found in trajectories], np.int32)
    ids = [
        part
        for request, found in zip(requests, trajectories, strict=True)
        for part in (request.prompt_ids, found.token_ids)
    ]
    columns: Columns = {
        "input_ids": _column(ids, np.int32, prompt_length + response_length),
        "response_mask": _column([found.mask for found in trajectories], np.int32, response_length),
        "rollout_log_probs": _column([found.log_probs for found in trajectories], np.float32, response_length),
    }
    if trajectories and trajectories[0].routed_experts is not None:
        parts = [found.routed_experts for found in trajectories]
        columns["routed_experts"] = _experts(parts, prompt_length + response_length)
    samples = {
        "prompt_length": prompt_length,
        "response_length": response_length,
        "finish_reason": np.array([found.finish_reason for found in trajectories], dtype=object),
    }
    return DataProto(columns, samples, {})


def _experts(parts: Sequence[np.ndarray | None], lengths: np.ndarray) -> Ragged:
    """See `hpcrl.engine.microbatch`; tokens that were not run, such as the last, have no recording."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        raise ValueError(f"{len(parts) - len(known)} of {len(parts)} responses have no routed_experts")
    width = known[0].shape[1]
    values = np.full((int(lengths.sum()), width), NOT_RECORDED, np.int16)
    ends = lengths.cumsum().tolist()
    for part, end, length in zip(known, ends, lengths.tolist(), strict=True):
        values[end - length :][: len(part)] = part
    return Ragged.from_lengths(values.reshape(-1), lengths * width)


def _column(parts: Sequence[np.ndarray | list[int]], dtype: type, lengths: np.ndarray) -> Ragged:
    values = np.concatenate([np.asarray(part, dtype) for part in parts]) if parts else np.zeros(0, dtype)
    return Ragged.from_lengths(values, lengths)

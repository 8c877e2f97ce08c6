"""Bounds from below of the phases' costs, from operations, weights and the KV cache only."""

from __future__ import annotations

import math

from hpcrl.forecast.memory.memory import Phase
from hpcrl.forecast.time.cost import Cost
from hpcrl.forecast.time.decode import Engine
from hpcrl.forecast.time.passes import BACKWARD_ATTENTION, PassModel
from hpcrl.forecast.time.phases import JobTimes, Timed
from hpcrl.model.operations import forward_flops

SAMPLED = 0.9  # the tokens of an engine's sequences are those of few quantiles, which may be fewer than the mean says


def least(times: JobTimes) -> list[Timed]:
    """Phases with less than their costs, after the machine's efficiency; the shortest ones are left out."""
    found = []
    for phase in times.job.phases:
        if phase.name == "rollout":
            name, seconds = "gen", _generation(times)
        elif phase.kind in ("forward", "train"):
            name, seconds = phase.name, _pass(times, phase)
        elif phase.kind == "refit":
            name, seconds = "update_weights", 0.0
        else:
            continue
        ideal = Cost(products=seconds / times.machine.efficiency.get(name, 1.0))
        found.append(Timed(name, phase.role, phase.kind, times.job.derived.roles[phase.role].ranks, ideal))
    return found


def _pass(times: JobTimes, phase: Phase) -> float:
    """All operations, at the full rate of all ranks."""
    model, lengths = times.pass_model(phase.role, phase), times.lengths
    epochs, factor, attended = 1.0, 1.0, 1.0
    if phase.kind == "train":
        passes = times.passes(phase)
        epochs = times.updates(phase) * passes.samples / times.job.derived.samples_per_step
        factor, attended = (3.0 if model.lora is None else 2.0), 1 + BACKWARD_ATTENTION
    per_token, per_output, width = _operations(model)
    samples = times.job.derived.samples_per_step * epochs / model.layout.size
    outputs = lengths.response if model.head == "lm" else 0.0
    products = lengths.mean * per_token / model.units.flops + outputs * per_output / model.head_units.flops
    attention = 2.0 * lengths.pairs * width / model.units.attended.flops
    return samples * (factor * products + attended * attention)


def _operations(model: PassModel) -> tuple[float, float, float]:
    """Of the layers per token, of the head per output, and the width of all attention."""
    shape = model.shape
    width = float(shape.num_layers * shape.num_attention_heads * (shape.head_dim + shape.v_head_dim))
    without, with_head = (forward_flops(shape, [1], outputs) for outputs in (0, 1))
    return without - 2.0 * width, with_head - without, width


def _generation(times: JobTimes) -> float:
    """Each decode step reads the weights that a token uses, and there are at least as many as the longest response has
    tokens; the KV cache is read besides."""
    engine, lengths, derived = times.engine, times.lengths, times.job.derived
    layout, most = engine.model.layout, times.job.config.rollout.max_num_seqs
    sequences = derived.samples_per_step / layout.dp
    if (running := times.steady) is not None:
        num_steps = sequences * lengths.response / min(most, running)
    else:
        longest = math.floor(lengths.longest(derived.samples_per_step))
        num_steps = max(longest, SAMPLED * sequences * lengths.response / min(most, max(1.0, sequences)))
    computing, moving = _token(engine)
    steps = max(num_steps * moving, SAMPLED * sequences * lengths.response * computing)
    return steps + engine.cached(sequences, lengths).seconds


def _token(engine: Engine) -> tuple[float, float]:
    """Seconds of the operations of a token, and of reading the weights that it uses."""
    model = engine.model
    per_token, per_output, _ = _operations(model)
    numbers = (per_token + per_output) / model.layout.tp
    return numbers / model.units.flops, numbers / 2 * model.units.itemsize / model.units.bandwidth

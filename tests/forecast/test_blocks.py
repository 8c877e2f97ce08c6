"""A kind of block that the package does not know: its bytes, its operations and its seconds are counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import pytest

from hpcrl.config.schema import RecomputeConfig
from hpcrl.forecast.memory import memory
from hpcrl.forecast.memory.activations import Pass
from hpcrl.forecast.memory.state import RoleModel
from hpcrl.forecast.time.passes import numbers_of, stages_of
from hpcrl.forecast.time.step import predict
from hpcrl.model.blocks.attention import Attention
from hpcrl.model.blocks.block import Block, Feature, Layer, Weight
from hpcrl.model.blocks.micro_batch import Computation, Held, Launches, MicroBatch
from hpcrl.model.shape import ModelShape, forward_flops
from hpcrl.runtime.layout import Layout
from tests.forecast.memory.shapes import MOE, SHAPE
from tests.forecast.time.machines import cpu
from tests.forecast.time.test_passes import LENGTH, OUTPUTS, RATE, micro, model
from tests.forecast.time.test_step import job_of, lengths_of


@dataclass(frozen=True)
class Convolution(Block):
    """Gated convolution over the last `window` tokens, in place of attention."""

    window: int

    title: ClassVar[str] = "a convolution"
    supports: ClassVar[frozenset[Feature]] = frozenset(("adapters", "context_parallel", "planned_cp"))
    recomputed: ClassVar[Literal["core_attn", "mlp", "moe"]] = "core_attn"

    def weights(self) -> Iterator[Weight]:
        yield Weight("self_attention.linear_in.weight", (3 * self.hidden_size, self.hidden_size), "rows")
        yield Weight("self_attention.kernel", (self.hidden_size,), "rows")
        yield Weight("self_attention.linear_out.weight", (self.hidden_size, self.hidden_size), "cols")

    def held(self, batch: MicroBatch) -> Held:
        state = batch.tokens * self.hidden_size // batch.layout.tp * batch.itemsize
        return Held(kept=4 * state, peak=5 * state, inputs=3 * state)

    def computation(self, batch: MicroBatch) -> Computation:
        mixed = self.window * self.hidden_size / batch.layout.tp
        return super().computation(batch)._replace(elementwise=mixed, launches=((Launches(9, 20, 7, 4), 1),))


@dataclass(frozen=True)
class Alternating(ModelShape):
    """Every other layer of the model, from the first on, has a convolution."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        plain, mixer = ModelShape.layers.func(self), Convolution(self.hidden_size, 4)  # type: ignore[attr-defined]
        return tuple(replace(layer, attention=layer.attention if n % 2 else mixer) for n, layer in enumerate(plain))


def alternating(shape: ModelShape) -> Alternating:
    return Alternating(**vars(replace(shape)))


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("again", [None, RecomputeConfig(granularity="selective")], ids=["all", "attention_again"])
def test_bytes_are_those_of_each_layers_blocks(shape: ModelShape, again: RecomputeConfig | None) -> None:
    layout, mixed, tokens = Layout((0, 1), pp=2), alternating(shape), 4 * LENGTH
    plain, changed = (
        Pass(RoleModel(it, layout, "lm", 4), tokens, tokens // 2, 3, on_gpu=True, recompute=again)
        for it in (shape, mixed)
    )
    attention, convolution = (mixed.layers[n].attention.held(MicroBatch(layout, tokens, 4)) for n in (1, 0))
    less = attention.kept - convolution.kept if again is None else attention.inputs - convolution.inputs
    for stage, count in ((0, 2), (1, 1)):  # layers 0, 2 and 4
        assert plain.kept(stage) - changed.kept(stage) == count * less
        assert sum(changed.training(stage)) < sum(plain.training(stage))


def test_weights_are_those_of_the_table() -> None:
    for shape in (alternating(SHAPE), alternating(MOE)):
        for layout in (Layout((0, 1), tp=2), Layout(tuple(range(4)), tp=2, pp=2)):
            role = RoleModel(shape, layout, "lm", 1)
            for number, stage in enumerate(stages_of(shape, layout.pp)):
                norm = shape.hidden_size * stage.is_last
                assert numbers_of(shape, stage, layout.tp, 1, 1).all + norm == role.state(number).parameters
    mixed = alternating(MOE)
    (stage,) = stages_of(mixed)
    assert [count for _, count in stage.layers] == [1, 2, 2]
    assert stage.num_layers == 5


@pytest.mark.parametrize("shape", [SHAPE, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("sizes", [{}, {"pp": 3}, {"cp": 2}], ids=["1", "pp", "cp"])
def test_operations_and_seconds_agree(shape: ModelShape, sizes: dict[str, int]) -> None:
    mixed, lengths = alternating(shape), [LENGTH] * 4
    ranks = max(sizes.values(), default=1)
    stages = model(mixed, ranks, layout=sizes).forward(micro(cp=sizes.get("cp", 1)))
    seconds = sum(stage.seconds for stage in stages) * ranks / len(stages)
    operations = forward_flops(mixed, lengths, 4 * OUTPUTS)
    assert seconds * RATE == pytest.approx(operations, rel=1e-6)
    attention = mixed.layers[1].attention
    assert isinstance(attention, Attention)
    query, key = (count * attention.head_dim for count in (attention.num_heads, attention.num_groups))
    of_pairs = 2 * query * sum(length * (length + 1) for length in lengths)
    of_weights = 2 * sum(lengths) * shape.hidden_size * (2 * query + 2 * key - 4 * shape.hidden_size)
    assert forward_flops(shape, lengths, 4 * OUTPUTS) - operations == pytest.approx(3 * (of_pairs + of_weights))


def test_a_job_is_planned_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("grpo_countdown_cpu")
    plain, rows = predict(job, cpu(), lengths_of(job)), {row.phase: row.activations for row in job.rows()}
    shape = alternating(job.models["actor"].shape)
    monkeypatch.setattr(memory, "job_shape", lambda config: shape)
    changed = job_of("grpo_countdown_cpu")
    found = predict(changed, cpu(), lengths_of(changed))
    assert changed.models["actor"].shape is shape
    assert {row.phase for row in changed.rows()} == rows.keys()
    assert all(row.activations < rows[row.phase] for row in changed.rows() if row.phase == "update_actor")
    assert found.phases["update_actor"] < plain.phases["update_actor"] and found.phases["gen"] < plain.phases["gen"]

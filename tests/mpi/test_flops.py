"""The operations that are said to be needed are those that torch sees a model do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.config.schema import OptimConfig
from hpcrl.engine.engine import TrainEngine
from hpcrl.model.shape import Lora, forward_flops, training_flops
from tests.mpi.layouts import MIXTURE, SHAPE, role_groups

LENGTH, OUTPUTS = 64, 24


def counter() -> FlopCounterMode:
    """With products that are added to gradients, which torch does not count."""

    def added(total: Any, a: Any, b: Any, **_: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added})


@pytest.mark.world(1)
@pytest.mark.parametrize("shape", [SHAPE, MIXTURE], ids=["dense", "mixture"])
def test_operations_of_one_sequence(world, shape):
    ids = np.arange(LENGTH, dtype=np.int32) % shape.vocab_size
    columns = {"input_ids": Ragged.from_rows([ids]), "response_mask": Ragged.from_rows([np.ones(OUTPUTS, np.float32)])}
    options = {"optim": OptimConfig(lr=0.0), "total_steps": 1, "head_chunk_tokens": None}
    engine = TrainEngine(shape, role_groups(world.rank, world.size)["alone"], **options)
    with counter() as forward:
        engine.log_probs(DataProto(columns), max_tokens=LENGTH, temperature=1.0)
    with counter() as both:
        engine.train(DataProto(columns), max_tokens=LENGTH, loss=lambda found, _: (found["log_probs"].sum(), {}))

    # On the CPU torch does not count attention: two products of head_dim with each key that is not behind the query.
    keys = sum(range(1, LENGTH + 1))
    attention = 2 * 2.0 * keys * shape.num_layers * shape.num_attention_heads * shape.head_dim
    needed = forward_flops(shape, [LENGTH], OUTPUTS)
    assert forward.get_total_flops() == needed - attention
    assert both.get_total_flops() == training_flops(shape, [LENGTH], OUTPUTS) - 3 * attention

    # Adapters of rank 1 take a twentieth themselves, and the first layer's input needs no gradient.
    engine = TrainEngine(shape, role_groups(world.rank, world.size)["alone"], lora=Lora(1, 1.0), **options)
    with counter() as both:
        engine.train(DataProto(columns), max_tokens=LENGTH, loss=lambda found, _: (found["log_probs"].sum(), {}))
    expected = training_flops(shape, [LENGTH], OUTPUTS, has_adapters=True) - 3 * attention
    assert both.get_total_flops() == pytest.approx(expected, rel=0.1)

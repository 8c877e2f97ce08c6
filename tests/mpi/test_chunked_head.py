"""In every layout, a head that runs in chunks of rows gives the numbers of one that runs at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpcrl.batch.ragged import Ragged
from hpcrl.engine.engine import TrainEngine
from tests.mpi.layouts import SGD, SHAPE, SOME_LAYOUTS, TIED, gradients, make_batch, part_of, policy_loss, role_groups

pytestmark = pytest.mark.ci_world(2)

if TYPE_CHECKING:
    from hpcrl.batch.data_proto import TensorBatch
    from hpcrl.runtime.world import World

K = 5


def loss(outputs: dict[str, torch.Tensor], batch: TensorBatch) -> tuple[torch.Tensor, dict[str, Any]]:
    """The policy's, and one on the log-probs at given ids."""
    value, _ = policy_loss(outputs, batch)
    at_ids = outputs["topk_log_probs"].exp().sum(2) * batch.padded("response_mask")
    return value + 0.01 * at_ids.sum(), {}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    norm = torch.stack([tensor.norm() for tensor in expected.values()]).norm()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-6 * norm, name


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_chunks_change_nothing(world: World, layout, shape, sequence_parallel):
    groups = role_groups(world.rank, world.size)[layout]
    batch = part_of(make_batch(), groups)
    engines = [
        TrainEngine(
            shape, groups, optim=SGD, seed=3, sequence_parallel=sequence_parallel, head_chunk_tokens=head_chunk_tokens
        )
        for head_chunk_tokens in (None, 7)
    ]
    outputs, ids = [], []
    for engine in engines:
        found = engine.topk_log_probs(batch, max_tokens=64, temperature=0.7, k=K)
        ids.append(found.pop("topk_ids", None))
        found |= engine.log_probs(batch, max_tokens=64, temperature=0.7, entropy=True, sum_pi_squared=True)
        outputs.append({name: torch.from_numpy(column.values) for name, column in found.items()})
    if groups.is_last_stage:
        assert_near(outputs[1], outputs[0])
        assert ids[0].equal(ids[1])
    lengths = batch.tokens["response_mask"].lengths
    batch.tokens["ids"] = Ragged.from_lengths(
        torch.randint(0, shape.vocab_size, (int(lengths.sum()) * K,), generator=torch.Generator().manual_seed(1)),
        lengths * K,
    )
    for engine in engines:
        engine.train(batch, max_tokens=64, loss=loss, temperature=0.7, entropy=True, topk_ids="ids")
    assert_near(gradients(engines[1]), gradients(engines[0]))

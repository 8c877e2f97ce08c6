"""From samples to packed micro-batches and back to response space."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcrl.batch.data_proto import DataProto
from hpcrl.batch.ragged import Ragged
from hpcrl.engine.microbatch import column_of, make_micro_batches, needed_count
from hpcrl.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    vocab_size=99,
)


def make(
    prompts: list[list[int]],
    responses: list[list[int]],
    *,
    count: int,
    max_tokens: int = 100,
    same_size=False,
    **options,
):
    rows = [p + r for p, r in zip(prompts, responses, strict=True)]
    masks = [[1.0] * len(r) for r in responses]
    batch = DataProto(
        {"input_ids": Ragged.from_rows(rows, np.int32), "response_mask": Ragged.from_rows(masks, np.float32)}
    )
    return make_micro_batches(
        batch,
        SHAPE,
        max_tokens=max_tokens,
        count=count,
        multiple=8,
        same_size=same_size,
        device=torch.device("cpu"),
        **options,
    )


def test_output_rows_predict_response_tokens():
    (micro,) = make([[1, 2], [5]], [[3, 4], [6, 7, 8]], count=1)
    assert micro.packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert micro.packed.output_rows.tolist() == [1, 2, 4, 5, 6]
    assert micro.targets.tolist() == [3, 4, 6, 7, 8]
    outputs = torch.arange(5.0, requires_grad=True)
    padded = micro.padded(outputs)
    assert padded.tolist() == [[0, 1, 0], [2, 3, 4]]
    (padded * torch.tensor([[1.0, 2, 9], [3, 4, 5]])).sum().backward()
    assert outputs.grad.tolist() == [1, 2, 3, 4, 5]
    assert [row.tolist() for row in map(column_of([micro], [outputs.detach()]).row, range(2))] == [[0, 1], [2, 3, 4]]


def test_several_outputs_of_each_token():
    (micro,) = make([[1, 2], [5]], [[3], [6, 7]], count=1)
    outputs = torch.arange(6.0).view(3, 2)
    assert micro.padded(outputs).tolist() == [[[0, 1], [0, 0]], [[2, 3], [4, 5]]]
    assert torch.equal(column_of([micro], [outputs]).padded_vectors(2), micro.padded(outputs))


def test_last_tokens_need_no_response():
    (micro,) = make([[1, 2], [5]], [[3, 4], []], count=1, outputs_at="last")
    assert micro.packed.output_rows.tolist() == [3, 4]
    outputs = torch.tensor([0.5, -1.0])
    assert micro.padded(outputs).tolist() == [[0.5], [-1.0]]
    assert column_of([micro], [outputs]).lengths.tolist() == [1, 1]


def test_pairs_are_never_parted():
    """Lengths that best fit would pair up otherwise: 9 with 1, 8 with 2, ..."""
    prompts = [[1] * length for length in (9, 8, 7, 6, 1, 2, 3, 4)]
    micros = make(prompts, [[2]] * 8, count=4, max_tokens=19, unit=2)
    found = sorted(row for micro in micros for row in micro.rows.reshape(-1, 2).tolist())
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match="3 samples are not a multiple of unit=2"):
        make(prompts[:3], [[2]] * 3, count=4, unit=2)


def test_padding_to_a_common_size_for_pipelines():
    prompts, responses = [[1] * 9, [1] * 3], [[2], [2]]
    sizes = lambda **options: [  # noqa: E731
        micro.packed.input_ids.size(1) for micro in make(prompts, responses, count=2, max_tokens=10, **options)
    ]
    assert sorted(sizes()) == [8, 16]
    assert sizes(same_size=True) == [16, 16]


def test_empty_micro_batches_are_one_dummy_token():
    micros = make([[1, 2]], [[3]], count=3)
    empty = [micro for micro in micros if len(micro) == 0]
    assert len(empty) == 2
    assert all(micro.num_outputs == 0 and micro.packed.num_tokens == 1 for micro in empty)
    assert len(column_of(empty, [torch.ones(1)] * 2)) == 0
    nothing = DataProto({})
    assert needed_count(nothing, 10) == 1


def test_samples_without_response_have_no_outputs():
    (micro,) = make([[1, 2], [3]], [[], []], count=1)
    assert micro.num_outputs == 0
    assert column_of([micro], [torch.ones(1)]).lengths.tolist() == [0, 0]


def test_sample_without_prompt_is_refused():
    with pytest.raises(ValueError, match="0 prompt tokens"):
        make([[]], [[1, 2]], count=1)

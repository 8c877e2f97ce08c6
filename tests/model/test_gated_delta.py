"""The gated delta net against that of transformers, in training and in rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from hpcrl.model.blocks.attention_modules import CachedAttention
from hpcrl.model.blocks.block import Block, CachedState
from hpcrl.model.blocks.gated_delta import GatedDelta
from hpcrl.model.build import build_model
from hpcrl.model.exact import TensorParallel
from hpcrl.model.gpt import PackedGPT, pack
from hpcrl.model.params import role_layout
from hpcrl.model.shape import ModelShape, forward_flops
from hpcrl.rollout.engines.tensorrt_llm.declaration import check_model as check_tensorrt_llm
from hpcrl.rollout.engines.vllm.declaration import check_model as check_vllm
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.groups import fake_rank
from hpcrl.runtime.layout import Layout
from tests.kernels.close import assert_near
from tests.rollout.small_model import SHAPE

BLOCK = GatedDelta(SHAPE.hidden_size, num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=12)
LENGTHS = [70, 3, 140]
SIZE = 220  # with padding at the end


def with_delta(shape: ModelShape) -> ModelShape:
    """Every fourth layer keeps its attention."""
    layers = enumerate(shape.layers, 1)
    return replace(shape, blocks=tuple(it if n % 4 == 0 else replace(it, attention=BLOCK) for n, it in layers))


@pytest.fixture(scope="module")
def model() -> Iterator[PackedGPT]:
    with fake_rank(Layout((0,)), 0) as groups:
        (chunk,) = build_model(with_delta(replace(SHAPE, num_layers=4)), groups, seed=1)
        yield chunk


@pytest.fixture(scope="module")
def module(model: PackedGPT) -> torch.nn.Module:
    net = model.decoder.layers[0].self_attention
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator) + (name == "norm.weight"))
    return net


def by_kind(rows: Tensor) -> Tensor:
    """Queries, keys and values of one key head after the other -> all queries, all keys, all values."""
    sizes = [BLOCK.head_k_dim, BLOCK.head_k_dim, BLOCK.values_per_key * BLOCK.head_v_dim]
    return torch.cat([part.flatten(0, 1) for part in rows.unflatten(0, (BLOCK.num_k_heads, -1)).split(sizes, 1)])


@pytest.fixture(scope="module")
def reference(module: torch.nn.Module) -> Qwen3NextGatedDeltaNet:
    config = Qwen3NextConfig(
        hidden_size=SHAPE.hidden_size,
        num_hidden_layers=4,
        linear_num_key_heads=BLOCK.num_k_heads,
        linear_num_value_heads=BLOCK.num_v_heads,
        linear_key_head_dim=BLOCK.head_k_dim,
        linear_value_head_dim=BLOCK.head_v_dim,
        linear_conv_kernel_dim=BLOCK.conv_width,
        rms_norm_eps=SHAPE.rms_norm_eps,
    )
    net = Qwen3NextGatedDeltaNet(config, 0)
    weights = {name.replace("in_proj.", "in_proj_qkvz."): weight for name, weight in module.named_parameters()}
    weights["conv1d.weight"] = by_kind(weights["conv1d.weight"])
    net.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    return net


def inputs() -> Tensor:
    return torch.randn(SIZE, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1))


def expected_of(reference: Qwen3NextGatedDeltaNet, x: Tensor) -> Tensor:
    return torch.cat([reference(part[None])[0] for part in x[: sum(LENGTHS)].split(LENGTHS)])


def test_outputs_and_gradients_are_those_of_transformers(
    module: torch.nn.Module, reference: Qwen3NextGatedDeltaNet
) -> None:
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    packed = pack(torch.zeros(sum(LENGTHS), dtype=torch.int64), torch.tensor(LENGTHS), SHAPE, size=SIZE)
    found = module(x.unsqueeze(1), None, packed_seq_params=packed)[0].squeeze(1)
    expected = expected_of(reference, y)
    tokens = sum(LENGTHS)
    assert_near(found[:tokens], expected, torch.float32)
    assert not found[tokens:].any()
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (found[:tokens] * weight).sum().backward()
    (expected * weight).sum().backward()
    assert_near(x.grad, y.grad, torch.float32)
    of_library = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        grad = by_kind(parameter.grad) if name == "conv1d.weight" else parameter.grad
        other = of_library[name.replace("in_proj.", "in_proj_qkvz.")].grad
        # Terms of a sum over all tokens cancel: each library is up to 8e-6 away from fp64.
        assert_near(grad, other, torch.float32, factor=5 if name in ("A_log", "dt_bias") else 1)
    module.zero_grad()


class States(CachedAttention):
    """The states of one layer's sequences."""

    def __init__(self, count: int, block: Block) -> None:
        self.new_tokens: list[int] | None = None
        cached = block.cached(1)
        assert isinstance(cached, CachedState)
        self._states = tuple(torch.zeros(count, *size) for size in cached.sizes)

    def lengths(self) -> list[int] | None:
        return self.new_tokens

    def states(self, layer: int) -> tuple[Tensor, ...]:
        return tuple(state.clone() for state in self._states)

    def save_states(self, layer: int, states: tuple[Tensor, ...]) -> None:
        assert [state.shape for state in states] == [state.shape for state in self._states]
        assert {state.dtype for state in states} == {torch.float32}
        self._states = states


@pytest.mark.parametrize("says_lengths", [True, False])
def test_parts_of_prompts_and_single_tokens_are_the_whole(
    module: torch.nn.Module, reference: Qwen3NextGatedDeltaNet, says_lengths: bool
) -> None:
    weights = dict(module.named_parameters(prefix="self_attention"))
    x = inputs()[:180].unflatten(0, (2, 90))
    with torch.no_grad():
        found = in_parts(BLOCK, weights, x, says_lengths)
        assert_near(found, reference(x), torch.float32)


def in_parts(block: Block, weights: dict[str, Tensor], x: Tensor, says_lengths: bool) -> Tensor:
    """What a block computes in rollout of two sequences of 90 tokens: 66, 20, and the others one by one."""
    tp, states, outputs = TensorParallel(None, 0, 1), States(2, block), []
    step = block.step(weights.__getitem__, linear, SHAPE.rms_norm_eps, tp)
    for part in np.split(np.arange(90), [66, 86, 87, 88, 89]):
        states.new_tokens = [len(part)] * 2 if says_lengths or len(part) > 1 else None
        found = step(0, x[:, part].flatten(0, 1), states, None)
        outputs.append(found.unflatten(0, (2, len(part))))
    return torch.cat(outputs, 1)


def test_what_it_has_not_is_one_line() -> None:
    shape = with_delta(SHAPE)
    message = r"placement.actor.cp=2: a gated delta net \(layer 0\) has no context parallelism; use cp=1"
    with pytest.raises(InputError, match=message):
        role_layout(shape, "actor", ranks=(0, 1), cp=2)
    with pytest.raises(InputError, match="actor.tp=4 does not divide linear_num_key_heads=2; use one of"):
        role_layout(shape, "actor", ranks=(0, 1, 2, 3), tp=4)


@pytest.mark.parametrize(("engine", "check"), [("tensorrt_llm", check_tensorrt_llm), ("vllm", check_vllm)])
def test_other_engines_refuse_it(engine: str, check: Callable[[ModelShape, int], None]) -> None:
    message = rf"rollout.engine={engine}: its layout of a gated delta net \(layer 0\) is not known; use engine=native"
    with pytest.raises(InputError, match=message):
        check(with_delta(SHAPE), 1)


def test_operations_do_not_grow_with_the_length() -> None:
    shape = replace(with_delta(SHAPE), num_layers=2)
    assert all(layer.attention == BLOCK for layer in shape.layers)
    assert forward_flops(shape, [200], 0) == forward_flops(shape, [100, 100], 0)

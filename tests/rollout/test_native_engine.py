"""The native engine beside a forward pass without cache, written out here, and beside itself in other batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcrl.kernels.dispatch import FP8
from hpcrl.kernels.fp8_matrix import Fp8Matrix, row_scales
from hpcrl.model.shape import ModelShape
from hpcrl.rollout.engines.engine import max_kv_bytes
from hpcrl.rollout.engines.native.engine import NativeEngine
from hpcrl.rollout.protocol import Completion, Request, SamplingParams
from tests.rollout.small_model import SHAPE, draw_weights, make_requests

MAX_LEN, LONGEST = 40, 20


def make_engine(
    shape: ModelShape = SHAPE, max_num_seqs: int = 8, max_num_batched_tokens: int = 64, seed: int = 0
) -> NativeEngine:
    engine = NativeEngine(
        shape,
        None,
        0,
        1,
        torch.float32,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_LEN,
    )
    draw_weights(engine, seed)
    return engine


def naive_logits(shape: ModelShape, weights: dict[str, Tensor], token_ids: Tensor) -> Tensor:
    """(tokens, vocabulary) of one sequence, one head and one rotated pair at a time, from megatron's weight order."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + shape.rms_norm_eps).sqrt() * weight

    def rotate(x: Tensor) -> Tensor:
        half = shape.head_dim // 2
        turned = x.clone()
        for position in range(len(x)):
            for i in range(half):
                angle = torch.tensor(position * shape.rope_theta ** (-2 * i / shape.head_dim))
                a, b = x[position, i], x[position, i + half]
                turned[position, i] = a * angle.cos() - b * angle.sin()
                turned[position, i + half] = b * angle.cos() + a * angle.sin()
        return turned

    length, width = len(token_ids), shape.head_dim
    per_group = shape.num_attention_heads // shape.num_query_groups
    hidden = weights["embedding.word_embeddings.weight"][token_ids]
    for layer in range(shape.num_layers):
        w = {name: weights[f"decoder.layers.{layer}.{name}.weight"] for name in LAYER_WEIGHTS}
        mixed = norm(hidden, w["input_layernorm"]) @ w["self_attention.linear_qkv"].T
        heads = []
        for group in range(shape.num_query_groups):
            start = group * (per_group + 2) * width
            key = rotate(mixed[:, start + per_group * width : start + (per_group + 1) * width])
            value = mixed[:, start + (per_group + 1) * width : start + (per_group + 2) * width]
            for head in range(per_group):
                query = rotate(mixed[:, start + head * width : start + (head + 1) * width])
                scores = query @ key.T / width**0.5
                scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
                heads.append(scores.softmax(-1) @ value)
        hidden = hidden + torch.cat(heads, -1) @ w["self_attention.linear_proj"].T
        both = norm(hidden, w["pre_mlp_layernorm"]) @ w["mlp.linear_fc1"].T
        gate, up = both[:, : shape.ffn_hidden_size], both[:, shape.ffn_hidden_size :]
        hidden = hidden + (gate * gate.sigmoid() * up) @ w["mlp.linear_fc2"].T
    head = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    return (norm(hidden, weights["decoder.final_layernorm.weight"]) @ head.T)[:, : shape.vocab_size]


LAYER_WEIGHTS = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probs_are_those_of_a_forward_pass_without_cache(tied: bool, temperature: float) -> None:
    shape = replace(SHAPE, tie_word_embeddings=tied)
    engine = make_engine(shape, max_num_seqs=3)
    requests = make_requests(4, samples=2, longest=LONGEST)
    completions = engine.generate(requests, SamplingParams(8, temperature=temperature, top_k=10), seed=0, step=1)
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.tensor([*request.prompt_ids, *completion.token_ids])
        start = len(request.prompt_ids)
        logits = naive_logits(shape, engine.weights(), tokens[:-1])[start - 1 :]
        expected = (logits / (temperature or 1.0)).log_softmax(-1)[range(8), tokens[start:]]
        np.testing.assert_allclose(completion.log_probs, expected, rtol=0, atol=1e-5)
        if temperature == 0:
            assert logits.argmax(-1).tolist() == completion.token_ids.tolist()
        assert completion.token_ids.dtype == np.int32
        assert completion.log_probs.dtype == np.float32


@pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), [(3, 1), (3, 64), (5, 30), (1, 64)])
def test_the_batching_does_not_change_what_is_drawn(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    requests = make_requests(12, samples=3, longest=LONGEST)
    sampling = SamplingParams(12, eos_token_ids=(1, 2, 3))
    expected = make_engine(max_num_seqs=256, max_num_batched_tokens=8192).generate(requests, sampling, seed=6, step=2)
    assert len({len(completion.token_ids) for completion in expected}) > 3
    engine = make_engine(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert_same(engine.generate(requests, sampling, seed=6, step=2), expected)
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = engine.generate([requests[i] for i in order], sampling, seed=6, step=2)
    assert_same(shuffled, [expected[i] for i in order])
    assert_same(engine.generate(requests[7:8], sampling, seed=6, step=2), expected[7:8])


def test_samples_seeds_and_steps_differ() -> None:
    engine = make_engine()
    requests = make_requests(1, samples=8, longest=LONGEST)
    sampling = SamplingParams(12)
    drawn = [
        tuple(completion.token_ids)
        for seed, step in ((0, 0), (0, 1), (1, 0))
        for completion in engine.generate(requests, sampling, seed=seed, step=step)
    ]
    assert len(set(drawn)) == 24


def test_an_end_of_sequence_token_ends_the_response_and_belongs_to_it() -> None:
    engine = make_engine()
    requests = make_requests(10, samples=2, longest=LONGEST)
    free = engine.generate(requests, SamplingParams(12), seed=0, step=0)
    assert {completion.finish_reason for completion in free} == {"length"}
    assert {len(completion.token_ids) for completion in free} == {12}
    stops = (3, 4, 5, 6)
    ended = engine.generate(requests, SamplingParams(12, eos_token_ids=stops), seed=0, step=0)
    assert {completion.finish_reason for completion in ended} == {"length", "stop"}
    for one, whole in zip(ended, free, strict=True):
        places = np.flatnonzero(np.isin(whole.token_ids, stops))
        length = places[0] + 1 if len(places) else 12
        assert one.token_ids.tolist() == whole.token_ids[:length].tolist()
        assert one.finish_reason == ("stop" if len(places) else "length")
    ignoring = engine.generate(requests, SamplingParams(12, ignore_eos=True, eos_token_ids=stops), seed=0, step=0)
    assert_same(ignoring, free)


def test_top_k_one_is_greedy() -> None:
    engine = make_engine()
    requests = make_requests(5, samples=1, longest=LONGEST)
    greedy = engine.generate(requests, SamplingParams(8, temperature=0.0), seed=0, step=0)
    assert_same(engine.generate(requests, SamplingParams(8, top_k=1), seed=3, step=9), greedy)
    assert_same(engine.generate(requests, SamplingParams(8, top_p=1e-6), seed=3, step=9), greedy)


def test_memory_stays_where_it_is_until_the_engine_sleeps() -> None:
    engine = make_engine()
    requests = make_requests(5, samples=3, longest=LONGEST)
    sampling = SamplingParams(8)
    first = engine.generate(requests, sampling, seed=0, step=0)
    cache, weights = engine._cache, {name: weight.data_ptr() for name, weight in engine.weights().items()}
    [plane] = cache.planes
    address, size = plane.keys.data_ptr(), plane.keys.nbytes + plane.values.nbytes
    del plane
    assert size == max_kv_bytes(SHAPE, 1, torch.float32.itemsize, 8, MAX_LEN)
    engine.generate(make_requests(30, samples=2, longest=LONGEST, seed=1), SamplingParams(20), seed=1, step=1)
    [plane] = cache.planes
    assert (plane.keys.data_ptr(), plane.keys.nbytes + plane.values.nbytes) == (address, size)
    del plane
    engine.sleep()
    assert not cache.planes
    with pytest.raises(RuntimeError, match="wake"):
        engine.generate(requests, sampling, seed=0, step=0)
    engine.wake()
    assert {name: weight.data_ptr() for name, weight in engine.weights().items()} == weights
    again = engine.generate(requests, sampling, seed=0, step=0)
    assert_same(again, first)
    assert all((a.log_probs == b.log_probs).all() for a, b in zip(again, first, strict=True))


def test_no_requests_no_completions() -> None:
    assert make_engine().generate([], SamplingParams(8), seed=0, step=0) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "no tokens"), ([1] * (MAX_LEN - 7), "max_model_len=40"), ([50], "0 to 49"), ([-1], "0 to 49")],
)
def test_a_prompt_that_cannot_be_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine().generate([Request(prompt, "file:0:0")], SamplingParams(8), seed=0, step=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts", [0, 3])
def test_8_bits_are_those_of_weights_that_were_rounded_before(dtype: torch.dtype, num_experts: int) -> None:
    """Bit for bit; the head, the embeddings, the norms and routers keep their dtype."""
    shape = replace(SHAPE, num_experts=num_experts, moe_topk=2, moe_ffn_hidden_size=24) if num_experts else SHAPE
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": MAX_LEN}
    engine = NativeEngine(shape, None, 0, 1, dtype, quantization="fp8", **sizes)
    rounded = NativeEngine(shape, None, 0, 1, dtype, **sizes)
    draw_weights(rounded)
    for name, weight in rounded.weights().items():
        own = engine.weights()[name]
        if isinstance(own, Fp8Matrix):
            own.scales.copy_(row_scales(weight.float().abs().amax(1, keepdim=True)))
            own.copy_(weight)
            weight.copy_(own.dequantized())
        else:
            own.copy_(weight)
    matrices = [weight for weight in engine.weights().values() if isinstance(weight, Fp8Matrix)]
    assert len(matrices) == (2 + 2 * max(1, num_experts)) * SHAPE.num_layers
    requests = make_requests(6, samples=2, longest=LONGEST)
    found, expected = (each.generate(requests, SamplingParams(12), seed=0, step=1) for each in (engine, rounded))
    assert_same(found, expected)
    assert all((a.log_probs == b.log_probs).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("windows", [None, (6, None)])
@pytest.mark.parametrize("max_num_batched_tokens", [64, 12], ids=["whole", "in parts"])
def test_a_cache_in_8_bits(windows: tuple[int | None, ...] | None, max_num_batched_tokens: int) -> None:
    """A quarter of fp32's bytes, also where these are few and sequences wait and move."""
    shape, sampling = replace(SHAPE, windows=windows), SamplingParams(2, temperature=0.0)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": MAX_LEN}
    room = max_kv_bytes(shape, 1, 1, 3, MAX_LEN) + (max_kv_bytes(shape, 1, 1, 5, MAX_LEN) if windows else 0)
    plain, small = (
        NativeEngine(shape, None, 0, 1, torch.float32, cache_dtype=dtype, kv_cache_bytes=nbytes, **sizes)
        for dtype, nbytes in ((None, None), (FP8, room))
    )
    for engine in (plain, small):
        draw_weights(engine)
    assert all(plane.keys.dtype == FP8 for plane in small._cache.planes)
    requests = make_requests(12, samples=1, longest=LONGEST)
    expected, found = (engine.generate(requests, sampling, seed=0, step=1) for engine in (plain, small))
    gaps = np.concatenate([np.abs(a.log_probs - b.log_probs) for a, b in zip(found, expected, strict=True)])
    assert 1e-4 < gaps.max() < 0.3 and gaps.mean() < 0.05
    assert_same(small.generate(requests, sampling, seed=0, step=1), found)


def test_bf16_runs() -> None:
    engine = NativeEngine(
        SHAPE, None, 0, 1, torch.bfloat16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=MAX_LEN
    )
    for weight in engine.weights().values():
        weight.normal_(std=0.1)
    completions = engine.generate(make_requests(3, samples=2, longest=LONGEST), SamplingParams(8), seed=0, step=0)
    assert all(np.isfinite(completion.log_probs).all() for completion in completions)

"""Megatron's GPTModel over a micro-batch as one packed sequence of tokens.

A packed sequence has index tensors, context-parallel parts and padded buckets.

Context parallelism: the packed tokens are split into 2 cp chunks, and rank r has the r-th from either end, so that
causal attention is about equal work on all ranks (Llama 3 report, arXiv:2407.21783, section 3.3.2). Keys and values are
gathered, queries stay.

Buckets: one padded array would be as wide as the longest sequence; shorter sequences, of less than half of this width,
go to another array, so that no array is more than half padding. Index functions use integers only; every rank computes
them for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from hpcrl.model.blocks.attention import Rope
from hpcrl.model.blocks.layers import ScalarHead
from hpcrl.model.blocks.rope_angles import rope_cos_sin
from hpcrl.model.tower import Division, PackedPictures, encode_divided

if TYPE_CHECKING:
    from hpcrl.model.blocks.router import Routing
    from hpcrl.model.shape import ModelShape
    from hpcrl.model.vision import Vision


@dataclass(frozen=True)
class Tail:
    """A chunk's tokens of a sequence that began in an earlier chunk: `queries` of them attend to `keys`, int64 (K,)
    places among the gathered tokens, from the sequence's first one to the last query."""

    queries: int
    keys: Tensor


def tokens_of_rank(size: int, rank: int, cp: int) -> Tensor:
    """Return the packed tokens of `rank` in its order, int64 (size / cp,); 2 cp divides `size`."""
    chunk = size // (2 * cp)
    first, second = rank * chunk, (2 * cp - 1 - rank) * chunk
    return torch.cat([torch.arange(first, first + chunk), torch.arange(second, second + chunk)])


def gathered_places(size: int, cp: int) -> Tensor:
    """Return the place of each packed token after gathering in rank order, int64 (size,)."""
    order = torch.cat([tokens_of_rank(size, rank, cp) for rank in range(cp)])
    found = torch.empty_like(order)
    found[order] = torch.arange(size)
    return found


def local_runs(lengths: Tensor, size: int, rank: int, cp: int) -> tuple[Places, tuple[Tail, ...]]:
    """Return the places of a rank's tokens in its attention. `lengths` int64 (sequences,) are those of the packed
    sequences, in `size` tokens with padding at the end.

    In the buckets, by local token: the part of each sequence in the chunk where it begins, which attends to this rank's
    tokens only. After them the queries of the tails, at most two, each at the beginning of a chunk.
    """
    chunk = size // (2 * cp)
    starting_here: list[tuple[int, int]] = []  # first local token, tokens
    singles, tails = [], []
    gathered = gathered_places(size, cp)
    ends = lengths.cumsum(0).tolist()
    for number, place in enumerate((rank, 2 * cp - 1 - rank)):
        low, high = place * chunk, (place + 1) * chunk
        for end, length in zip(ends, lengths.tolist(), strict=True):
            start, first, end_of_run = end - length, max(low, end - length), min(high, end)
            local = number * chunk + first - low
            if first < end_of_run and first == start:
                starting_here.append((local, end_of_run - first))
            elif first < end_of_run:
                singles.append(torch.arange(local, local + end_of_run - first))
                tails.append(Tail(end_of_run - first, gathered[start:end_of_run]))
    firsts, counts = torch.tensor(starting_here, dtype=torch.int64).view(-1, 2).unbind(1)
    return places_of(firsts, counts, torch.cat([*singles, firsts[:0]])), tuple(tails)


class Bucket(NamedTuple):
    """`rows` runs, padded at the end to `width` tokens each."""

    rows: int
    width: int

    @property
    def size(self) -> int:
        return self.rows * self.width


class Places(NamedTuple):
    """Places of T tokens: in the buckets, one after the other, and one place each for `singles` tokens after them.

    Both int64: slots (T,) the place of token t; sources (places,) the token at a place, an arbitrary one for padding.
    """

    buckets: tuple[Bucket, ...]
    slots: Tensor
    sources: Tensor


def places_of(firsts: Tensor, lengths: Tensor, singles: Tensor | None = None) -> Places:
    """Place runs that begin at tokens `firsts` int64 (N,) and have `lengths` (N,), at least 1 each. With `singles`
    int64 they contain each of the tokens 0 to T - 1 once."""
    order = lengths.argsort(descending=True, stable=True)
    sizes = lengths[order].tolist()
    buckets: list[Bucket] = []
    for length in sizes:
        if buckets and 2 * length >= buckets[-1].width:
            buckets[-1] = Bucket(buckets[-1].rows + 1, buckets[-1].width)
        else:
            buckets.append(Bucket(1, length))
    sources, is_token_of = [], []
    runs = torch.stack([firsts[order], lengths[order]], 1).split([bucket.rows for bucket in buckets])
    for bucket, members in zip(buckets, runs, strict=True):
        offsets = torch.arange(bucket.width)
        is_token = offsets < members[:, 1:]
        sources.append(torch.where(is_token, members[:, :1] + offsets, 0).flatten())
        is_token_of.append(is_token.flatten())
    if singles is not None:
        sources.append(singles)
        is_token_of.append(torch.ones(len(singles), dtype=torch.bool))
    source, is_taken = (torch.cat(parts) for parts in (sources, is_token_of))
    slots = torch.empty(int(is_taken.sum()), dtype=torch.int64)
    slots[source[is_taken]] = is_taken.nonzero().squeeze(1)
    return Places(tuple(buckets), slots, source)


@dataclass(kw_only=True)
class PackedTokens(PackedSeqParams):
    """N sequences of T tokens in all, one after the other, padded at the end to S tokens.

    Megatron passes it, as its `packed_seq_params`, to every attention layer and to the head. Padding tokens belong to
    no sequence: their attention output is 0 and their logits are not used. With context parallelism all fields are this
    rank's part, with the runs of `local_runs` in place of sequences.

    Of megatron's own fields it has cu_seqlens_q int32 (N + 1,), from 0 to T, and max_seqlen_q, the longest sequence;
    None with context parallelism.
    """

    input_ids: Tensor  # (1, S) int64
    position_ids: Tensor  # (1, S) int64
    rope_positions: Tensor  # (S,) or (3, S) int64, as in `rope_cos_sin`
    buckets: tuple[Bucket, ...]  # padded arrays of attention
    slots: Tensor  # (T,) int64: place of token t in them
    sources: Tensor  # (places,) int64: token at that place; arbitrary for padding
    output_rows: Tensor | None = None  # (R,) int64: tokens with a head output; None: all S
    tails: tuple[Tail, ...] | None = None  # only with context parallelism
    lengths: tuple[int, ...] | None = None  # of the sequences, on the host; None with context parallelism
    routing: Routing | None = None  # of a model with experts
    pictures: PackedPictures | None = None
    deepstack: Deepstack | None = None  # set by the model
    _angles: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """T, without padding."""
        return self.slots.numel()

    def angles(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of a rotary embedding, each (S, rope.dim / 2) fp32, the largest tensors here, computed
        once on the device."""
        if rope not in self._angles:
            self._angles[rope] = rope_cos_sin(self.rope_positions, rope)
        return self._angles[rope]


def pack(
    input_ids: Tensor,
    lengths: Tensor,
    shape: ModelShape,
    *,
    size: int,
    output_rows: Tensor | None = None,
    rope_positions: Tensor | None = None,
    pictures: PackedPictures | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> PackedTokens:
    """Pack sequences for one forward pass.

    `input_ids` (T,) holds the sequences one after the other, `lengths` (N,) int64 their lengths (at least 1 each),
    `size` is the S of all ranks, at least T. `output_rows` are this rank's own. `rope_positions` (3, T) int64 are those
    of sequences with `pictures`, whose rows are packed tokens. Index tensors are computed once here, on the CPU, and
    used by every layer.
    """
    total = input_ids.numel()
    starts = lengths.cumsum(0) - lengths
    sequence = torch.repeat_interleave(lengths, output_size=total)
    position = torch.arange(total) - starts[sequence]
    padded_ids = torch.zeros(size, dtype=torch.int64)
    padded_ids[:total] = input_ids
    position_ids = torch.zeros(size, dtype=torch.int64)
    position_ids[:total] = position
    turning = position_ids
    if shape.vision is not None:
        turning = position_ids.repeat(3, 1)
        if rope_positions is not None:
            turning[:, :total] = rope_positions
    if cp_size > 1:
        local = tokens_of_rank(size, cp_rank, cp_size)
        padded_ids, position_ids, turning = padded_ids[local], position_ids[local], turning[..., local]
        if pictures is not None:
            place, here = gathered_places(size, cp_size)[pictures.rows], size // cp_size
            mine = (place // here == cp_rank).nonzero().squeeze(1)
            pictures = replace(pictures, rows=place[mine] % here, sources=pictures.sources[mine])
        runs, tails = local_runs(lengths, size, cp_rank, cp_size)
        bounds = None
    else:
        runs, tails = places_of(starts, lengths), None
        bounds = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return PackedTokens(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        max_seqlen_q=None if bounds is None else int(lengths.max()),
        input_ids=padded_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        rope_positions=turning,
        output_rows=output_rows,
        tails=tails,
        lengths=None if bounds is None else tuple(lengths.tolist()),
        pictures=pictures,
        **runs._asdict(),
    )


class Deepstack(NamedTuple):
    """Features to add to the hidden states. rows: int64 (F,), tokens of this rank; features: (F, hidden), for each of
    the first layers."""

    rows: Tensor
    features: tuple[Tensor, ...]


def _add_features(number: int, layer: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook of decoder layer `number` that adds features to the hidden states of placeholder tokens."""
    deepstack = kwargs["packed_seq_params"].deepstack
    if deepstack is None:
        return output
    hidden, *rest = output
    return hidden.index_add(0, deepstack.rows, deepstack.features[number].unsqueeze(1)), *rest


class PackedGPT(GPTModel):
    """GPTModel whose head runs only on the requested tokens.

    In RL these are the positions that predict a response token, often half of all. A language model returns their
    hidden states, and the caller computes logits, the largest tensor of the step, a few rows at a time.
    """

    uses_adapters = True  # if it has any
    vision: torch.nn.Module | None  # the tower of a vision-language model, where the embedding is

    def add_tower(self, tower: torch.nn.Module, vision: Vision) -> None:
        """Add the vision tower; its features replace the embeddings of placeholder tokens, and are added to the hidden
        states after the first layers."""
        self.vision, self._vision = tower, vision
        for number in range(vision.num_deepstack):
            self.decoder.layers[number].register_forward_hook(partial(_add_features, number), with_kwargs=True)

    def forward(self, *args: Any, packed_seq_params: PackedTokens, **kwargs: Any) -> Tensor:
        if self.vision is not None and packed_seq_params.pictures is not None:
            kwargs["decoder_input"], packed_seq_params = self._embed(packed_seq_params, packed_seq_params.pictures)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def _embed(self, packed: PackedTokens, pictures: PackedPictures) -> tuple[Tensor, PackedTokens]:
        """Return embeddings (S, 1, hidden) with features at the placeholder tokens, and the tokens with features for
        the first layers, which are freed with this copy."""
        embedded = self.embedding(packed.input_ids, packed.position_ids)
        tp, hidden = self.pg_collection.tp, embedded.size(-1)
        features = self._encode(pictures) if pictures.features is None else pictures.features.to(embedded.device)
        if self.config.sequence_parallel:
            first = tp.rank() * len(embedded)
            pictures = pictures.within(first, first + len(embedded))
        of_tokens = features.to(embedded.dtype).index_select(0, pictures.sources)
        if self._vision.num_deepstack:
            packed = replace(packed, deepstack=Deepstack(pictures.rows, of_tokens[:, hidden:].split(hidden, dim=1)))
        return embedded.index_copy(0, pictures.rows, of_tokens[:, None, :hidden]), packed

    def _encode(self, pictures: PackedPictures) -> Tensor:
        """Run the tower; the ranks that have these tokens divide the pictures."""
        assert pictures.pixels is not None and self.vision is not None
        divisions = [
            Division(self.pg_collection.tp, is_split=self.config.sequence_parallel),
            Division(self.pg_collection.cp, is_split=True),
        ]
        pixels = pictures.pixels
        return encode_divided(self.vision, self._vision, pixels.grids.numpy(), pixels.take, divisions)

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedTokens, **_: Any) -> Tensor:
        """Return the hidden states of the R rows `packed_seq_params.output_rows`, (R, hidden), on every tensor-parallel
        rank; with a scalar head its output (R, 1). Input: hidden states (S, 1, hidden), of this rank under sequence
        parallelism."""
        if not self.post_process:
            return hidden_states
        tp, is_scalar = self.pg_collection.tp, isinstance(self.output_layer, ScalarHead)
        if self.config.sequence_parallel:
            # With a split head each rank has a part of the gradient, with a replicated head all of it.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, not is_scalar, tp)
        rows = packed_seq_params.output_rows
        if rows is not None:
            hidden_states = hidden_states.index_select(0, rows)
        hidden_states = hidden_states.squeeze(1)
        if is_scalar:
            return self.output_layer(hidden_states)[0]
        if not self.config.sequence_parallel:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, tp)
        return hidden_states

    def output_weight(self) -> Tensor:
        """Return (V / tp, hidden): this rank's rows of the language-model head, on the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Map the model's output (R, hidden) to logits (R, V / tp)."""
        return self.output_layer(hidden_states, weight=self.output_weight())[0]

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: dict[str, Any],
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Same as in megatron, which gets the data-parallel rank from process-global state."""
        if not self.post_process or self.pre_process:
            return
        assert metadata is not None
        # The last stage's copy is a replica of the embedding: (1, ...) sorts it after the first stage's (0, ...).
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.output_layer.weight,
            key=first_stage_word_emb_key,
            replica_id=(1, 0, metadata["dp_cp_group"].rank()),
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

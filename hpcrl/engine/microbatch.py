"""Micro-batches: samples packed to run together, and the mapping from head outputs back to samples.

A sample is one sequence or several. The column `sequence_starts` is int32 with, for each sequence after the first, the
place of its first token in `input_ids`: there positions begin at 0 again, and what came before is not read.

The column `routed_experts` is int16 in sequence space: for each token layers x topk numbers, the experts of each MoE
layer in turn, in any order; `NOT_RECORDED` where there is no record. Pictures of a micro-batch: positions of their
tokens, and where their features go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from hpcrl.batch.data_proto import NOT_RECORDED
from hpcrl.batch.packing import micro_batches
from hpcrl.batch.ragged import Ragged, moved, padded_places
from hpcrl.model.blocks.mixture import RoutedExperts
from hpcrl.model.blocks.rope_angles import rope_positions
from hpcrl.model.blocks.router import Routing
from hpcrl.model.gpt import PackedTokens, gathered_places, pack, tokens_of_rank
from hpcrl.model.tower import PackedPictures, Pixels
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.batch.data_proto import DataProto
    from hpcrl.batch.pictures import PictureColumn
    from hpcrl.model.shape import ModelShape
    from hpcrl.runtime.groups import RoleGroups


def packed_pictures(
    column: PictureColumn, lengths: Tensor, shape: ModelShape, *, embeds: bool = True
) -> dict[str, Any]:
    """Return the pictures of packed sequences of these `lengths`, and the positions of their tokens, as arguments of
    `pack`; only the positions without `embeds`."""
    vision = shape.vision
    if vision is None:
        raise InputError("the batch has pictures, and the model has no vision tower; use a vision-language model")
    if not len(column.keys):
        return {}
    tokens = column.grids.prod(1, dtype=np.int64) // vision.merge_size**2
    first_features, first_token = tokens.cumsum() - tokens, 0
    positions, at_tokens, at_features = [], [], []
    for row, length in enumerate(lengths.tolist()):
        pictures = column.of_row(row)
        for item, picture in pictures:
            places = np.arange(tokens[item])
            at_tokens.append(first_token + picture.start + places)
            at_features.append(first_features[item] + places)
        positions.append(rope_positions(length, [picture for _, picture in pictures], vision))
        first_token += length
    arguments: dict[str, Any] = {"rope_positions": torch.from_numpy(np.concatenate(positions, axis=1))}
    if embeds:
        rows, sources = (torch.from_numpy(np.concatenate(parts)) for parts in (at_tokens, at_features))
        values = torch.from_numpy(column.values.values)
        if column.are_features:
            features, pixels = values.view(-1, vision.feature_width), None
        else:
            grids = torch.from_numpy(column.grids.astype(np.int64))
            features, pixels = None, Pixels(values.view(-1, vision.patch_width), grids)
        arguments["pictures"] = PackedPictures(rows, sources, features, pixels)
    return arguments


def tokens_of_towers(column: PictureColumn, shape: ModelShape) -> np.ndarray:
    """Return what the tower's work on each sample is worth in tokens of the language model, int64 (N,); 0 where the
    column has features."""
    if column.are_features:
        return np.zeros(len(column), np.int64)
    patches = column.grids.prod(1, dtype=np.int64)
    of_samples = np.array([patches[column.items.row(row)].sum() for row in range(len(column))], np.int64)
    return (shape.tokens_per_patch * of_samples).astype(np.int64)


def make_routing(
    lengths: Tensor, size: int, local_tokens: Tensor | slice, routed: RoutedExperts, experts: Ragged | None
) -> Routing:
    """Return the routing of packed sequences padded to `size` tokens, of which this rank has `local_tokens`.

    Args:
        lengths: int64 (N,), N = 0 for a dummy.
        experts: rows of routed_experts, None: routers choose.
    """
    total, replayed = int(lengths.sum()), None
    sequences = torch.full((size,), len(lengths))
    sequences[:total] = torch.repeat_interleave(lengths)
    if experts is not None:
        _check_experts(experts, lengths * routed.width, routed.num_experts)
        replayed = torch.full((size, routed.width), NOT_RECORDED, dtype=torch.int16)
        replayed[:total] = torch.from_numpy(experts.values).view(total, routed.width)
        replayed = replayed[local_tokens].unflatten(1, (-1, routed.topk))
    return Routing(sequences[local_tokens], lengths, routed.layers, replayed)


def _check_experts(experts: Ragged, lengths: Tensor, num_experts: int) -> None:
    """Validate recordings, which may come from a file."""
    if not np.array_equal(experts.lengths, lengths.numpy()):
        raise InputError(
            f"routed_experts has {experts.lengths.tolist()} numbers for samples that need {lengths.tolist()}; "
            "replay recordings of this model"
        )
    low, high = int(experts.values.min()), int(experts.values.max())
    if low < NOT_RECORDED or high >= num_experts:
        raise InputError(
            f"routed_experts has experts {low} to {high}, the model has 0 to {num_experts - 1}; "
            "replay recordings of this model"
        )


def recorded_experts(micro: MicroBatch, groups: RoleGroups) -> Ragged:
    """Return the experts recorded by a micro-batch's routers, as a column of its samples. Collective over a replica."""
    routing = micro.packed.routing
    assert routing is not None and routing.recorded
    layout, first = groups.layout, next(iter(routing.recorded.values()))
    # int32, because NCCL has no int16
    size = len(first), len(routing.layers), first.size(1)
    experts = torch.full(size, NOT_RECORDED, dtype=torch.int32, device=first.device)
    for layer, ids in routing.recorded.items():
        experts[:, layer] = ids
    if layout.pp > 1:
        dist.all_reduce(experts, dist.ReduceOp.MAX, group=groups.pp)
    experts = gather_from_sequence_parallel_region(experts, group=groups.tp)
    if layout.cp > 1:
        experts = gather_from_sequence_parallel_region(experts, group=groups.pgc.cp)
        experts = experts[gathered_places(len(experts), layout.cp).to(experts.device)]
    tokens = experts[: int(routing.lengths.sum())].flatten().to("cpu", torch.int16)
    return Ragged.from_lengths(tokens.numpy(), routing.lengths.cpu().numpy() * experts[0].numel())


# Positions that the head runs on: those that predict response tokens, or each sequence's last token.
OutputRows = Literal["response", "last"]


@dataclass(frozen=True)
class OutputGather:
    """Head outputs under context parallelism: each rank has those of its own tokens, padded to `most`.

    order: int64 (R,), the place of each output after gathering in rank order. own: int64, the outputs of this rank.
    """

    most: int
    order: Tensor
    own: Tensor

    def own_of(self, values: Tensor) -> Tensor:
        """Return the rows of this rank's outputs, of one row per output; the first row if there are none."""
        return values[self.own] if len(self.own) else values[:1]


@dataclass(frozen=True)
class MicroBatch:
    """Samples that run together.

    Without samples it is one dummy token, and without head outputs there is one dummy output, so that every rank
    computes and communicates the same number of times.
    """

    rows: np.ndarray  # (n,) int64: which samples of the batch
    packed: PackedTokens
    targets: Tensor  # (R,) int64: the response token that each output row predicts; unused for last tokens
    places: Tensor  # (R,) int64: of the outputs in rows of a sample each, padded to the longest; (0,) for a dummy
    output_lengths: np.ndarray  # (n,) int64, sum R: head outputs of each sample, its response tokens or 1
    output_gather: OutputGather | None = None  # only with context parallelism

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_outputs(self) -> int:
        """R; 0 if the one output row is a dummy."""
        return int(self.output_lengths.sum())

    def padded(self, outputs: Tensor) -> Tensor:
        """Pad head outputs (R, ...), R at least 1, to (n, most outputs of a sample, ...) with 0. Differentiable."""
        longest = int(self.output_lengths.max())
        flat = outputs.new_zeros(len(self) * longest, *outputs.shape[1:])
        return flat.index_copy(0, self.places, outputs).unflatten(0, (len(self), longest))


def column_of(micros: Sequence[MicroBatch], outputs: Sequence[Tensor]) -> Ragged:
    """Return head outputs (R,) of each micro-batch as a column of all samples in the batch's order, in response space
    or with one entry per row; (R, K) gives K numbers per output. One copy to the host."""
    values = torch.cat([part[: micro.num_outputs] for micro, part in zip(micros, outputs, strict=True)])
    lengths = np.concatenate([micro.output_lengths for micro in micros]) * values.shape[1:].numel()
    order = np.argsort(np.concatenate([micro.rows for micro in micros]))
    return Ragged.from_lengths(values.reshape(-1).cpu().numpy(), lengths).take(order)


def needed_count(batch: DataProto, max_tokens: int, unit: int = 1, shape: ModelShape | None = None) -> int:
    """Return the number of micro-batches that this replica needs, at least one. `unit` as in `make_micro_batches`."""
    return max(1, len(_split_rows(batch, shape, max_tokens, unit)))


def make_micro_batches(
    batch: DataProto,
    shape: ModelShape,
    *,
    max_tokens: int,
    count: int,
    multiple: int,
    same_size: bool,
    device: torch.device,
    outputs_at: OutputRows = "response",
    unit: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
    embeds: bool = True,
) -> list[MicroBatch]:
    """Pack the samples into `count` micro-batches of at most `max_tokens` tokens, before padding to `multiple`.

    `same_size` pads all of them to the longest, which pipeline stages need. `unit` successive samples stay together, in
    order: 2 for a loss that compares the two samples of a pair. Each holds this rank's part of the tokens among
    `cp_size` ranks, and their pictures where this rank `embeds` tokens.
    """
    whole_lengths = _lengths(batch)
    rows_of = _split_rows(batch, shape, max_tokens, unit, count)
    sizes = [-(-max(1, int(whole_lengths[rows].sum())) // multiple) * multiple for rows in rows_of]
    if same_size:
        sizes = [max(sizes)] * count
    micros = []
    for rows, size in zip(rows_of, sizes, strict=True):
        ids, lengths, tokens, output_lengths = _output_tokens(batch, rows, outputs_at)
        targets = ids[tokens].to(torch.int64)
        output_rows = tokens if outputs_at == "last" else (tokens - 1).clamp(min=0)
        output_gather = None
        if cp_size > 1:
            local_rows, output_gather = _shared(output_rows, size, cp_rank, cp_size)
            targets, output_rows = output_gather.own_of(targets), local_rows
        in_tokens = {}
        if len(rows) and (pictures := batch.pictures) is not None:
            in_tokens = packed_pictures(pictures.take(rows), lengths, shape, embeds=embeds)
        packed = pack(
            ids,
            _sequence_lengths(batch, rows, lengths),
            shape,
            size=size,
            output_rows=output_rows,
            cp_rank=cp_rank,
            cp_size=cp_size,
            **in_tokens,
        )
        if shape.routed is not None:
            local_tokens = tokens_of_rank(size, cp_rank, cp_size) if cp_size > 1 else slice(None)
            is_replayed = "routed_experts" in batch.tokens and len(rows) > 0
            experts = batch.fetch("routed_experts").take(rows) if is_replayed else None
            packed.routing = make_routing(lengths[: len(rows)], size, local_tokens, shape.routed, experts)
        of_samples = output_lengths.numpy()
        micro = MicroBatch(rows, packed, targets, padded_places(of_samples), of_samples, output_gather)
        micros.append(moved(micro, device))
    return micros


def _split_rows(
    batch: DataProto, shape: ModelShape | None, max_tokens: int, unit: int, count: int | None = None
) -> list[np.ndarray]:
    """Return the row numbers of each micro-batch. They are balanced by tokens, and by the patches that the tower runs
    on; a sample, or `unit` of them, whose tokens fit is never too large for its patches."""
    lengths = _lengths(batch)
    if len(lengths) % unit:
        raise ValueError(f"{len(lengths)} samples are not a multiple of unit={unit}; keep groups on one replica")
    costs = lengths.reshape(-1, unit).sum(axis=1)
    if shape is not None and len(batch) and (pictures := batch.pictures) is not None:
        with_patches = (lengths + tokens_of_towers(pictures, shape)).reshape(-1, unit).sum(axis=1)
        costs = np.maximum(costs, np.minimum(with_patches, max_tokens))
    groups = micro_batches(costs, max_tokens, count=count)
    return [(group[:, None] * unit + np.arange(unit)).reshape(-1) for group in groups]


def _output_tokens(batch: DataProto, rows: np.ndarray, outputs_at: OutputRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids of the packed tokens, lengths of the sequences, the packed token of each head output (the predicted
    one, or the last; a dummy if there is none), and the number of outputs of each sequence."""
    if len(rows) == 0:
        token = torch.zeros(1, dtype=torch.int64)
        return token, torch.ones_like(token), token, token[:0]
    ids = batch.fetch("input_ids").take(rows)
    token_ids, lengths = torch.from_numpy(ids.values), torch.from_numpy(ids.lengths)
    if outputs_at == "last":
        return token_ids, lengths, lengths.cumsum(0) - 1, torch.ones_like(lengths)
    response_lengths = torch.from_numpy(batch.fetch("response_mask").lengths[rows])
    prompt_lengths = lengths - response_lengths
    if int(prompt_lengths.min()) < 1:
        raise ValueError(
            f"a sample has {int(prompt_lengths.min())} prompt tokens; every sample needs at least one, to predict "
            "the first token of the response"
        )
    # Response token r of the micro-batch is at r + the prompt tokens up to and including its own sequence.
    shift = torch.repeat_interleave(prompt_lengths.cumsum(0), response_lengths)
    tokens = torch.arange(len(shift)) + shift
    if len(tokens) == 0:
        tokens = torch.ones(1, dtype=torch.int64).clamp(max=len(token_ids) - 1)  # a dummy
    return token_ids, lengths, tokens, response_lengths


def _sequence_lengths(batch: DataProto, rows: np.ndarray, lengths: Tensor) -> Tensor:
    """Return the tokens of each sequence of samples that have `lengths` tokens, int64."""
    if len(rows) == 0 or "sequence_starts" not in batch.tokens:
        return lengths
    starts = batch.fetch("sequence_starts").take(rows)
    ends = lengths.numpy().cumsum()
    firsts, cuts = ends - lengths.numpy(), starts.values.astype(np.int64)
    of_sample = np.repeat(np.arange(len(rows)), starts.lengths)
    bounds = np.sort(np.concatenate([firsts, firsts[of_sample] + cuts, ends[-1:]]))
    of_sequence = np.diff(bounds)
    if cuts.min(initial=1) < 1 or (cuts >= lengths.numpy()[of_sample]).any() or not of_sequence.all():
        raise InputError("sequence_starts has places outside of their samples, or some twice; replay whole recordings")
    return torch.from_numpy(of_sequence)


def _shared(output_rows: Tensor, size: int, cp_rank: int, cp_size: int) -> tuple[Tensor, OutputGather]:
    """Return this rank's output rows, and where all outputs are."""
    place, here = gathered_places(size, cp_size)[output_rows], size // cp_size
    owners = place // here
    counts = torch.bincount(owners, minlength=cp_size)
    most = int(counts.max())
    order = torch.empty_like(owners)
    for rank in range(cp_size):
        order[owners == rank] = rank * most + torch.arange(int(counts[rank]))
    output_gather = OutputGather(most, order, (owners == cp_rank).nonzero().squeeze(1))
    local_rows = output_gather.own_of(place % here) if len(output_gather.own) else torch.zeros(1, dtype=torch.int64)
    return local_rows, output_gather


def _lengths(batch: DataProto) -> np.ndarray:
    return batch.fetch("input_ids").lengths if len(batch) else np.zeros(0, dtype=np.int64)

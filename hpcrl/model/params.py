"""Which parameters a model has and which rectangle of each one a rank holds: no torch, no ranks, only numbers.

Names and shapes are those of megatron-core's GPTModel with the local layer spec, written with *global* layer numbers.
Building, checkpoints and refit all read this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpcrl.launch.exits import InputError
from hpcrl.model.shape import ModelShape

Head = Literal["lm", "value", "reward"]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
VALUE_HEAD = "value_head.weight"
REWARD_HEAD = "reward_head.weight"
# The name says what the number means: a critic's weights are no reward model's.
SCALAR_HEADS: dict[Head, str] = {"value": VALUE_HEAD, "reward": REWARD_HEAD}


@dataclass(frozen=True)
class Box:
    """A rectangle of a global 2-D tensor (a 1-D tensor counts as (n, 1)) and where it starts in the local tensor."""

    global_rows: tuple[int, int]
    global_cols: tuple[int, int]
    local_row: int
    local_col: int


@dataclass(frozen=True)
class Shard:
    """What one rank holds of one parameter; the boxes tile the local tensor."""

    name: str
    local_name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tp_replicated: bool


def check_layout(shape: ModelShape, *, tp_size: int, pp_size: int, role: str = "model") -> None:
    """Raises InputError when `tp_size` or `pp_size` does not fit the model; `role` is named in the message."""
    divided = {
        "num_query_groups": shape.num_query_groups,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "padded_vocab_size": shape.padded_vocab_size,
    }
    for what, size in divided.items():
        if size % tp_size:
            fitting = [n for n in range(1, tp_size) if not any(other % n for other in divided.values())]
            raise InputError(f"{role}.tp={tp_size} does not divide {what}={size}; use one of {fitting}")
    if pp_size > shape.num_layers:
        raise InputError(
            f"{role}.pp={pp_size} is more than num_layers={shape.num_layers}; use at most {shape.num_layers}"
        )


def stage_layers(num_layers: int, pp_rank: int, pp_size: int) -> range:
    """Global numbers of the layers of a pipeline stage; the first stages hold what does not divide evenly."""
    each, more = divmod(num_layers, pp_size)
    start = pp_rank * each + min(pp_rank, more)
    return range(start, start + each + (pp_rank < more))


def shards(
    shape: ModelShape, *, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int, head: Head = "lm"
) -> list[Shard]:
    """The parameters of a rank, in the order of the model; tied embeddings have a second holder, the last stage."""
    check_layout(shape, tp_size=tp_size, pp_size=pp_size)
    return list(_Stage(shape, tp_rank, tp_size, pp_rank, pp_size, head).shards())


@dataclass(frozen=True)
class _Stage:
    shape: ModelShape
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    head: Head

    def shards(self) -> Iterator[Shard]:
        shape = self.shape
        first, last = self.pp_rank == 0, self.pp_rank == self.pp_size - 1
        vocabulary = (shape.padded_vocab_size, shape.hidden_size)
        if first:
            yield self._split_rows(EMBEDDING, vocabulary)
        for local, layer in enumerate(stage_layers(shape.num_layers, self.pp_rank, self.pp_size)):
            yield from self._layer(f"decoder.layers.{layer}.", f"decoder.layers.{local}.")
        if not last:
            return
        yield self._whole("decoder.final_layernorm.weight", (shape.hidden_size,))
        if self.head in SCALAR_HEADS:
            yield self._whole(SCALAR_HEADS[self.head], (1, shape.hidden_size), OUTPUT_LAYER)
        elif not shape.tie_word_embeddings:
            yield self._split_rows(OUTPUT_LAYER, vocabulary)
        elif not first:
            yield self._split_rows(EMBEDDING, vocabulary, OUTPUT_LAYER)

    def _layer(self, prefix: str, local: str) -> Iterator[Shard]:
        shape = self.shape
        hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
        query = shape.num_attention_heads * shape.head_dim
        # Rows of linear_qkv go by query group: the group's queries, its key, its value.
        qkv = query + 2 * shape.num_query_groups * shape.head_dim
        table = (
            (self._whole, "input_layernorm", (hidden,)),
            (self._split_rows, "self_attention.linear_qkv", (qkv, hidden)),
            (self._split_cols, "self_attention.linear_proj", (hidden, query)),
            (self._whole, "pre_mlp_layernorm", (hidden,)),
            (self._split_gated, "mlp.linear_fc1", (2 * ffn, hidden)),
            (self._split_cols, "mlp.linear_fc2", (hidden, ffn)),
        )
        for split, name, global_shape in table:
            yield split(f"{prefix}{name}.weight", global_shape, f"{local}{name}.weight")

    def _whole(self, name: str, shape: tuple[int, ...], local_name: str | None = None) -> Shard:
        cols = shape[1] if len(shape) == 2 else 1
        return Shard(name, local_name or name, shape, shape, (Box((0, shape[0]), (0, cols), 0, 0),), True)

    def _split_rows(self, name: str, shape: tuple[int, ...], local_name: str | None = None) -> Shard:
        rows, cols = shape[0] // self.tp_size, shape[1]
        box = Box((self.tp_rank * rows, (self.tp_rank + 1) * rows), (0, cols), 0, 0)
        return Shard(name, local_name or name, shape, (rows, cols), (box,), False)

    def _split_cols(self, name: str, shape: tuple[int, ...], local_name: str | None = None) -> Shard:
        rows, cols = shape[0], shape[1] // self.tp_size
        box = Box((0, rows), (self.tp_rank * cols, (self.tp_rank + 1) * cols), 0, 0)
        return Shard(name, local_name or name, shape, (rows, cols), (box,), False)

    def _split_gated(self, name: str, shape: tuple[int, ...], local_name: str | None = None) -> Shard:
        """Globally [gate; up], locally [gate shard; up shard]."""
        ffn, cols = shape[0] // 2, shape[1]
        rows = ffn // self.tp_size
        start = self.tp_rank * rows
        gate = Box((start, start + rows), (0, cols), 0, 0)
        up = Box((ffn + start, ffn + start + rows), (0, cols), rows, 0)
        return Shard(name, local_name or name, shape, (2 * rows, cols), (gate, up), False)

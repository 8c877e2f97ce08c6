"""A micro-batch as blocks see it, and what a rank holds, computes and sends for it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpcrl.runtime.layout import Layout

if TYPE_CHECKING:
    from hpcrl.config.schema import MoeConfig
    from hpcrl.model.shape import Lora

FP32, INT16, INT64 = 4, 2, 8  # bytes


@dataclass(frozen=True)
class MicroBatch:
    """The part of a micro-batch that a rank computes, and how the rank computes it.

    The rank has `tokens` tokens after the division over context-parallel ranks. A weight or an activation has
    `itemsize` bytes. `sequence_parallel` and `lora` are those of `hpcrl.model.build.build_model`. Without `on_gpu`
    RMSNorm in bf16 keeps more, and attention under context parallelism has masks. Sequences have `longest` tokens, and
    context parallelism may cut them. `moe` has the losses of routers. The expert with most tokens has `load_imbalance`
    times the mean.
    """

    layout: Layout
    tokens: int
    itemsize: int
    sequence_parallel: bool = True
    lora: Lora | None = None
    on_gpu: bool = True
    longest: int = 0
    moe: MoeConfig | None = None
    load_imbalance: float = 1.0

    @property
    def shares_tokens(self) -> bool:
        """Whether tensor-parallel ranks divide the tokens between tensor-parallel regions."""
        return self.sequence_parallel and self.layout.tp > 1

    @property
    def local(self) -> int:
        """The tokens of this rank between tensor-parallel regions."""
        return self.tokens // self.layout.tp if self.shares_tokens else self.tokens

    def hidden(self, width: int) -> int:
        """Return the bytes of the rank's hidden states, `width` numbers for each token."""
        return self.local * width * self.itemsize

    def gathered(self, width: int) -> int:
        """Return the bytes of the hidden states of all tensor-parallel ranks, or 0 if they do not divide the tokens."""
        return self.hidden(width) * self.layout.tp if self.shares_tokens else 0

    @property
    def norm_keeps_input(self) -> bool:
        """Whether RMSNorm is one function, which keeps its input. Otherwise it keeps copies of the input in fp32."""
        return self.on_gpu or self.itemsize == FP32

    @property
    def norm_copies(self) -> int:
        """The copies in fp32 that RMSNorm keeps: the input, and for the gradient of its weight the normalised input."""
        return 2 if self.lora is None else 1

    def norm(self, rows: int, width: int) -> int:
        """Return the bytes that RMSNorm keeps: its input, scale and output."""
        inside = self.itemsize * width if self.norm_keeps_input else self.norm_copies * FP32 * width
        return rows * (inside + FP32 + self.itemsize * width)


class Matrix(NamedTuple):
    """A weight that multiplies rows of `inner` numbers into rows of `outer`."""

    inner: int
    outer: int


class Products(NamedTuple):
    """Products of `rows` rows with each of the matrices.

    If there are `groups` such matrices, the rows are divided over them. The rank with most rows has `uneven` times the
    mean. Sorting the rows reads and writes `moved` bytes.
    """

    rows: float
    matrices: tuple[Matrix, ...]
    groups: float = 1.0
    uneven: float = 1.0
    moved: float = 0.0


class Collective(NamedTuple):
    """A collective of the ranks that differ along the axes `dims` of a layout.

    `kind` is a method of `hpcrl.forecast.time.cost.Network`, which says what `nbytes` counts. A training pass
    has the collective `times` times.
    """

    kind: Literal["all_gather", "all_to_all"]
    nbytes: float
    dims: tuple[str, ...]
    times: int = 2


class Held(NamedTuple):
    """Bytes that a rank holds for a block, without adapters.

    Autograd keeps `kept` bytes between the forward and the backward pass, or `inputs` bytes if the block is recomputed.
    A forward pass without gradients has `peak` bytes at most. The backward pass has `backward` bytes at its end,
    besides what is kept and two hidden states.
    """

    kept: int
    peak: int
    inputs: int = 0
    backward: int = 0


class Launches(NamedTuple):
    """Operators that PyTorch runs, views included. Each takes time of a host, whatever it computes.

    `forward` is without gradients, `training` with them in both passes, `engine` in a pass of the native engine, and
    `graph` the kernels of such a pass in a CUDA graph.
    """

    forward: float
    training: float
    engine: float
    graph: float


class Computation(NamedTuple):
    """What a rank computes and sends for a block in a forward pass, without adapters.

    Elementwise operators read and write `elementwise` numbers of each token. Attention multiplies and adds
    `pair_width` numbers for each pair of tokens, and `decode_width` numbers for each cached token in a decode step; a
    token attends to `sees` tokens, its own included, or to all before it. An engine caches `cached_width` numbers of
    each token. Tensor-parallel ranks sum hidden states `reductions` times; `exchanges` are the other collectives.
    `launches` are operators and how many times each runs, without those of parallelism.
    """

    products: tuple[Products, ...]
    elementwise: float = 0.0
    pair_width: float = 0.0
    sees: int | None = None
    decode_width: float = 0.0
    cached_width: int = 0
    reductions: int = 1
    exchanges: tuple[Collective, ...] = ()
    launches: tuple[tuple[Launches, float], ...] = ()


def seen_pairs(length: float, sees: int | None) -> float:
    """Return the pairs of tokens of which one attends to the other, in a sequence of `length` tokens."""
    window = length if sees is None else min(length, sees)
    return window * (window + 1.0) / 2.0 + (length - window) * window

"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.model.shape import ModelShape

if TYPE_CHECKING:
    from hpcrl.config.schema import ModelConfig

# Megatron's matrix -> the projections whose rows it holds, by Llama's names.
PROJECTIONS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
ALL_LINEAR = tuple(name for names in PROJECTIONS.values() for name in names)
ROW_PARALLEL = PROJECTIONS["linear_proj"] + PROJECTIONS["linear_fc2"]  # tensor parallelism splits their inputs
FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685). targets: the projections with adapters, in all layers
    and experts.

    A projection with the frozen weight W (out, in) computes (W + alpha / r B A) x; A (r, in) and B (out, r) are
    trained. Adapters belong to Hugging Face's projections; a Megatron matrix holds several of them.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ALL_LINEAR

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def from_config(cls, model: ModelConfig) -> Lora | None:
        """Read a section `model:`; None if it has no adapters."""
        if model.lora_rank == 0:
            return None
        named = tuple(name for name in ALL_LINEAR if name in model.target_modules)
        return cls(model.lora_rank, model.lora_alpha, named)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is a factor of an adapter."""
    return name.endswith(FACTORS)


def matrix_of(name: str) -> tuple[str, str]:
    """Split decoder.layers.0.mlp.linear_fc1.weight into "decoder.layers.0.mlp." and "linear_fc1"; the second is "" if
    the parameter is not a matrix of projections."""
    stem = name.removesuffix(".weight")
    matrix = stem.rpartition(".")[2]
    return stem.removesuffix(matrix), matrix if matrix in PROJECTIONS and name.endswith(".weight") else ""


def rows_of_projections(shape: ModelShape, matrix: str, rows: int) -> tuple[int, dict[str, int]]:
    """Return how `rows` rows of a matrix, a rank's or all, hold its projections: the number of blocks, and the rows of
    each projection per block. Blocks of linear_qkv are query groups; other matrices have one block."""
    names = PROJECTIONS[matrix]
    if matrix == "linear_qkv":
        queries = shape.num_attention_heads // shape.num_query_groups * shape.head_dim
        each = dict(zip(names, (queries, shape.head_dim, shape.head_dim), strict=True))
    else:
        each = dict.fromkeys(names, rows // len(names))
    return rows // sum(each.values()), each

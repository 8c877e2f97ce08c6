"""Multi-head latent attention. No torch; modules are in `latent_modules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hpcrl.model.blocks.attention import Heads, HeadsBlock, output_projection
from hpcrl.model.blocks.block import CachedHeads, Feature, Weight
from hpcrl.model.blocks.micro_batch import Computation, Held, MicroBatch

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from torch import Tensor

    from hpcrl.model.blocks.attention_modules import Linear
    from hpcrl.model.blocks.latent_modules import LatentStep
    from hpcrl.model.exact import TensorParallel
    from hpcrl.runtime.groups import RoleGroups


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): each token has one latent vector, from
    which a projection computes keys and values of all heads, and one rotated key shared by all heads. Names of
    config.json."""

    q_lora_rank: int | None  # width of the queries' own latent; None: queries are computed from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int  # width of a query and a key without rotary embedding
    qk_rope_head_dim: int  # and with rotary embedding
    v_head_dim: int


@dataclass(frozen=True)
class Latent(HeadsBlock):
    """softmax_scale: factor of the products of queries and keys. Every rank holds the projections to the latents whole,
    and its heads of the others."""

    num_heads: int
    head_dim: int
    widths: LatentAttention
    softmax_scale: float

    title: ClassVar[str] = "latent attention"

    @property
    def supports(self) -> frozenset[Feature]:
        return frozenset(("context_parallel",))

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_heads, self.head_dim, self.widths.v_head_dim)

    def weights(self) -> Iterator[Weight]:
        hidden, heads, widths = self.hidden_size, self.num_heads, self.widths
        prefix, rank = "self_attention.", widths.kv_lora_rank
        if widths.q_lora_rank is None:
            yield Weight(f"{prefix}linear_q_proj.weight", (heads * self.head_dim, hidden), "rows")
        else:
            yield Weight(f"{prefix}linear_q_down_proj.weight", (widths.q_lora_rank, hidden))
            yield Weight(f"{prefix}q_layernorm.weight", (widths.q_lora_rank,))
            yield Weight(f"{prefix}linear_q_up_proj.weight", (heads * self.head_dim, widths.q_lora_rank), "rows")
        yield Weight(f"{prefix}linear_kv_down_proj.weight", (rank + widths.qk_rope_head_dim, hidden))
        yield Weight(f"{prefix}kv_layernorm.weight", (rank,))
        # Rows are ordered by head: its key without rotary embedding, its value.
        rows = heads * (widths.qk_nope_head_dim + widths.v_head_dim)
        yield Weight(f"{prefix}linear_kv_up_proj.weight", (rows, rank), "rows")
        yield output_projection(hidden, heads * widths.v_head_dim)

    def divided(self) -> dict[str, int]:
        return {"num_query_groups": self.num_heads}

    def settings(self) -> dict[str, Any]:
        return {
            "num_attention_heads": self.num_heads,
            "num_query_groups": self.num_heads,
            "kv_channels": self.widths.v_head_dim,
            "softmax_scale": self.softmax_scale,
        }

    def held(self, batch: MicroBatch) -> Held:
        """Return what is held, with the norms of latents. The key that heads share is a part of the output of a
        projection, which stays whole."""
        widths, local, held = self.widths, batch.local, super().held(batch)
        norms = batch.norm(local, widths.kv_lora_rank) + batch.hidden(widths.qk_rope_head_dim)
        norms += batch.norm(local, widths.q_lora_rank) if widths.q_lora_rank else 0
        return held._replace(kept=held.kept + norms)

    def projected(self, tp: int) -> int:
        """Return the numbers of queries, of keys, and of the product that values and a part of the keys come from."""
        of_head = 2 * self.head_dim + self.widths.qk_nope_head_dim + self.widths.v_head_dim
        return self.num_heads // tp * of_head

    def computation(self, batch: MicroBatch) -> Computation:
        """Return the computation. The latent is cached, and in a decode step queries are mapped to its width."""
        rank, rope = self.widths.kv_lora_rank, self.widths.qk_rope_head_dim
        decode = self.num_heads / batch.layout.tp * (2 * rank + rope)
        return super().computation(batch)._replace(decode_width=decode, cached_width=rank + rope)

    def use(self, spec: ModuleSpec, groups: RoleGroups, *, exact: bool) -> None:
        from hpcrl.model.blocks.latent_modules import latent_attention

        spec.submodules.self_attention = latent_attention(self)

    def cached(self, tp_size: int) -> CachedHeads:
        """One head, the latent with the shared rotary key."""
        rank = self.widths.kv_lora_rank
        width = rank + self.widths.qk_rope_head_dim
        return CachedHeads(1, self.num_heads // tp_size, width, rank, value_in_key=True)

    def step(self, weight: Callable[[str], Tensor], linear: Linear, eps: float, tp: TensorParallel) -> LatentStep:
        from hpcrl.model.blocks.latent_modules import LatentStep

        return LatentStep(self, weight, linear)

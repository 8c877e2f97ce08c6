"""Megatron's layer with a mixture of experts, whose router knows the micro-batch."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from hpcrl.model.packed import PackedTokens
from hpcrl.model.router import Routing

# It warns of each layer whose mixture is not megatron's own class.
logging.getLogger("megatron.core.transformer.transformer_layer").setLevel(logging.ERROR)


class MixtureLayer(TransformerLayer):
    def forward(self, *args: Any, packed_seq_params: PackedTokens, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # Of its arguments only the padding mask goes on to the mixture, and is for its router.
        kwargs["padding_mask"] = packed_seq_params.routing
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class Mixture(MoELayer):
    """The router's `Routing` comes as an argument, so that it is the micro-batch's own when a layer is computed again,
    after the forward pass of others."""

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Routing | None = None
    ) -> tuple[Tensor, None]:
        """(n, 1, hidden) of this rank's tokens -> the same, and no bias."""

        def compute(hidden_states: Tensor) -> Tensor:
            shared = self.shared_experts_compute(hidden_states)
            weights, chosen = self.router(hidden_states, padding_mask)
            hidden_states, weights = self.preprocess(hidden_states, weights, chosen)
            dispatched, weights = self.dispatch(hidden_states, weights)
            output, _ = self.routed_experts_compute(dispatched, weights)
            return self.postprocess(self.combine(output), shared)

        if self.moe_layer_recompute:
            return checkpoint(compute, False, hidden_states), None
        return compute(hidden_states), None

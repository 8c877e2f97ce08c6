"""Megatron's GPTModel over packed tokens."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from hpcrl.model.packed import PackedTokens


class PackedGPT(GPTModel):
    """GPTModel whose head runs only on the tokens whose output is wanted.

    In RL these are the positions that predict a response token, often half of all; the logits of the others would be
    the largest tensor of the step.
    """

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedTokens, **_: Any) -> Tensor:
        """Hidden states (S, 1, hidden) -> head output (R, width) of `packed_seq_params.output_rows`."""
        if not self.post_process:
            return hidden_states
        rows = packed_seq_params.output_rows
        if rows is not None:
            hidden_states = hidden_states.index_select(0, rows)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        output, _ = self.output_layer(hidden_states, weight=weight)
        return output.squeeze(1)

    def tie_embeddings_and_output_weights_state_dict(
        self,
        sharded_state_dict: dict[str, Any],
        output_layer_weight_key: str,
        first_stage_word_emb_key: str,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """As in megatron, which asks its process-global state for the data-parallel rank."""
        if not self.post_process or self.pre_process:
            return
        assert metadata is not None
        # The last stage's copy is a replica of the embedding: (1, ...) sorts it behind the first stage's (0, ...).
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.output_layer.weight,
            key=first_stage_word_emb_key,
            replica_id=(1, 0, metadata["dp_cp_group"].rank()),
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

"""Megatron's GPTModel over packed tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from hpcrl.model.blocks.layers import ScalarHead
from hpcrl.model.packed import PackedTokens
from hpcrl.model.tower import Division, encode_divided

if TYPE_CHECKING:
    from hpcrl.model.tower import PackedPictures
    from hpcrl.model.vision import Vision


class Deepstack(NamedTuple):
    """Features to add to the hidden states. rows: int64 (F,), tokens of this rank; features: (F, hidden), for each of
    the first layers."""

    rows: Tensor
    features: tuple[Tensor, ...]


class DeepstackHook:
    """A forward hook of decoder layer `number` that adds features to the hidden states of placeholder tokens."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, layer: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        deepstack = kwargs["packed_seq_params"].deepstack
        if deepstack is None:
            return output
        hidden, *rest = output
        return hidden.index_add(0, deepstack.rows, deepstack.features[self._number].unsqueeze(1)), *rest


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
            self.decoder.layers[number].register_forward_hook(DeepstackHook(number), with_kwargs=True)

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

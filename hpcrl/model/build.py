"""Megatron modules from a `ModelShape`: the layer spec, the pipeline stage, the initial weights."""

from __future__ import annotations

import hashlib
import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcrl.launch import platform
from hpcrl.launch.exits import InputError
from hpcrl.model import params

with warnings.catch_warnings():
    # Megatron says on import that Transformer Engine and Apex are missing; `hpcrl check` says it where it matters.
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from hpcrl.model.attention import ExactPackedAttention, PackedAttention
    from hpcrl.model.exact import check_exact
    from hpcrl.model.exact_layers import use_exact_linear
    from hpcrl.model.gpt import PackedGPT
    from hpcrl.model.heads import ScalarHead
    from hpcrl.model.norm import RMSNorm

if TYPE_CHECKING:
    from hpcrl.grid.groups import RoleGroups
    from hpcrl.model.params import Head, Shard
    from hpcrl.model.shape import ModelShape


def build_model(
    shape: ModelShape,
    groups: RoleGroups,
    *,
    head: Head = "lm",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    exact: bool = False,
) -> PackedGPT:
    """This rank's stage and tensor-parallel shard of a model with random weights.

    The weights are equal under any layout: each global parameter is drawn whole, by name, and then sliced. An `exact`
    model computes with the bits of the native engine's exact mode (see hpcrl.model.exact).
    """
    if shape.num_experts:
        raise InputError(f"a model with {shape.num_experts} experts cannot be built yet, only planned; use a dense one")
    platform.install()
    if exact:
        check_exact(shape, groups.layout.tp, dtype, platform.device())
    local = local_shards(shape, groups, head)
    layers = params.stage_layers(shape.num_layers, groups.coord.pp, groups.layout.pp)
    config = transformer_config(shape, groups, dtype)
    with platform.cpu_bridge():
        model = PackedGPT(
            config,
            TransformerBlockSubmodules(layer_specs=[_layer_spec(exact)] * len(layers), layer_norm=RMSNorm),
            vocab_size=shape.padded_vocab_size,
            max_sequence_length=shape.max_position_embeddings,
            pre_process=groups.is_first_stage,
            post_process=groups.is_last_stage,
            share_embeddings_and_output_weights=shape.tie_word_embeddings and head == "lm",
            position_embedding_type="none",
            pg_collection=groups.pgc,
        )
        if head in params.SCALAR_HEADS and groups.is_last_stage:
            model.output_layer = ScalarHead(shape.hidden_size)
        if exact:
            use_exact_linear(model)
        model.to(platform.device())
        _initialise(model, local, shape, seed)
    return model


def local_shards(shape: ModelShape, groups: RoleGroups, head: Head) -> list[Shard]:
    """What this rank holds of each parameter."""
    layout, coord = groups.layout, groups.coord
    return params.shards(shape, tp_rank=coord.tp, tp_size=layout.tp, pp_rank=coord.pp, pp_size=layout.pp, head=head)


def transformer_config(shape: ModelShape, groups: RoleGroups, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's description of the model: no dropout, no biases, gradients as plain sums."""
    layout = groups.layout
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_layout=_uneven_stages(shape, groups),
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        calculate_per_token_loss=True,
        batch_p2p_comm=torch.distributed.get_backend(groups.pp) != "gloo",
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
    )


class _Stages(PipelineParallelLayerLayout):
    """Layers per stage where they do not divide evenly; megatron's own asks its process-global state for the stage."""

    def __init__(self, layout: list[list[str]], pp_rank: int) -> None:
        super().__init__(layout, len(layout))
        self.pp_rank = pp_rank

    def get_layer_offset(self, layer_type, vp_stage=None, pp_rank=None):  # type: ignore[no-untyped-def]
        return super().get_layer_offset(layer_type, vp_stage, self.pp_rank if pp_rank is None else pp_rank)


def _uneven_stages(shape: ModelShape, groups: RoleGroups) -> _Stages | None:
    stages = groups.layout.pp
    if shape.num_layers % stages == 0:
        return None
    layout = [["decoder"] * len(params.stage_layers(shape.num_layers, stage, stages)) for stage in range(stages)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return _Stages(layout, groups.coord.pp)


def _layer_spec(exact: bool):  # type: ignore[no-untyped-def]
    """Megatron's local layer with our norm, and our attention over packed sequences."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    spec.submodules.self_attention.submodules.core_attention = ExactPackedAttention if exact else PackedAttention
    return spec


def _initialise(model: PackedGPT, local: list[Shard], shape: ModelShape, seed: int) -> None:
    parameters = dict(model.named_parameters())
    if parameters.keys() != {shard.local_name for shard in local}:
        different = parameters.keys() ^ {shard.local_name for shard in local}
        raise RuntimeError(f"model and hpcrl.model.params disagree about {sorted(different)}")
    for shard in local:
        parameter = parameters[shard.local_name]
        copy_boxes(initial_weight(shape, shard.name, shard.global_shape, seed), parameter.data, shard)
        # Megatron sets this mark only when it draws weights itself; it keeps replicated parameters from being counted
        # once per tensor-parallel rank in the gradient norm.
        parameter.tensor_model_parallel = not shard.tp_replicated  # type: ignore[attr-defined]


def copy_boxes(whole: Tensor, local: Tensor, shard: Shard) -> None:
    """Copy a rank's rectangles of a global parameter into its local tensor."""
    whole, local = whole.view(whole.size(0), -1), local.view(local.size(0), -1)
    for box in shard.boxes:
        source = whole[slice(*box.global_rows), slice(*box.global_cols)]
        rows, cols = source.shape
        local[box.local_row : box.local_row + rows, box.local_col : box.local_col + cols].copy_(source)


def initial_weight(shape: ModelShape, name: str, global_shape: tuple[int, ...], seed: int) -> Tensor:
    """The whole initial tensor of a global parameter, fp32 on the CPU, a function of (seed, name) alone.

    Normal with deviation `init_std`; the projections back into the residual stream are scaled by 1 / sqrt(2 layers) as
    in GPT-2 (Radford et al. 2019, section 2.3). Norms are 1; the heads of critic and reward model are 0.
    """
    if len(global_shape) == 1:
        return torch.ones(global_shape)
    if name in params.SCALAR_HEADS.values():
        return torch.zeros(global_shape)
    std = shape.init_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * shape.num_layers)
    key = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
    return torch.empty(global_shape).normal_(0.0, std, generator=generator)

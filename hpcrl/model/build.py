"""Build megatron modules from a `ModelShape`: layer spec, pipeline stage, initial weights."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import warnings
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcrl.kernels.dispatch import use_triton
from hpcrl.model import params
from hpcrl.model.blocks.block import unsupported
from hpcrl.runtime import platform
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.megatron_versions import mlp_submodules

with warnings.catch_warnings():
    # Megatron warns on import if Transformer Engine or Apex is missing; `hpcrl check` reports it instead.
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from hpcrl.model.adapters import add_adapters
    from hpcrl.model.blocks.layers import ScalarHead, embedding_factor, mark, use_exact_linear
    from hpcrl.model.blocks.mixture_modules import Mixture
    from hpcrl.model.blocks.norms import norm_module
    from hpcrl.model.exact import check_exact
    from hpcrl.model.gpt import PackedGPT
    from hpcrl.model.tower import build_tower

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from hpcrl.config.schema import RecomputeConfig, TransformerEngineConfig
    from hpcrl.model.blocks.block import Layer
    from hpcrl.model.params import Head, Shard
    from hpcrl.model.shape import Lora, ModelShape
    from hpcrl.runtime.groups import RoleGroups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by the name in a config
LINEAR = "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"  # of attention, and of the MLP
log = logging.getLogger(__name__)


def build_model(
    shape: ModelShape,
    groups: RoleGroups,
    *,
    head: Head = "lm",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    exact: bool = False,
    sequence_parallel: bool = True,
    recompute: RecomputeConfig | None = None,
    te: TransformerEngineConfig | None = None,
    lora: Lora | None = None,
    fp32_gradients: bool = False,
    device: torch.device | None = None,
) -> list[PackedGPT]:
    """Build this rank's part of a model with random weights, on `device` or this process's own: its tensor-parallel
    shard of each chunk of its pipeline stage. On the meta device weights have shapes only and take no memory.

    The weights are equal under any layout: each global parameter is drawn whole, by name, and then sliced.

    Args:
        exact: the model is bitwise equal to the native engine's exact mode (see hpcrl.model.exact).
        sequence_parallel: tensor-parallel ranks split the tokens between layers (Korthikanti et al. 2022,
            arXiv:2205.05198, section 4.2); exact models never do, because the order of summation differs.
        te: see `uses_transformer_engine`.
        lora: the model is frozen and has adapters.
        fp32_gradients: linear layers and the head of the vocabulary add the gradients of their weights to `main_grad`,
            which megatron's wrapper gives them.
    """
    platform.install()
    if exact:
        if groups.layout.cp > 1:
            raise InputError("rollout.exact=true with context parallelism is not supported; set cp to 1")
        if shape.routed is not None and groups.layout.etp > 1:
            raise InputError("rollout.exact=true with ranks that divide experts is not supported; set etp to 1")
        check_exact(shape, groups.layout.tp, dtype, platform.device())
    if shape.routed is not None and groups.layout.tp > 1 and not sequence_parallel:
        raise ValueError("experts with tensor parallelism need sequence_parallel=True: each rank routes its own tokens")
    local = local_shards(shape, groups, head, lora)
    device = device or platform.device()
    replaced: Collection[str] | None = None
    if uses_transformer_engine(te, device, shape, exact=exact, has_adapters=lora is not None):
        assert te is not None
        replaced = _replaced(te, local, groups, dtype)
    config = transformer_config(
        shape, groups, dtype, sequence_parallel and not exact, recompute, te, fp32_gradients=fp32_gradients
    )
    with platform.meta_bridge() if device.type == "meta" else platform.cpu_bridge():
        with device:
            chunks = [
                _chunk(shape, groups, config, number, head, exact, replaced, local, lora)
                for number in range(groups.layout.vpp)
            ]
        _mark_parameters(chunks, local)
        if device.type != "meta":
            parameters = named_parameters(chunks)
            for shard in local:
                whole = initial_weight(shape, shard.name, shard.global_shape, seed, shard.initial)
                copy_boxes(whole, parameters[shard.chunk, shard.local_name].data, shard)
    return chunks


def _chunk(
    shape: ModelShape,
    groups: RoleGroups,
    config: TransformerConfig,
    number: int,
    head: Head,
    exact: bool,
    replaced: Collection[str] | None,
    local: list[Shard],
    lora: Lora | None,
) -> PackedGPT:
    layout, pp_rank = groups.layout, groups.coord.pp
    is_last = groups.is_last_stage and number == layout.vpp - 1
    layers = params.chunk_layers(shape.num_layers, pp_rank, layout.pp, number, layout.vpp)
    if config.recompute_method == "uniform" and len(layers) % config.recompute_num_layers:
        raise InputError(
            f"model.recompute.num_layers={config.recompute_num_layers} does not divide the {len(layers)} layers of a "
            "pipeline stage or chunk; use 1, or method: block"
        )
    model = PackedGPT(
        config,
        TransformerBlockSubmodules(
            layer_specs=[_layer_spec(shape.layers[layer], groups, exact, replaced) for layer in layers],
            layer_norm=norm_module(shape.layers[-1].norms.zero_centered),
        ),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=groups.is_first_stage and number == 0,
        post_process=is_last,
        share_embeddings_and_output_weights=shape.tie_word_embeddings and head == "lm",
        position_embedding_type="none",
        pg_collection=groups.pgc,
        vp_stage=number if layout.vpp > 1 else None,
    )
    if shape.embedding_scale != 1.0 and model.pre_process:
        model.embedding.register_forward_hook(partial(_scaled, shape.embedding_scale))
    model.vision = None
    if shape.vision is not None and model.pre_process:
        tower = build_tower(shape, config.params_dtype)
        for name, parameter in tower.named_parameters():
            parameter.requires_grad_(shape.vision.is_trained(name))
            mark(parameter, tower=True)  # each tensor-parallel rank has the gradient of its pictures
        model.add_tower(tower, shape.vision)
    if head in params.SCALAR_HEADS and is_last:
        model.output_layer = ScalarHead(shape.hidden_size)
    elif is_last:
        # `PackedGPT` gathers the head's input and sums the gradient of it.
        model.output_layer.sequence_parallel = model.output_layer.allreduce_dgrad = False
        model.output_layer.disable_grad_reduce = True
        if config.gradient_accumulation_fusion:
            mark(model.output_weight(), sums_in_fp32=True)  # see hpcrl.kernels.fp32_product
    if exact:
        use_exact_linear(model)
    if lora is not None:
        add_adapters(model, (shard for shard in local if shard.chunk == number), lora)
    for module in model.modules():
        if isinstance(module, Mixture):
            module.place_weights()
    return model


def _scaled(scale: float, module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * embedding_factor(scale, output)


def local_shards(shape: ModelShape, groups: RoleGroups, head: Head, lora: Lora | None = None) -> list[Shard]:
    """Return this rank's part of each parameter."""
    return params.shards(shape, groups.layout, groups.rank, head=head, lora=lora)


def transformer_config(
    shape: ModelShape,
    groups: RoleGroups,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: RecomputeConfig | None,
    te: TransformerEngineConfig | None,
    *,
    fp32_gradients: bool,
) -> TransformerConfig:
    """Megatron's description of the model: no dropout, no biases except of queries, keys and values."""
    layout = groups.layout
    settings: dict[str, Any] = {
        # The layer spec's kernel if it is available; else megatron's operations, whose memory `plan` counts.
        "use_te_activation_func": _has_kernel("swiglu", dtype),
        "num_attention_heads": layout.tp,  # megatron divides by the heads of a model without attention, too
        **_settings(shape),
    }
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=_stages(shape, groups),
        perform_initialization=False,
        gradient_accumulation_fusion=fp32_gradients,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        calculate_per_token_loss=True,
        # A batch cannot distinguish sends to the next stage from sends to the previous one if they are the same rank.
        batch_p2p_comm=torch.distributed.get_backend(groups.pp) != "gloo" and (layout.pp, layout.vpp > 1) != (2, True),
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        moe_layer_freq=[int(layer.num_experts > 0) for layer in shape.layers],
        **settings,
        **(_recomputed(recompute) if recompute is not None else {}),
        **({"fp8": te.fp8, "fp8_recipe": te.fp8_recipe} if te is not None and te.fp8 is not None else {}),
    )


def _settings(shape: ModelShape) -> dict[str, Any]:
    """Megatron has one config for all layers."""
    found: dict[str, Any] = {}
    for block in shape.kinds:
        for name, value in block.settings().items():
            if found.setdefault(name, value) != value:
                raise ValueError(f"layers with {name}={found[name]} and {value} in one model are not supported")
    return found


def _recomputed(recompute: RecomputeConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"recompute_granularity": recompute.granularity}
    if recompute.granularity == "full":
        found |= {"recompute_method": recompute.method, "recompute_num_layers": recompute.num_layers}
    elif recompute.granularity == "selective":
        found["recompute_modules"] = list(recompute.modules)
    return found


class _Stages(PipelineParallelLayerLayout):
    """Layers per chunk; megatron's own class gets the stage and the chunks from process-global state."""

    def __init__(self, layout: list[list[str]], pp_size: int, pp_rank: int) -> None:
        super().__init__(layout, pp_size)
        self.pp_rank = pp_rank

    def get_layer_offset(self, layer_type: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
        pp_size = self.pipeline_model_parallel_size
        piece = (vp_stage or 0) * pp_size + (self.pp_rank if pp_rank is None else pp_rank)
        return sum(self.layout[number % pp_size][number // pp_size].count(layer_type) for number in range(piece))


def _stages(shape: ModelShape, groups: RoleGroups) -> _Stages | None:
    pieces = groups.layout.pp * groups.layout.vpp
    if shape.num_layers % pieces == 0 and groups.layout.vpp == 1:
        return None
    layout = [["decoder"] * len(params.stage_layers(shape.num_layers, piece, pieces)) for piece in range(pieces)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return _Stages(layout, groups.layout.pp, groups.coord.pp)


def _has_kernel(name: str, dtype: torch.dtype) -> bool:
    """Whether a kernel is available in this job. Raises InputError if the environment requires an unavailable one."""
    like = torch.empty(0, dtype=dtype, device=platform.device())
    try:
        return use_triton(name, like)
    except (ValueError, RuntimeError) as error:
        raise InputError(str(error)) from None


def _layer_spec(layer: Layer, groups: RoleGroups, exact: bool, replaced: Collection[str] | None) -> ModuleSpec:
    """Megatron's local layer with the modules of its blocks. Unless `replaced` is None, norms and the linear layers
    that it names are Transformer Engine's."""
    experts = layer.num_experts or None
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, normalization="RMSNorm")
    if replaced is not None:
        use_transformer_engine(spec, replaced)
    for block in layer.blocks:
        block.use(spec, groups, exact=exact)
    layer.norms.use(spec, uses_te=replaced is not None)
    return spec


def uses_transformer_engine(
    cfg: TransformerEngineConfig | None,
    device: torch.device,
    shape: ModelShape,
    *,
    exact: bool,
    has_adapters: bool = False,
) -> bool:
    """Whether layers of a model on `device` are Transformer Engine's: where `cfg` asks for it or for 8-bit products.
    Raises InputError for settings that cannot work.

    That it is installed changes nothing: in bf16 it gained nothing (a step of GRPO of a 1.5B model took 16.6 s, with
    megatron's layers 16.4 s), and its products of fp32 numbers are TF32.

    Version 2.20.2 has run with megatron-core 0.16.1 on one H200, in bf16 and with tensorwise and blockwise 8-bit
    products. Recomputation, checkpoints and offload with it have not run. Tests show when it is used, and that
    unsupported settings raise errors.
    """
    if cfg is None or not (cfg.enable or cfg.fp8 is not None):
        return False
    other = unsupported(shape.layers, "transformer_engine")
    problems = {
        "there is no GPU": device.type != "cuda",
        "transformer_engine is not installed": importlib.util.find_spec("transformer_engine") is None,
        "rollout.exact=true uses other layers": exact,
        f"{other} uses other layers": other is not None,
        "model.lora_rank needs megatron's own layers": has_adapters,
        "model.transformer_engine.enable is false": cfg.enable is False,
    }
    missing = next((problem for problem, is_found in problems.items() if is_found), None)
    if missing and cfg.enable:
        raise InputError(f"model.transformer_engine.enable=true, but {missing}; remove it or set it to null")
    if missing:
        raise InputError(
            f"model.transformer_engine.fp8={cfg.fp8} needs Transformer Engine, but {missing}; set fp8 to null"
        )
    params.check_fp8(shape, cfg.fp8)
    return True


def _replaced(
    cfg: TransformerEngineConfig, local: Sequence[Shard], groups: RoleGroups, dtype: torch.dtype
) -> tuple[str, ...]:
    """Return the linear layers that are Transformer Engine's: all, or of a model with 8-bit products those that gain by
    them; megatron's own ignore the context in which products are 8-bit. Logs which products have which numbers."""
    own = str(dtype).removeprefix("torch.")
    if cfg.fp8 is None:
        if dtype is torch.float32:
            log.warning(
                "%s: model.transformer_engine.enable=true computes float32 products in TF32, log-probs differ by 1e-3; "
                "null keeps float32",
                groups.role,
            )
        return LINEAR
    is_large = {shard.name.split(".")[-2]: shard.is_large for shard in local if shard.is_matrix}
    large, small = (tuple(name for name in LINEAR if is_large.get(name) is each) for each in (True, False))
    log.info(
        "%s: fp8 products: %s; %s products: %s (fp8 needs %d elements of a weight per rank)",
        *(groups.role, ", ".join(large) or "none", own, ", ".join(small) or "none", params.FP8_ELEMENTS),
    )
    return large


def use_transformer_engine(spec: ModuleSpec, replaced: Collection[str] = LINEAR) -> None:
    """Replace norms, and the linear layers named by `replaced`, in a layer of megatron's local spec, in place.

    Norms are not fused into the products after them, so that parameters have the same names and shapes as without
    Transformer Engine, and checkpoints, loading and refit use one table. Attention is not replaced.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
    modules = TEColumnParallelLinear, TERowParallelLinear, TEColumnParallelLinear, TERowParallelLinear
    owners = layer.self_attention.submodules, mlp_submodules(spec)[0]
    for number, (name, module) in enumerate(zip(LINEAR, modules, strict=True)):
        if name in replaced:
            setattr(owners[number // 2], name, module)


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[tuple[int, str], torch.nn.Parameter]:
    """Return parameters by chunk and local name, as in `Shard`."""
    return {
        (number, name): parameter for number, chunk in enumerate(chunks) for name, parameter in chunk.named_parameters()
    }


def _mark_parameters(chunks: Sequence[PackedGPT], local: list[Shard]) -> None:
    """Set the attributes that megatron reads from parameters, and sets itself only when it initialises them or has more
    ranks."""
    parameters = named_parameters(chunks)
    built = {place: tuple(parameter.shape) for place, parameter in parameters.items()}
    expected = {(shard.chunk, shard.local_name): shard.local_shape for shard in local}
    if built != expected:
        different = {place for place, _ in built.items() ^ expected.items()}
        raise RuntimeError(f"model and hpcrl.model.params disagree about {sorted(different)}")
    for shard in local:
        parameter = parameters[shard.chunk, shard.local_name]
        # Replicated parameters must not be counted once per tensor-parallel rank in the gradient norm.
        mark(parameter, tensor_model_parallel=not shard.tp_replicated)
        if shard.is_expert:
            # Sums gradients over the expert grid's replicas; megatron sets it only if ep > 1.
            mark(parameter, allreduce=False)


def copy_boxes(whole: Tensor, local: Tensor, shard: Shard) -> None:
    """Copy a rank's rectangles of a global parameter into its local tensor."""
    whole, local = whole.view(whole.size(0), -1), local.view(local.size(0), -1)
    for box in shard.boxes:
        source = whole[slice(*box.global_rows), slice(*box.global_cols)]
        rows, cols = source.shape
        local[box.local_row : box.local_row + rows, box.local_col : box.local_col + cols].copy_(source)


def paste_boxes(local: Tensor, whole: Tensor, shard: Shard) -> None:
    """Copy a rank's local tensor into its rectangles of a global parameter."""
    whole, local = whole.view(whole.size(0), -1), local.view(local.size(0), -1)
    for box in shard.boxes:
        target = whole[slice(*box.global_rows), slice(*box.global_cols)]
        rows, cols = target.shape
        target.copy_(local[box.local_row : box.local_row + rows, box.local_col : box.local_col + cols])


def initial_weight(
    shape: ModelShape, name: str, global_shape: tuple[int, ...], seed: int, initial: float | None = None
) -> Tensor:
    """Return the initial tensor of a global parameter, fp32 on the CPU, a function of (seed, name) only; filled with
    `initial` if it is given.

    Normal with deviation `init_std`; the projections back into the residual stream are scaled by 1 / sqrt(2 layers) as
    in GPT-2 (Radford et al. 2019, section 2.3). Other vectors than biases are 1; biases and the heads of critic and
    reward model are 0.
    """
    if len(global_shape) == 1:
        initial = initial if initial is not None else float(not name.endswith("bias"))
    if initial is not None:
        return torch.full(global_shape, initial)
    if name in params.SCALAR_HEADS.values() or name.endswith("lora_B"):
        return torch.zeros(global_shape)
    std = shape.init_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")):
        std /= math.sqrt(2 * shape.num_layers)
    key = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little", signed=True))
    if name.endswith("lora_A"):
        bound = 1 / math.sqrt(global_shape[1])
        return torch.empty(global_shape).uniform_(-bound, bound, generator=generator)
    return torch.empty(global_shape).normal_(0.0, std, generator=generator)

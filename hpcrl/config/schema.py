"""The job template as types: every YAML key, its default, its unit. Names are verl's where verl has one."""

from __future__ import annotations

import dataclasses
import math
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    create_model,
    field_validator,
    model_validator,
)

from hpcrl.algorithms.aggregation import LossAggMode
from hpcrl.algorithms.distillation import Distillation
from hpcrl.algorithms.kl import KlCtrl, KlKind
from hpcrl.algorithms.optimizers.optimizer import OPTIMIZERS, Optimizer, built_in_parameters
from hpcrl.algorithms.parameters import inherited, members, parameters_of
from hpcrl.algorithms.pf_ppo import PfPpo
from hpcrl.algorithms.rollout_correction import RolloutCorrection
from hpcrl.algorithms.surrogate_losses import ActorParameters, PolicyLossParameters
from hpcrl.algorithms.token_advantages import AlgorithmParameters
from hpcrl.config.engines import EngineSpec, engine_spec
from hpcrl.config.paths import Files, NodePath, PathStr, expanded, literal, one_or_several
from hpcrl.rewards.manager import CustomReward, OverlongBuffer, RewardKwargsParameters, Scoring


def _only(is_right: Callable[[Any], bool], expected: str) -> AfterValidator:
    """A check of a value, whose error says what was expected."""

    def checked(value: Any) -> Any:
        if is_right(value):
            return value
        raise ValueError(expected)

    return AfterValidator(checked)


def _each_once(values: list[int]) -> list[int]:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is None:
        return values
    raise ValueError(f"each step once, and {twice} is there {values.count(twice)} times")


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
_IN_A_FOLDER = _only(
    lambda name: name not in ("", ".", "..") and not set("/\0") & set(name), "a folder name without '/'"
)
FolderName = Annotated[str, AfterValidator(expanded), _IN_A_FOLDER, PlainSerializer(literal)]
DisplayName = Annotated[str, _only(str.strip, "a name that is not blank")]
PositiveOrMinusOne = Annotated[int, _only(lambda number: number == -1 or number >= 1, "-1, or an integer of 1 or more")]


def _bounded(kind: Any, bounds: typing.Mapping[str, Any]) -> Any:
    """The type with bounds on its numbers, or on the numbers and the length of its lists."""
    length = bounds.get("length")
    of_numbers = {key: bound for key, bound in bounds.items() if key != "length"}
    kinds: list[Any] = []
    for one in members(kind):
        if one in (int, float):
            kinds.append(Annotated[one, Field(**of_numbers)])
        elif length is not None and typing.get_origin(one) is list:
            (of_list,) = get_args(one)
            inner: Any = list[_bounded(of_list, of_numbers)]  # type: ignore[misc]
            kinds.append(Annotated[inner, Field(min_length=length, max_length=length)])
        else:
            kinds.append(one)
    return typing.Union[tuple(kinds)]  # noqa: UP007


class Section(BaseModel):
    """A frozen section; unknown keys, wrong types, NaN and infinity are errors.

    A section that inherits from parameter dataclasses (`hpcrl.algorithms.parameters`) has their fields as keys, and is
    an instance of them.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,  # only rank 0 validates, and only with the class that `extended` returns
    )
    null_is_default: ClassVar[frozenset[str]] = frozenset()  # keys that verl's templates may hold as null

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        annotations = dict(cls.__dict__.get("__annotations__", {}))
        for base in cls.__bases__:
            if dataclasses.is_dataclass(base) and not issubclass(base, BaseModel):
                for name, kind, default, has_factory, description, bounds in parameters_of(base):
                    given: dict[str, Any] = {"default_factory" if has_factory else "default": default}
                    if name not in annotations:
                        annotations[name] = _bounded(kind, bounds)
                        setattr(cls, name, Field(**given, description=description))
        cls.__annotations__ = annotations

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in cls.null_is_default}


S = TypeVar("S", bound=Section)
V = TypeVar("V")


def key(default: V, description: str, **bounds: Any) -> V:
    """The field of a key; `bounds` are those of pydantic's Field."""
    return cast("V", Field(default, description=description, **bounds))


def subsection(kind: type[Section], description: str) -> Any:
    """The field of a section, whose keys have their defaults."""
    return Field(default_factory=kind, description=description)


class OpenSection(Section):
    """A section that may also hold a mapping of parameters for each plugin, under the plugin's name.

    The mappings are checked by `hpcrl.config.plugins` once the plugins are loaded.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]


Loggers = Annotated[list[Literal["console", "tensorboard", "wandb", "mlflow"]], BeforeValidator(one_or_several)]


class WatchdogConfig(Section):
    """The job ends, with a hang report, if no rank makes progress for a time."""

    enable: bool = key(True, "watch for hangs")
    publish_seconds: PositiveFloat = key(5.0, "seconds between two updates of a rank's status")
    min_seconds: PositiveFloat = key(600.0, "seconds without progress of any rank before it is a hang, at least")
    factor: PositiveFloat = key(10.0, "the same as a multiple of the longest time seen in the same phase")
    first_seconds: PositiveFloat = key(
        3600.0, "the same, in seconds, in phases that have not ended once: loading, compiling"
    )


class RunConfig(Section):
    name: FolderName = key("run", "name of the run; its files go to <dir>/<name>/")
    dir: PathStr = key("runs", "folder that holds runs")
    group_readable: bool = key(
        False, "the run's files are readable by the user's group (umask 027), not by the user only (077)"
    )
    seed: int = key(0, "seed of weights, data order and sampling", ge=-(2**63), lt=2**63)
    plugins: Files = key([], "Python files that register algorithms, optimizers, engines or layers of your own")
    job_file: PathStr | None = key(None, "Python file of a job of your own, as `hpcrl run` was given it")
    c10d_backend: Literal["mpi_host", "gloo"] = key(
        "mpi_host", "torch.distributed backend on the CPU: our own over MPI, or gloo"
    )
    nccl_timeout: PositiveInt = key(
        1800, "on GPUs: seconds after which a collective of NCCL or gloo that has not ended fails"
    )
    cpu_bind: bool = key(
        True,
        "on GPUs: bind each rank to CPUs near its GPU, unless the launcher has bound it; ranks whose GPUs "
        "are near the same CPUs divide them",
    )
    full_determinism: bool = key(
        False, "on GPUs: kernels that always add in one order, which are slower; the CPU's always do"
    )
    memory_snapshot: bool = key(
        False,
        "on GPUs: keep the Python stacks of the last 100,000 allocations, and write them to "
        "logs/oom_rank_*.pickle when the memory is not enough; costs 2 to 4 us of host time per allocation",
    )
    owner_heartbeat_seconds: float = key(
        10.0,
        "seconds between two heartbeats of the folder's owner; after three, a start on another host takes "
        "the folder of a run that was killed",
        gt=0.0,
        le=3600.0,
    )
    watchdog: WatchdogConfig = subsection(WatchdogConfig, "hangs")


class RecomputeConfig(Section):
    """Activations that training does not keep but computes again in the backward pass; Megatron's options."""

    granularity: Literal["selective", "full"] | None = key(
        None, "null: keep all; selective: all but what `modules` compute; full: only layers' inputs"
    )
    method: Literal["uniform", "block"] = key(
        "uniform", "of full: uniform: every num_layers layers together; block: the first num_layers of a stage"
    )
    num_layers: PositiveInt = key(1, "of full: layers, see method")
    modules: list[Literal["core_attn", "mlp", "moe"]] = key(["core_attn"], "of selective: what is computed again")


class DdpConfig(Section):
    """Communication between the replicas of a trained model that overlaps with computation; Megatron's options."""

    overlap_grad_reduce: bool | None = key(
        None, "reduce gradients during the last micro-batch's backward pass; null: on GPUs, if possible"
    )
    overlap_param_gather: bool | None = key(
        None,
        "gather updated weights of a sharded optimizer during the next mini-batch's forward pass; null: "
        "on GPUs, if possible",
    )
    bucket_size: PositiveInt | None = key(
        None,
        "with overlap_grad_reduce, parameters that are communicated at once; null: 40 million, or 1 "
        "million per replica if more",
    )


class TransformerEngineConfig(Section):
    """Transformer Engine's layers instead of megatron's own, on GPUs."""

    enable: bool | None = key(None, "true: its norms and linear layers, in TF32 for float32; null: only what fp8 needs")
    fp8: Literal["e4m3", "hybrid"] | None = key(
        None, "8-bit products of large weights: e4m3; hybrid: e5m2 for gradients; null: in model.dtype"
    )
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] = key(
        "tensorwise", "scales of 8-bit products; mxfp8 needs Blackwell, the others Hopper"
    )


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _projections(value: object) -> object:
    return list(get_args(Projection)) if value == "all-linear" else value


class RopeScalingConfig(Section):
    """config.json's `rope_scaling`: a rotary embedding stretched beyond the sequences of the first training."""

    rope_type: Literal["linear", "llama3", "yarn"] = Field(description="formula")
    factor: PositiveFloat = Field(description="how much longer sequences may become")
    original_max_position_embeddings: PositiveInt | None = key(
        None, "llama3, yarn: longest sequence of the first training; null: model.max_position_embeddings"
    )
    low_freq_factor: PositiveFloat | None = key(
        None, "llama3: wavelengths above the original length over this are stretched"
    )
    high_freq_factor: PositiveFloat | None = key(
        None, "llama3: wavelengths below the original length over this are kept"
    )
    beta_fast: PositiveFloat | None = key(None, "yarn: frequencies above these turns are kept; null: 32")
    beta_slow: PositiveFloat | None = key(None, "yarn: those below these turns are stretched; null: 1")
    attention_factor: PositiveFloat | None = key(None, "yarn: on the embedding; null: by the factor")


class MoeConfig(Section):
    """What routers add to the loss of the model that is trained: sums over layers, in Megatron's names.
    `load_imbalance` is only for predictions."""

    aux_loss_coeff: NonNegativeFloat = key(
        0.0, "weight of the loss that balances experts within each sequence; 0: none"
    )
    z_loss_coeff: NonNegativeFloat = key(0.0, "weight of the loss that keeps logits small; 0: none")
    load_imbalance: float | None = key(
        None,
        "tokens of the busiest expert over the mean, beyond what chance gives it, for predicted times: "
        "actor/moe_load_imbalance/mean of a run; null is 1. `perf/predicted_s` has each step's own, and `--calibrate` "
        "that of the median step",
        ge=1.0,
    )


class VisionConfig(Section):
    """The vision tower of a vision-language model, which `model.path` names."""

    train: Literal["none", "merger", "tower", "all"] = key(
        "none", "part that is trained: the merger, which maps patches to tokens, the tower before it, or all"
    )
    lr: PositiveFloat | None = key(None, "peak learning rate of what is trained of it; null: the role's")
    cache_gib: NonNegativeFloat = key(
        1.0, "GiB of host memory per rollout rank for features of pictures, while the tower is frozen"
    )


class ModelConfig(Section):
    """A Llama-like decoder: RMSNorm, SwiGLU, grouped-query attention, RoPE, untied head unless said otherwise.

    The architecture is given here, or is that of the Hugging Face directory `path`; the rest holds for both.
    """

    path: PathStr | None = key(None, "Hugging Face directory, or null for the architecture given here")
    init_from: PathStr | None = key(
        None, "run, checkpoint or Hugging Face directory whose weights start actor, reference, critic body"
    )
    tokenizer: PathStr | None = key(None, "tokenizer directory; null: model.path")
    hf_config: dict[str, Any] = key(
        {},
        "keys of a config.json: the architecture of a model of any family, with random weights; replaces "
        "the keys from family to dense_layers",
    )
    family: Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"] = key(
        "llama",
        "model_type of its config.json: qwen2 has biases of queries, keys, values, qwen3* norms of "
        "queries and keys, qwen3_moe and mixtral experts",
    )
    num_layers: PositiveInt = key(2, "transformer layers")
    hidden_size: PositiveInt = key(128, "width of the residual stream")
    ffn_hidden_size: PositiveInt = key(320, "width of the SwiGLU layer")
    num_attention_heads: PositiveInt = key(4, "query heads")
    num_query_groups: PositiveInt = key(2, "key-value heads")
    head_dim: PositiveInt | None = key(None, "width of a head; null: hidden_size / num_attention_heads")
    vocab_size: PositiveInt | None = key(None, "tokens; null: the tokenizer's")
    softmax_vocab: Literal["tokenizer", "config"] = key(
        "tokenizer",
        "ids that have a probability, in rollout and training: those of the tokenizer, or all vocab_size "
        "ids, of which some may have no token; teachers and reward models follow the policy's",
    )
    max_position_embeddings: PositiveInt = key(4096, "longest sequence, in tokens")
    rope_theta: PositiveFloat = key(10000.0, "base of the rotary embedding")
    rope_scaling: RopeScalingConfig | None = key(None, "stretching of the rotary embedding; null: none")
    rms_norm_eps: PositiveFloat = key(1e-5, "epsilon of RMSNorm")
    init_std: PositiveFloat = key(0.02, "standard deviation of random weights")
    tie_word_embeddings: bool = key(False, "share embedding and output weights")
    num_experts: NonNegativeInt = key(0, "experts of a layer; 0: none")
    moe_ffn_hidden_size: PositiveInt | None = key(None, "width of an expert; null: ffn_hidden_size")
    moe_topk: PositiveInt = key(2, "experts of each token")
    moe_norm_topk_prob: bool = key(True, "the weights of a token's experts sum to 1")
    dense_layers: list[NonNegativeInt] = key([], "of a model with experts, the layers without, from 0")
    moe: MoeConfig = subsection(MoeConfig, "routers in training")
    dtype: Literal["float32", "bfloat16"] = key("float32", "dtype of weights and activations")
    recompute: RecomputeConfig = subsection(RecomputeConfig, "activations that training computes twice to save memory")
    gradient_accumulation_fusion: bool | None = key(
        None, "add bfloat16 weights' gradients to their float32 sum over micro-batches without rounding; null: on GPUs"
    )
    ddp: DdpConfig = subsection(DdpConfig, "communication between replicas during computation")
    transformer_engine: TransformerEngineConfig = subsection(
        TransformerEngineConfig, "layers of NVIDIA's Transformer Engine"
    )
    vision: VisionConfig = subsection(VisionConfig, "vision tower of a vision-language model")
    lora_rank: NonNegativeInt = key(
        0, "rank of the policy's adapters, which are then all that is trained of it; 0: none"
    )
    lora_alpha: PositiveFloat = key(16.0, "adapters count lora_alpha / lora_rank times")
    target_modules: Annotated[list[Projection], BeforeValidator(_projections), Field(min_length=1)] = key(
        list(get_args(Projection)),
        "projections with an adapter, by Llama's names in every family, experts included; or all-linear",
    )


class RolePlacement(Section):
    pool: str = key("all", "name of a pool in placement.pools")
    tp: PositiveInt = key(1, "tensor-parallel size")
    pp: PositiveInt = key(1, "pipeline-parallel size")
    cp: PositiveInt = key(1, "context-parallel size")
    ep: PositiveInt = key(1, "expert-parallel size")
    etp: PositiveInt = key(1, "tensor-parallel size of experts")
    vpp: PositiveInt = key(1, "virtual pipeline chunks per stage")


class PlacementConfig(Section):
    pools: dict[str, str] = key({"all": "*"}, 'name -> world ranks: "*", "0-63", "0,2,4-7"')
    actor: RolePlacement = subsection(RolePlacement, "layout of the trained policy")
    critic: RolePlacement = subsection(RolePlacement, "layout of the value model")
    ref: RolePlacement = subsection(RolePlacement, "layout of the reference policy")
    rollout: RolePlacement = subsection(RolePlacement, "layout of the generation engine")
    reward: RolePlacement = subsection(RolePlacement, "layout of the reward model")
    teacher: RolePlacement = subsection(RolePlacement, "layout of the teacher of a distillation")
    judge: RolePlacement = subsection(RolePlacement, "layout of the judge's engine")


class SamplerConfig(OpenSection):
    class_path: PathStr | None = key(None, "Python file of a sampler of your own; null: the built-in order")
    class_name: str | None = key(
        None, "class in that file, or a built-in curriculum: DifficultyCurriculum, LevelCurriculum"
    )


class DataConfig(Section):
    train_files: Files = key([], "Parquet, JSON or Arrow files of training prompts")
    train_weights: list[PositiveFloat] | None = key(
        None, "share of each training file in the prompts drawn; null: all files laid end to end"
    )
    sampler: SamplerConfig = subsection(SamplerConfig, "which training prompts come next")
    val_files: Files = key([], "Parquet, JSON or Arrow files of validation prompts")
    train_max_samples: PositiveOrMinusOne = key(-1, "use only the first N training rows; -1: all")
    val_max_samples: PositiveOrMinusOne = key(-1, "use only the first N validation rows; -1: all")
    format: Literal[
        "auto",
        "ready",
        "alpaca",
        "alpaca_preference",
        "sharegpt",
        "sharegpt_preference",
        "prompt_completion",
        "implicit_preference",
    ] = key("auto", "what the files' rows are; auto: by their columns; ready: as this program has them")
    prompt_key: str = key("prompt", "column that holds the chat messages or the prompt string")
    train_batch_size: PositiveInt = key(1024, "prompts per step, over all ranks")
    gen_batch_size: PositiveInt | None = key(
        None, "prompts per generation under algorithm.filter_groups; null: train_batch_size"
    )
    max_prompt_length: PositiveInt = key(512, "tokens of a prompt at most")
    max_response_length: PositiveInt = key(512, "tokens of a response at most")
    shuffle: bool = key(True, "permute the rows anew in each epoch, keyed by (seed, epoch)")
    filter_overlong_prompts: bool = key(False, "leave out prompts above max_prompt_length")
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error", "what to do with a prompt above max_prompt_length"
    )
    chat_template: str | None = key(None, "Jinja template in place of the tokenizer's own")
    apply_chat_template_kwargs: dict[str, str | int | float | bool] = key({}, "extra arguments of the chat template")
    accept_dropped_parts: bool = key(
        False,
        "train on answers and turns of which the chat template leaves out a part, such as thoughts or tool "
        "calls; false: they are an error",
    )
    accept_generation_prompt_mismatch: bool = key(
        False,
        "train on turns whose rendering does not begin with the generation prompt, from where they differ; "
        "false: they are an error",
    )
    image_key: str = key("images", "column that holds a row's pictures, for models with a vision tower")
    video_key: str = key("videos", "column that holds a row's videos: lists of frames")
    min_pixels: PositiveInt | None = key(
        None, "pixels of a resized picture at least; null: the value in preprocessor_config.json"
    )
    max_pixels: PositiveInt | None = key(
        None, "pixels of a resized picture at most; null: the value in preprocessor_config.json"
    )
    max_image_pixels: PositiveInt = key(
        89_478_485, "pixels of a picture in a data file at most, compared before it is decoded"
    )
    bad_images: Literal["error", "skip"] = key("error", "what to do with a row whose pictures cannot be used")
    image_workers: NonNegativeInt = key(
        0, "processes per rank that decode pictures ahead of the step; 0: the rank itself does, in the step"
    )


class ValKwargs(Section):
    n: PositiveInt = key(1, "samples per validation prompt")
    do_sample: bool | None = key(None, "false: greedy, whatever the temperature; null: by temperature")
    temperature: NonNegativeFloat = key(0.0, "sampling temperature; 0 is greedy")
    top_k: PositiveOrMinusOne = key(-1, "keep the k likeliest tokens; -1: all")
    top_p: PositiveFraction = key(1.0, "nucleus probability mass")


class EnvironmentConfig(Section):
    """What an agent acts in: an object of a class of your own for each trajectory, in a process of its own."""

    path: PathStr | None = key(None, "Python file of an environment (hpcrl.api.Environment); null: none")
    name: str = key("Environment", "class in that file")
    kwargs: dict[str, str | int | float | bool] = key({}, "arguments of the class")
    timeout: PositiveFloat = key(60.0, "seconds for a reset or a step; then the sample ends and does not count")
    memory_limit_mb: PositiveInt = key(4096, "memory of one environment's processes")
    max_processes: PositiveInt = key(64, "processes of one environment")
    max_file_mb: PositiveInt = key(1024, "size of each file that an environment writes")
    max_open: PositiveInt | None = key(
        None, "environments at the same time per rollout leader; null: rollout.max_num_seqs"
    )
    num_workers: PositiveInt | None = key(
        None, "of these, how many run a step at the same time; null: as many as the leader has CPUs"
    )


class MultiTurnConfig(Section):
    """Tools and users that answer the model inside a response."""

    enable: bool = key(False, "continue after a tool call or a user's answer, in the same response")
    max_assistant_turns: PositiveInt | None = key(None, "turns of the model at most; null: any number")
    max_user_turns: PositiveInt | None = key(None, "answers by tools and users at most; null: any number")
    max_parallel_calls: PositiveInt = key(1, "tool calls of one turn that are carried out")
    format: str = key(
        "hermes",
        "how the model writes a tool call: hermes, json, qwen3_coder, openai (GPT-OSS), glm45, kimi_k2, "
        "minimax_m2, apertus, or a parser that the tools' file registers",
    )
    function_tool_path: PathStr | None = key(None, "Python file whose functions marked @tool are the tools")
    tool_timeout: PositiveFloat = key(10.0, "seconds for one tool call; then its answer says so")
    num_tool_workers: PositiveInt = key(1, "processes per rollout leader that run tools")
    max_tool_response_length: PositiveInt = key(1024, "tokens of one tool's answer at most")
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle", "which side of an answer that is too long is kept; middle: both ends"
    )
    interaction_path: PathStr | None = key(None, "Python file of a user simulator; null: no user answers")
    interaction_name: str = key("Interaction", "class in that file")
    template_history: bool = key(
        False,
        "the model reads its earlier turns as the chat template renders them; where that is not what it "
        "wrote, a new sequence begins",
    )
    environment: EnvironmentConfig = subsection(EnvironmentConfig, "an environment, in place of tools and users")

    @property
    def has_environment(self) -> bool:
        return self.enable and self.environment.path is not None


class CheckpointEngineConfig(Section):
    """How weights go from the actor to the engine; the name is verl's."""

    update_weights_bucket_megabytes: PositiveInt = key(
        256, "memory of a refit beyond the weights themselves, per rank, in MiB"
    )
    alias: bool = key(True, "share a weight with the actor where both sides have the same slice of it")
    verify: Literal["first", "always", "never"] = key(
        "first", "compare checksums of actor and engine after the first two refits, or each one"
    )


class TrtllmConfig(Section):
    """TensorRT-LLM 1.2.1 inside the ranks; it needs GPUs and Open MPI, and has not been run yet."""

    design: Literal["tp_group", "single_process"] = key(
        "tp_group", "tp_group: one worker per rank of a replica; single_process: replicas of tp 1"
    )
    model_dir: PathStr | None = key(None, "Hugging Face directory with config.json; null: model.path")


class EngineConfig(Section):
    """Sizes of a generation engine."""

    max_num_seqs: PositiveInt = key(256, "sequences that decode at once in a replica at most")
    max_num_batched_tokens: PositiveInt = key(8192, "prompt tokens of one prefill call")
    gpu_memory_utilization: PositiveFraction = key(0.5, "share of the free memory that the KV cache may take")
    kv_cache_gib: PositiveFloat | None = key(
        None, "KV cache of a rank, in GiB; null: by gpu_memory_utilization, at most what the job can use"
    )
    enforce_eager: bool = key(False, "no CUDA graphs")


class RolloutConfig(EngineConfig, OpenSection):
    engine: str = key("native", "generation engine: native, tensorrt_llm, vllm, or a plugin's")
    dtype: Literal["float32", "bfloat16"] | None = key(None, "dtype of the engine; null: model.dtype")
    quantization: Literal["fp8"] | None = key(
        None, "fp8: the engine's matrices of attention, feed-forward layers and experts in 8 bits (native)"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = key(
        "auto", "fp8: keys and values in 8 bits, without scales (native engine); auto: rollout.dtype"
    )
    n: PositiveInt = key(1, "samples per prompt")
    temperature: PositiveFloat = key(1.0, "sampling temperature")
    top_k: PositiveOrMinusOne = key(-1, "keep the k likeliest tokens; -1: all")
    top_p: PositiveFraction = key(1.0, "nucleus probability mass")
    ignore_eos: bool = key(False, "continue to max_response_length after an end-of-sequence token")
    enable_prefix_caching: bool = key(
        True, "prefill a prompt once for all samples of its group, and a turn once for the turns after it"
    )
    free_cache_engine: bool = key(True, "give the KV cache back between generations")
    exact: bool = key(False, "bitwise the training's log-probs: the actor's dtype and tp, one thread on a CPU; slow")
    multi_turn: MultiTurnConfig = subsection(MultiTurnConfig, "tools and users")
    checkpoint_engine: CheckpointEngineConfig = subsection(
        CheckpointEngineConfig, "refit, from the actor's weights to the engine's"
    )
    trtllm: TrtllmConfig = subsection(TrtllmConfig, "engine=tensorrt_llm")
    val_kwargs: list[ValKwargs] = Field(
        default_factory=lambda: [ValKwargs()], description="sampling of validation: one mapping, or a list of several"
    )

    @field_validator("val_kwargs", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return [value] if isinstance(value, dict) else value


class OptimConfig(OpenSection, *built_in_parameters()):  # type: ignore[misc]
    lr: NonNegativeFloat = key(1e-6, "peak learning rate")
    optimizer: str = key("adam", f"{', '.join(OPTIMIZERS.names())}, or a plugin's; adam is AdamW")
    lr_warmup_steps: int = key(-1, "optimizer steps of linear warm-up; -1: by lr_warmup_steps_ratio", ge=-1)
    lr_warmup_steps_ratio: Fraction = key(0.0, "warm-up as a share of all optimizer steps")
    lr_warmup_init: NonNegativeFloat = key(0.0, "learning rate at the start of the warm-up")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = key(
        "constant", "shape after the warm-up"
    )
    lr_decay_steps: PositiveInt | None = key(None, "optimizer steps until min_lr; null: all of them")
    min_lr: NonNegativeFloat = key(0.0, "learning rate at the end of the decay")
    weight_decay: NonNegativeFloat = key(0.01, "decoupled weight decay")
    clip_grad: NonNegativeFloat = key(1.0, "gradient norm at most; 0: no clipping")

    def chosen(self) -> Optimizer:
        """The optimizer that is named, with its parameters. Raises UnknownName, and ValueError for its parameters."""
        entry = OPTIMIZERS.get(self.optimizer)
        own = {} if entry.is_built_in else (self.__pydantic_extra__ or {}).get(self.optimizer, {})
        return entry.function(entry.params(**(inherited(entry.params, self) | own)))

    @model_validator(mode="after")
    def _fits_its_optimizer(self) -> OptimConfig:
        """A plugin's optimizer is checked once it is loaded."""
        entry = OPTIMIZERS.entries().get(self.optimizer)
        if entry is not None and entry.is_built_in:
            states = {f"{name}_dtype" for one in (True, False) for name in self.chosen().state(is_matrix=one)}
            for key, field in type(self).model_fields.items():
                if key.endswith("_dtype") and key not in states and getattr(self, key) != field.default:
                    raise ValueError(
                        f"{key}={field.default} beside optimizer={self.optimizer}, which has no such state"
                    )
        return self


class PolicyLossConfig(OpenSection, PolicyLossParameters):
    loss_mode: str = key("vanilla", "name of a registered policy loss")


class RouterReplayConfig(Section):
    """Training sends tokens to the experts of an earlier pass, of a model with experts."""

    mode: Literal["disabled", "R2", "R3"] = key(
        "disabled", "R2: those of the log-probs before the update; R3: those of the rollout (native engine), in both"
    )


class ActorConfig(Section, ActorParameters):
    optim: OptimConfig = subsection(OptimConfig, "optimizer")
    ppo_mini_batch_size: PositiveInt = key(256, "prompts per optimizer step, over all ranks")
    ppo_max_token_len_per_gpu: PositiveInt = key(16384, "tokens per micro-batch of one model replica")
    ppo_epochs: PositiveInt = key(1, "passes over a step's samples")
    router_replay: RouterReplayConfig = subsection(RouterReplayConfig, "which experts tokens go to in training")
    loss_agg_mode: LossAggMode = key("token-mean", "how token losses become one number")
    loss_scale_factor: PositiveFloat | None = key(None, "divisor of seq-mean-token-sum-norm; null: max_response_length")
    separate_old_log_prob: bool = key(
        False,
        "compute old log-probs in a separate forward pass even where a step makes one update; false: take "
        "them from that update's forward pass unless something reads them earlier",
    )
    policy_loss: PolicyLossConfig = subsection(PolicyLossConfig, "policy loss")
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = key(False, "log the entropy of the update too, without a bonus")
    calculate_sum_pi_squared: bool = key(
        False, "log variance_proxy/*; estimators that need the sum of squared probabilities have it anyway"
    )
    use_kl_loss: bool = key(False, "add a KL term against the reference to the loss")
    kl_loss_coef: NonNegativeFloat = key(0.001, "weight of the KL term in the loss")
    kl_loss_type: KlKind = key("low_var_kl", "estimator of the KL term in the loss")
    shuffle: bool = key(True, "draw mini-batches, the critic's too, by a permutation keyed by (seed, step, ppo epoch)")
    param_offload: bool = key(False, "weights are in host memory while other roles compute")
    grad_offload: bool = key(False, "gradients have no memory while other roles compute")
    optimizer_offload: bool = key(False, "the optimizer's state is in host memory while others compute")


class CriticConfig(Section):
    optim: OptimConfig = Field(default_factory=lambda: OptimConfig(lr=1e-5), description="optimizer")
    ppo_mini_batch_size: PositiveInt | None = key(None, "prompts per optimizer step; null: the actor's")
    ppo_max_token_len_per_gpu: PositiveInt = key(32768, "tokens per micro-batch of one model replica")
    ppo_epochs: PositiveInt | None = key(None, "passes over a step's samples; null: the actor's")
    cliprange_value: PositiveFloat = key(0.5, "the new value stays within this of the old one")
    loss_agg_mode: LossAggMode | None = key(None, "null: the actor's")
    loss_scale_factor: PositiveFloat | None = key(None, "divisor of seq-mean-token-sum-norm; null: the actor's")
    param_offload: bool = key(False, "weights are in host memory while other roles compute")
    grad_offload: bool = key(False, "gradients have no memory while other roles compute")
    optimizer_offload: bool = key(False, "the optimizer's state is in host memory while others compute")


class RefConfig(Section):
    log_prob_max_token_len_per_gpu: PositiveInt | None = key(
        None, "tokens per micro-batch of one model replica; null: the actor's"
    )
    param_offload: bool = key(False, "weights are in host memory while other roles compute")


class TeacherConfig(Section):
    init_from: PathStr | None = key(None, "weights: a run's folder or a checkpoint; null: model.init_from")
    model: ModelConfig | None = key(None, "architecture; null: the actor's")
    log_prob_max_token_len_per_gpu: PositiveInt | None = key(
        None, "tokens per micro-batch of one model replica; null: the actor's"
    )
    param_offload: bool = key(False, "weights are in host memory while other roles compute")


class DistillationLossConfig(OpenSection, Distillation):
    null_is_default = frozenset({"topk"})


class DistillationConfig(Section):
    enabled: bool = key(False, "learn from a teacher on the policy's own samples")
    distillation_loss: DistillationLossConfig = subsection(DistillationLossConfig, "what the student minimises")


class CustomRewardConfig(Section, CustomReward):
    path: PathStr | None = key(None, "Python file of a reward function of your own; null: by data_source")


class RewardManagerConfig(Section):
    name: str = key("naive", "how responses reach the scorer, and what is made of its results")


class OverlongBufferConfig(Section, OverlongBuffer):
    pass


class RewardKwargs(Section, RewardKwargsParameters):
    overlong_buffer_cfg: OverlongBufferConfig = subsection(
        OverlongBufferConfig, "DAPO's shaping of over-long responses"
    )


class RewardModelConfig(Section):
    enable: bool = key(False, "score with a reward model too")
    init_from: PathStr | None = key(None, "its weights: a run's folder or a checkpoint of `hpcrl rm`")
    model: ModelConfig | None = key(None, "its architecture; null: the actor's")
    weight: float = key(1.0, "weight of the reward model's score")
    rule_weight: float = key(1.0, "weight of the rule's score; 0: no rule is asked")
    max_token_len_per_gpu: PositiveInt = key(32768, "tokens per micro-batch of one model replica")
    param_offload: bool = key(False, "weights are in host memory while other roles compute")


class JudgeConfig(EngineConfig):
    """A second generation engine, of frozen weights, that is asked about responses."""

    enable: bool = key(False, "ask a model about every response, and add its verdict to the score")
    init_from: PathStr | None = key(
        None,
        "its weights: a run, checkpoint or Hugging Face directory; null: model.path, or without model what "
        "the policy starts from",
    )
    model: ModelConfig | None = key(None, "its architecture and tokenizer; null: the policy's")
    kind: Literal["score", "pairwise", "rubric"] = key(
        "score",
        "score: a number per response; pairwise: which of two responses to a prompt, or of a response and "
        "the reference answer, is better; rubric: which criteria a response meets",
    )
    template: str | None = key(
        None,
        "prompt of the judge, with {response} and where wanted {prompt}, {ground_truth}, {rubric}, and for "
        "pairwise {other}; null: built in",
    )
    template_path: PathStr | None = key(None, "text file with the template, in place of template")
    rubric: list[str | dict[str, str | float]] = key(
        [], "criteria, texts or {criterion, weight}, of rows that have none in extra_info.rubric"
    )
    pattern: str | None = key(
        None,
        "regular expression of a verdict, of which the last match counts: one group (score: the number, "
        "pairwise: A, B or C), rubric: two (number of the criterion, yes or no); null: the built-in template's",
    )
    scale: Annotated[list[float], Field(min_length=2, max_length=2)] | None = key(
        [0.0, 10.0], "score: numbers that become 0 and 1; others are no verdicts; null: any, unchanged"
    )
    weight: float = key(1.0, "weight of the judge's score")
    rule_weight: float = key(1.0, "weight of the rule's score; 0: no rule is asked")
    default_score: float = key(0.0, "the judge's score of a sample without a verdict that can be read")
    temperature: NonNegativeFloat = key(0.0, "of the judge's answers; 0: the likeliest tokens")
    num_retries: NonNegativeInt = key(
        1, "further answers where a verdict cannot be read; at temperature 1 if temperature is 0"
    )
    apply_chat_template_kwargs: dict[str, str | int | float | bool] = key(
        {}, "extra arguments of the judge's chat template"
    )
    max_prompt_length: PositiveInt = key(4096, "tokens of the judge's prompt; a sample that needs more has no verdict")
    max_response_length: PositiveInt = key(512, "tokens of the judge's answer at most")
    cache_size: PositiveInt = key(
        65536, "answers that a replica keeps, in memory and in <run>/judge/, and does not draw again"
    )
    param_offload: bool = key(False, "weights are in host memory while other roles compute")


class RewardConfig(OpenSection, Scoring):
    reward_manager: RewardManagerConfig = subsection(RewardManagerConfig, "reward manager")
    reward_kwargs: RewardKwargs = subsection(RewardKwargs, "arguments of the reward manager")
    reward_model: RewardModelConfig = subsection(RewardModelConfig, "reward model")
    judge: JudgeConfig = subsection(JudgeConfig, "a model that is asked about responses")
    custom_reward_function: CustomRewardConfig = subsection(CustomRewardConfig, "reward function of your own")

    @property
    def rule_weight(self) -> float:
        """Weight of the rule's score, beside a reward model and a judge."""
        return math.prod(model.rule_weight for model in (self.reward_model, self.judge) if model.enable)

    @field_validator("reward_manager", mode="before")
    @classmethod
    def _name_only(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


class KlCtrlConfig(Section, KlCtrl):
    pass


class FilterGroupsConfig(Section):
    null_is_default = frozenset({"metric"})

    enable: bool = key(False, "drop prompts whose samples all score the same, and draw others (DAPO)")
    metric: str = key("reward", "what must differ: reward, score, acc, or a key that the scorer returns")
    max_num_gen_batches: NonNegativeInt = key(0, "generations per step at most; 0: any number")
    max_dropped_prompts: NonNegativeInt = key(
        2000, "the job ends once so many prompts in a row are dropped and none is kept; 0: it continues"
    )
    max_inflight_gen_batches: PositiveInt = key(
        1, "verl's key, without effect here: generations come one after another"
    )


class PfPpoConfig(Section, PfPpo):
    pass


class RolloutCorrectionConfig(Section, RolloutCorrection):
    preset: str | None = key(None, "a preset's name, whose values the other keys then change")


class AlgorithmConfig(OpenSection, AlgorithmParameters):
    null_is_default = frozenset({"gdpo_reward_keys", "filter_groups", "rollout_correction"})

    adv_estimator: str = key("gae", "name of a registered advantage estimator")
    use_kl_in_reward: bool = key(False, "subtract the KL penalty from the token rewards")
    kl_penalty: KlKind = key("kl", "estimator of the KL penalty in the reward; a + changes nothing here")
    kl_ctrl: KlCtrlConfig = subsection(KlCtrlConfig, "KL controller of the reward penalty")
    filter_groups: FilterGroupsConfig = subsection(FilterGroupsConfig, "dynamic sampling")
    use_pf_ppo: bool = key(False, "resample a step's samples by their scores (PF-PPO); gae only")
    pf_ppo: PfPpoConfig = subsection(PfPpoConfig, "PF-PPO")
    rollout_correction: RolloutCorrectionConfig = subsection(
        RolloutCorrectionConfig, "correction of rollout against training log-probs"
    )


class CheckpointConfig(Section):
    """How checkpoints are written, and which ones stay beside the newest trainer.max_ckpt_to_keep."""

    async_save: bool = key(
        True, "training continues while a checkpoint is written, from a copy in host memory; false: it waits"
    )
    scratch_dir: NodePath | None = key(
        None,
        "folder on each node that a checkpoint is written to before it goes to the run directory, "
        "with variables of the node; null: straight to the run directory",
    )
    snapshot_dir: NodePath = key(
        "/dev/shm",
        "folder in memory of each node for the snapshots of trainer.snapshot_freq, with variables of the node",
    )
    keep_every: PositiveInt | None = key(None, "checkpoints of every N-th step stay; null: none")
    keep_best: PositiveInt | None = key(None, "the N checkpoints best by best_metric stay; null: none")
    best_metric: str | None = key(
        None, "metric of the saved step, as metrics.jsonl names it: val-core/countdown/acc/mean@1"
    )
    best_mode: Literal["max", "min"] = key("max", "max: a larger best_metric is better; min: a smaller")


class TrainerConfig(Section):
    null_is_default = frozenset({"logger", "profile_steps", "project_name"})

    total_epochs: PositiveInt = key(30, "passes over the training prompts")
    total_training_steps: PositiveInt | None = key(None, "steps; null: by total_epochs")
    test_freq: PositiveOrMinusOne = key(-1, "validate every N steps; -1: never")
    save_freq: PositiveOrMinusOne = key(-1, "save every N steps and at the end; -1: never")
    snapshot_freq: NonNegativeInt = key(
        0,
        "steps between two snapshots of models and optimizers in memory of the nodes, from which the next "
        "start on these nodes resumes; 0: none",
    )
    save_hf: bool = key(False, "put the policy into each checkpoint as a Hugging Face directory, too")
    val_before_train: bool = key(True, "validate before the first step")
    critic_warmup: NonNegativeInt = key(0, "steps that train only the critic")
    rollouts_from: PathStr | None = key(None, "rollout archive folder that feeds the steps, in place of rollout")
    save_rollouts: bool = key(True, "write rollouts/step_*.h5")
    record_update_steps: Annotated[list[PositiveInt], AfterValidator(_each_once)] = key(
        [],
        "steps of train in whose rollouts/step_*.h5 the actor's update adds log-probs at and after the "
        "update and loss_gradients, at the cost of one forward pass",
    )
    reuse_rollouts: bool = key(
        True,
        "write finished responses through to rollouts/*.gen.log; a step that was cut short is resumed with "
        "them. false: it is generated again, bit for bit",
    )
    max_ckpt_to_keep: PositiveInt | None = key(
        3, "newest checkpoints that stay; null: all, as in runs that began before this had a bound"
    )
    checkpoint: CheckpointConfig = subsection(CheckpointConfig, "how checkpoints are written")
    resume_mode: Literal["auto", "disable"] = key("auto", "auto: resume from the newest valid checkpoint")
    logger: Loggers = key(
        ["console", "tensorboard"], "where metrics go; the console, TensorBoard and metrics.jsonl always have them"
    )
    project_name: DisplayName = key("hpcrl", "project of wandb, experiment of MLflow")
    experiment_name: DisplayName | None = key(None, "name of the run in wandb and MLflow; null: run.name")
    log_val_generations: NonNegativeInt = key(8, "validation samples written as text to TensorBoard")
    validation_data_dir: FolderName | None = key(
        None, "name of a folder inside the run's for validation generations as JSONL; null: none"
    )
    head_chunk_tokens: PositiveInt | None = key(
        1024,
        "tokens whose logits are in memory at a time, and computed anew in the backward pass; on CUDA the "
        "vocabulary is cut instead, whatever the number; null: those of a whole micro-batch, kept",
    )
    profile_steps: Annotated[list[PositiveInt], AfterValidator(_each_once)] = key(
        [],
        "steps of train, sft and rm, as in [3, 4]: each rank writes a trace of torch's profiler to profile/*.json.gz",
    )
    trace_steps: Literal["all", "none"] | PositiveInt = key(
        "all",
        "steps whose trace each rank keeps in trace/, for `hpcrl trace`: all, every N-th, or none; at most "
        "4 MiB per rank, beyond which older steps are thinned",
    )
    balance_batch: bool = key(True, "balance tokens over replicas inside each mini-batch")
    walltime_margin: NonNegativeFloat = key(
        60.0, "seconds before the end of the allocation that stay free, for shutdown and delays"
    )


class AsyncTrainingConfig(Section):
    """Generation and training at the same time, on ranks of their own."""

    mode: Literal["sync", "one_step_off", "bounded_staleness"] = key(
        "sync",
        "one_step_off: the next step's samples are drawn during this one's update; bounded_staleness: "
        "generation never stops",
    )
    staleness_threshold: NonNegativeInt = key(
        1, "bounded_staleness: weight versions that a sample's first token may be behind the update"
    )
    partial_rollout: bool = key(
        True, "bounded_staleness: a refit interrupts responses, which continue with the new weights"
    )


def _shell_words(value: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"a command in the shell's notation ({error})") from None
    if not words or not words[0]:
        raise ValueError("a command, such as ./notify.sh")
    program = expanded(words[0])
    return value if program == words[0] else shlex.join([program, *words[1:]])


ShellCommand = Annotated[str, AfterValidator(_shell_words)]
# Both end up in lines that sbatch reads: no space but the one, no quote, no line break.
SlurmValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:@+=&|*()\[\]/%-]+$")]
SbatchOption = Annotated[str, Field(pattern=r"^--?[A-Za-z][A-Za-z0-9-]*([= ][A-Za-z0-9_.,:@+=&|*()\[\]/%-]+)?$")]


WallTime = Annotated[str, Field(pattern=r"^(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d$")]
AUTO = "auto"  # of job.time


def seconds_of(time: WallTime) -> int:
    days, _, clock = time.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


class JobConfig(Section):
    """The allocation that `hpcrl submit` asks for; what is null here comes from the site file, or is left to Slurm."""

    nodes: PositiveInt = key(1, "nodes")
    ntasks_per_node: PositiveInt = key(1, "ranks per node")
    time: WallTime | Literal["auto"] = key(
        "01:00:00",
        "wall time of a slice, [D-]HH:MM:SS; auto: submit sets it to what the run takes on job.machine, at "
        "most the site file's max_time",
    )
    partition: SlurmValue | None = key(None, "partition")
    account: SlurmValue | None = key(None, "account that is charged")
    qos: SlurmValue | None = key(None, "quality of service")
    constraint: SlurmValue | None = key(None, "features that nodes must have")
    reservation: SlurmValue | None = key(None, "reservation")
    exclude: SlurmValue | None = key(None, "nodes to exclude")
    gpus_per_node: NonNegativeInt = key(0, "GPUs per node")
    gpu_memory_gib: PositiveFloat = key(80.0, "memory of a GPU that `hpcrl plan` fits the job into, in GiB")
    machine: PathStr | None = key(
        None,
        "machine file, or the name of one in configs/machines: submit and train predict by it how long a "
        "step takes; null: they do not",
    )
    cpus_per_task: PositiveInt | None = key(None, "cores per rank")
    mem: SlurmValue | None = key(None, 'memory per node, such as "480G"; "0": all of it')
    exclusive: bool = key(False, "do not share nodes with other jobs")
    signal_seconds: PositiveInt = key(300, "seconds before the end when ranks get SIGURG", le=65535)
    requeue: bool = key(True, "continue in another slice after a planned stop or the loss of a node")
    max_restarts: NonNegativeInt = key(100, "slices after the first at most")
    max_relaunches: NonNegativeInt = key(
        10,
        "starts of the ranks again inside a slice's allocation at most, after the loss of a rank or node; "
        "0: each loss ends the slice",
    )
    spare_nodes: NonNegativeInt = key(
        0, "nodes besides `nodes` in the allocation, without ranks until they replace lost ones"
    )
    extra: list[SbatchOption] = key([], "further options of sbatch, such as --mail-type=END")
    on_event: Annotated[list[ShellCommand], BeforeValidator(one_or_several)] = key(
        [],
        "command, or a list of them, that runs when the job has started, saved, left, is done, hangs or "
        "has failed, such as ./notify.sh",
    )

    @property
    def time_seconds(self) -> int:
        """Of a slice. Raises ValueError for `auto`, which submit replaces."""
        return seconds_of(self.time)

    @property
    def node_hours(self) -> float:
        """What the first slice costs at most."""
        return (self.nodes + self.spare_nodes) * self.time_seconds / 3600


class Config(Section):
    run: RunConfig = subsection(RunConfig, "the run and its folder")
    model: ModelConfig = subsection(ModelConfig, "architecture and start weights")
    placement: PlacementConfig = subsection(PlacementConfig, "which ranks do what")
    data: DataConfig = subsection(DataConfig, "prompts")
    rollout: RolloutConfig = subsection(RolloutConfig, "generation")
    actor: ActorConfig = subsection(ActorConfig, "policy training")
    critic: CriticConfig = subsection(CriticConfig, "value training")
    ref: RefConfig = subsection(RefConfig, "reference policy")
    teacher: TeacherConfig = subsection(TeacherConfig, "teacher of a distillation")
    distillation: DistillationConfig = subsection(DistillationConfig, "on-policy distillation")
    reward: RewardConfig = subsection(RewardConfig, "scores")
    algorithm: AlgorithmConfig = subsection(AlgorithmConfig, "advantages and KL")
    trainer: TrainerConfig = subsection(TrainerConfig, "the loop")
    async_training: AsyncTrainingConfig = subsection(AsyncTrainingConfig, "overlap of generation and training")
    job: JobConfig = subsection(JobConfig, "batch system")

    def section(self, name: str) -> Any:
        """The section that a job declares."""
        return getattr(self, name)

    @property
    def engine(self) -> EngineSpec:
        """The rollout engine. Raises UnknownName."""
        return engine_spec(self)

    @property
    def uses_rules(self) -> bool:
        """Whether the score uses rules or a custom function. An environment takes the place of the rules."""
        custom = self.reward.custom_reward_function.path is not None
        return self.reward.rule_weight != 0 and (custom or not self.rollout.multi_turn.has_environment)

    @property
    def dtypes(self) -> set[str]:
        """Of all models of a job."""
        models = [self.model, self.teacher.model, self.reward.reward_model.model, self.reward.judge.model]
        found = {model.dtype for model in models if model is not None}
        return found | ({self.rollout.dtype} if self.rollout.dtype else set())


def extended(
    base: type[Config], sections: Mapping[str, type[Section]], roles: Iterable[str], *, qualname: str, module: str
) -> type[Config]:
    """`base` with further sections, whose defaults are those of their classes, and with layouts of further roles.

    Objects of the class can be pickled if it is found in `module` under `qualname`.
    """

    def make(base: type[S], name: str, fields: Mapping[str, Any]) -> type[S]:
        section: Any = create_model(name.split(".")[-1], __base__=base, __module__=module, **fields)
        section.__qualname__ = name
        return cast("type[S]", section)

    def default(kind: type[Section], text: str) -> tuple[type[Section], Any]:
        return kind, Field(default_factory=kind, description=text)

    known: Any = base.model_fields["placement"].annotation
    layouts = {role: default(RolePlacement, f"layout of {role}") for role in roles if role not in known.model_fields}
    placement = make(known, f"{qualname}.placement_class", layouts)
    fields = {name: default(kind, (kind.__doc__ or name).split("\n")[0]) for name, kind in sections.items()}
    schema = make(base, qualname, fields | {"placement": default(placement, "which ranks do what")})
    schema.placement_class = placement  # type: ignore[attr-defined]
    return schema

"""How values of verl's keys become values of keys here, where they differ in their unit, their name or their form."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from hpcrl.config.engines import ENGINES
from hpcrl.config.schema import Loggers, Projection, RolloutConfig

# what verl has where a command is silent, of keys that are read below
DEFAULTS = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "gae",
    "actor.optim.lr": 1e-6,
    "critic.optim.lr": 1e-5,
    "actor.clip_ratio_low": 0.2,
    "actor.clip_ratio_high": 0.2,
    "actor.ppo_max_token_len_per_gpu": 16384,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
OFF = (None, False, 0, "", "disabled", "constant", "torch.optim")  # of keys without counterpart: nothing is lost
TRACKERS = get_args(get_args(get_args(Loggers)[0])[0])
PROJECTIONS = {  # Megatron's names of them
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


class Missing(str):
    """Why a run of verl has something that a run here cannot have, or what its user has to decide."""


class Verl:
    """The settings of a command of verl, by their keys without prefix."""

    def __init__(self, values: Mapping[str, Any], is_megatron: bool):
        self.values = values
        self.is_megatron = is_megatron or any(".megatron." in key for key in values)

    def get(self, key: str) -> Any:
        return self.values.get(key, DEFAULTS.get(key))

    def parallel(self, role: str, axis: str) -> int:
        """The size that verl gives an axis of a role; the reference has the actor's where it has none of its own."""
        names = {
            "tp": "tensor_model",
            "pp": "pipeline_model",
            "cp": "context",
            "ep": "expert_model",
            "etp": "expert_tensor",
        }
        keys = [f"{role}.megatron.{names[axis]}_parallel_size"]
        if axis == "cp":
            keys += [f"{role}{part}.ulysses_sequence_parallel_size" for part in ("", ".fsdp_config", ".fsdp")]
        size = next((self.values[key] for key in keys if self.values.get(key)), None)
        if size is None and role == "ref":
            return self.parallel("actor", axis)
        return size if isinstance(size, int) else 1

    def is_dynamic(self, role: str) -> bool:
        key = f"{role}.{'log_prob_' if role == 'ref' else ''}use_dynamic_bsz"
        return bool(self.values.get(key, False if role == "actor" else self.is_dynamic("actor")))

    @property
    def longest(self) -> int:
        return int(self.get("data.max_prompt_length")) + int(self.get("data.max_response_length"))

    @property
    def num_gpus(self) -> int:
        return int(self.get("trainer.nnodes")) * int(self.get("trainer.n_gpus_per_node"))

    def replicas(self, role: str) -> int:
        return max(
            1, self.num_gpus // (self.parallel(role, "tp") * self.parallel(role, "pp") * self.parallel(role, "cp"))
        )


Keys = dict[str, Any]
Result = Keys | str  # keys of this program; or why there are none, Missing where that changes what is trained
Convert = Callable[[Any, Verl, str], Result]  # of a value, all settings, and the key


class Converted(NamedTuple):
    """A key whose value is converted. words: what to write, for hints."""

    words: str
    convert: Convert


def token_key(role: str) -> str:
    names = {"ref": "log_prob_max_token_len_per_gpu", "reward.reward_model": "max_token_len_per_gpu"}
    return f"{role}.{names.get(role, 'ppo_max_token_len_per_gpu')}"


def micro_batch(value: Any, verl: Verl, key: str) -> Result:
    """Sequences per micro-batch are as many tokens as the longest sequences have."""
    role, _, name = key.rpartition(".")
    if verl.is_dynamic(role):
        return "use_dynamic_bsz fills micro-batches by tokens"
    if value is None:
        return "null"
    sequences = int(value)
    if not name.endswith("_per_gpu"):  # of all replicas together
        if verl.values.get(f"{key}_per_gpu") is not None:
            return f"{name}_per_gpu is set, too"
        sequences = max(1, sequences // verl.replicas(role))
    return {token_key(role): sequences * verl.longest}


def token_length(value: Any, verl: Verl, key: str) -> Result:
    """verl counts a GPU's share of a sequence that context parallelism divides, this program the replica's whole."""
    role = key.rpartition(".")[0]
    if not verl.is_dynamic(role):
        return "verl reads it only with use_dynamic_bsz"
    return {key: int(value) * verl.parallel(role, "cp")}


def engine(value: Any, verl: Verl, key: str) -> Result:
    """The engine that has verl's name for it, otherwise the default one."""
    default = RolloutConfig.model_fields["engine"].default
    names = (name for name, spec in ENGINES.entries().items() if spec.verl_name == value)
    return {"rollout.engine": next(names, default)}


def engine_experts(value: Any, verl: Verl, key: str) -> Result:
    words = "the engine divides experts, as all weights, by placement.rollout.tp"
    return words if value in (None, 1) else Missing(words)


def greedy(value: Any, verl: Verl, key: str) -> Result:
    return "verl's agent loop draws by val_kwargs.temperature, whatever this says; here it is null, which is the same"


def lora_alpha(value: Any, verl: Verl, key: str) -> Result:
    has_adapters = verl.get("model.lora_rank") or verl.get("model.lora.rank")
    return {"model.lora_alpha": value} if has_adapters else "there are no adapters"


def reward_manager(value: Any, verl: Verl, key: str) -> Result:
    """verl's prime scores as naive does, in processes of its own, as every manager here."""
    return {"reward.reward_manager.name": "naive" if value == "prime" else value}


def num_nodes(value: Any, verl: Verl, key: str) -> Result:
    return {"job.nodes": value}


def gpus_per_node(value: Any, verl: Verl, key: str) -> Result:
    return {"job.ntasks_per_node": value, "job.gpus_per_node": value}


def run_name(value: Any, verl: Verl, key: str) -> Result:
    return {"run.name": folder_name(str(value))}


def folder_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", text).strip("_.") or "run"


def run_dir(value: Any, verl: Verl, key: str) -> Result:
    """verl's checkpoints are in this folder, those of a run here in <run.dir>/<run.name>."""
    name = folder_name(str(verl.get("trainer.experiment_name") or ""))
    parent, last = os.path.split(str(value).rstrip("/"))
    return {"run.dir": parent or "." if folder_name(last) == name else str(value)}


def logger(value: Any, verl: Verl, key: str) -> Result:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in TRACKERS]
    return {key: known} if known else Missing(f"the trackers are {', '.join(TRACKERS)}")


def lost_loggers(value: Any) -> list[str]:
    return [str(name) for name in (value if isinstance(value, list) else [value]) if name not in TRACKERS]


def recompute(value: Any, verl: Verl, key: str) -> Result:
    if verl.is_megatron:
        return "verl reads it for FSDP only; for Megatron it is override_transformer_config.recompute_granularity"
    return {"model.recompute.granularity": "full"} if value else "nothing is computed again by default"


def min_lr(value: Any, verl: Verl, key: str) -> Result:
    role = key.split(".")[0]
    return "null" if value is None else {f"{role}.optim.min_lr": float(value) * float(verl.get(f"{role}.optim.lr"))}


def warmup_steps(value: Any, verl: Verl, key: str) -> Result:
    return "null: by lr_warmup_steps_ratio" if value is None else {key: int(value)}


def optimizer(value: Any, verl: Verl, key: str) -> Result:
    return {key: "adam" if str(value) in ("AdamW", "adamw", "Adam") else str(value).lower()}


def frequency(value: Any, verl: Verl, key: str) -> Result:
    return {key: -1 if value in (0, None) else value}


def dtype(value: Any, verl: Verl, key: str) -> Result:
    name = {"bf16": "bfloat16", "fp32": "float32"}.get(str(value), str(value))
    if name == "float32" and ".fsdp" in key:
        return (
            "FSDP keeps float32 weights and computes in bfloat16, as the optimizer does here with model.dtype=bfloat16"
        )
    return {"model.dtype": name} if name in ("bfloat16", "float32") else Missing(f"{name} is not supported")


def clip_ratio(value: Any, verl: Verl, key: str) -> Result:
    low, high = verl.get("actor.clip_ratio_low"), verl.get("actor.clip_ratio_high")
    return (
        {key: value}
        if low is None or high is None
        else f"verl's bounds are clip_ratio_low={low} and clip_ratio_high={high}"
    )


def projections(value: Any, verl: Verl, key: str) -> Result:
    if value == "all-linear":
        return {"model.target_modules": value}
    names = value if isinstance(value, list) else [value]
    own = [each for name in names for each in PROJECTIONS.get(name, (name,))]
    strange = [name for name in own if name not in get_args(Projection)]
    return Missing(f"{strange[0]} is no projection here") if strange else {"model.target_modules": own}


def critic_path(value: Any, verl: Verl, key: str) -> Result:
    if value == verl.get("model.path"):
        return "the critic begins with the actor's weights"
    return Missing("the critic has the actor's architecture and begins with its weights, or those of model.init_from")


def reward_path(value: Any, verl: Verl, key: str) -> Result:
    if not verl.get("reward.reward_model.enable"):
        return "reward_model.enable is false"
    return {"reward.reward_model.init_from": value, "reward.reward_model.model.path": value}


def save_contents(value: Any, verl: Verl, key: str) -> Result:
    return (
        {"trainer.save_hf": True}
        if "hf_model" in (value or []) and key.startswith("actor")
        else "the rest is always saved"
    )


def routing_replay(value: Any, verl: Verl, key: str) -> Result:
    return {"actor.router_replay.mode": "R3"} if value else "false"


def rollouts(value: Any, verl: Verl, key: str) -> Result:
    return {"trainer.save_rollouts": True} if value else "null"


def validation_folder(value: Any, verl: Verl, key: str) -> Result:
    return {key: folder_name(os.path.basename(str(value).rstrip("/")))} if value else "null"


def tool_response(value: Any, verl: Verl, key: str) -> Result:
    return Missing("verl counts characters, and this key tokens; its default here is 1024 tokens")

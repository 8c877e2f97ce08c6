"""What to write instead of keys of verl that have no namesake here."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

# where verl's sections are here, with and without older places of the same keys
PREFIXES = {
    "actor_rollout_ref.": "",
    "reward_model.": "reward.reward_model.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "sandbox_fusion.": "reward.sandbox_fusion.",
}
ROLES = {"role": "actor|critic|ref", "trained": "actor|critic"}

PACKED = "sequences are always packed, and micro-batches filled, by tokens"
CHUNKED = "log-probs and entropy are always computed in chunks of trainer.head_chunk_tokens"
MEGATRON = "training is always megatron-core's"
CODE = "no code of a model's directory is run; families of models are those of model.family"
ENGINES = "it is an option of vLLM or SGLang"
RANKS = "the ranks are those that srun or mpiexec starts, in placement.pools"
CHECKPOINTS = "checkpoints are always sharded, and resume under any layout"
QUANTIZED = "there is no quantisation in training"
TURNS = "tokens of earlier turns are never tokenised again"
SERVERS = "there are no servers; the ranks generate"
PLUGIN = "use run.plugins: a Python file that registers it"
SEED = "use run.seed: data order, mini-batches and samples follow from it"

# A key matches the first pattern that fits: <role> is actor, critic or ref, <trained> one of the first two, {a,b} one
# of several, * any text of one name, and ** at an end any names. Words that do not begin with "use" follow "leave it
# out: ".
OF_VERL = {
    "**._target_": "such lines are Hydra's",
    # optimizers
    "<trained>.optim.total_training_steps": "schedules end with the run, or at <trained>.optim.lr_decay_steps",
    "<trained>.optim.{lr_scheduler_type,warmup_style}": "use <trained>.optim.lr_decay_style",
    "<trained>.optim.min_lr_ratio": "use <trained>.optim.min_lr, a learning rate and not a share",
    "<trained>.optim.use_precision_aware_optimizer": "use <trained>.optim.exp_avg_dtype and "
    "<trained>.optim.exp_avg_sq_dtype",
    "<trained>.optim.weight_decay_incr_style": "the weight decay is constant",
    "<trained>.optim.lr_wsd_*": "<trained>.optim.lr_decay_style has no such shape",
    "<trained>.optim.{num_cycles,zero_indexed_step}": "<trained>.optim.lr_decay_style has one form of each shape",
    "<trained>.optim.use_checkpoint_opt_param_scheduler": "a resumed run continues the schedule of its template",
    "<trained>.optim.main_grads_dtype": "gradients are summed in float32",
    "<trained>.optim.muon_*": "Muon updates queries, keys, values, gate and up apart, with AdamW's root mean square",
    "<trained>.optim.{use_layer_wise_distributed_optimizer,optimizer_impl}": "use <trained>.optim.optimizer",
    "<trained>.optim.override_optimizer_config.**": "the keys of <trained>.optim are all that can be set",
    "<trained>.grad_clip": "use <trained>.optim.clip_grad",
    # layouts, memory and precision
    "<role>.megatron.tensor_model_parallel_size": "use placement.<role>.tp",
    "<role>.megatron.pipeline_model_parallel_size": "use placement.<role>.pp",
    "<role>.megatron.virtual_pipeline_model_parallel_size": "use placement.<role>.vpp",
    "<role>.megatron.context_parallel_size": "use placement.<role>.cp",
    "<role>.megatron.expert_model_parallel_size": "use placement.<role>.ep",
    "<role>.megatron.expert_tensor_parallel_size": "use placement.<role>.etp",
    "<role>.{,fsdp_config.,fsdp.}ulysses_sequence_parallel_size": "use placement.<role>.cp",
    "<role>.{megatron,fsdp_config,fsdp}.param_offload": "use <role>.param_offload",
    "<trained>.{megatron,fsdp_config,fsdp}.{grad,optimizer}_offload": "use <trained>.<last>",
    "ref.{megatron,fsdp_config,fsdp}.{grad,optimizer}_offload": "the reference has weights only",
    "<role>.{megatron,fsdp_config,fsdp}.{dtype,model_dtype}": "use model.dtype",
    "<role>.{megatron,fsdp_config,fsdp}.seed": SEED,
    "<role>.{megatron,fsdp_config,fsdp}.full_determinism": "use run.full_determinism",
    "<role>.{megatron,fsdp_config,fsdp}.forward_only": "the role says whether it is trained",
    "<role>.{,megatron.,fsdp_config.,fsdp.}entropy_from_logits_*": "use trainer.head_chunk_tokens",
    "<role>.{,fsdp_config.,fsdp.}entropy_checkpointing": CHUNKED,
    "<role>.{,megatron.,fsdp_config.,fsdp.}{use_remove_padding,pad_*}": PACKED,
    "<role>.{,megatron.,fsdp_config.,fsdp.}qat.**": QUANTIZED,
    "<role>.{,fsdp_config.,fsdp.}strategy": MEGATRON,
    "<role>.{,fsdp_config.,fsdp.}use_torch_compile": "nothing is compiled",
    "<role>.megatron.sequence_parallel": "it is on where tp is above 1",
    "<role>.megatron.use_distributed_optimizer": "the optimizer is always distributed",
    "<role>.megatron.dist_checkpointing_path": "use model.init_from",
    "<role>.megatron.{use_dist_checkpointing,dist_checkpointing_prefix,dist*_optim_*}": CHECKPOINTS,
    "<role>.megatron.{dynamic_context_parallel,max_seqlen_per_dp_cp_rank}": "placement.<role>.cp is fixed",
    "<role>.megatron.override_transformer_config.recompute_granularity": "use model.recompute.granularity",
    "<role>.megatron.override_transformer_config.recompute_method": "use model.recompute.method",
    "<role>.megatron.override_transformer_config.recompute_num_layers": "use model.recompute.num_layers",
    "<role>.megatron.override_transformer_config.recompute_modules": "use model.recompute.modules",
    "<role>.megatron.override_transformer_config.{fp8,fp8_recipe}": "use model.transformer_engine.<last>",
    "<role>.megatron.override_transformer_config.moe_aux_loss_coeff": "use model.moe.aux_loss_coeff",
    "<role>.megatron.override_transformer_config.moe_z_loss_coeff": "use model.moe.z_loss_coeff",
    "<role>.megatron.override_transformer_config.attention_backend": "the device decides",
    "<role>.megatron.override_{transformer,mcore_model}_config.**": "the keys of model are all that can be set",
    "<role>.megatron.override_ddp_config.**": "use model.ddp.overlap_grad_reduce, model.ddp.overlap_param_gather and "
    "model.ddp.bucket_size",
    "<role>.megatron.{use_mbridge,vanilla_mbridge}": "Hugging Face directories are read and written directly",
    "<role>.megatron.router_replay.mode": "use actor.router_replay.mode",
    "<role>.megatron.router_replay.*": "routes stay in memory for their step",
    "<role>.megatron.**": f"{MEGATRON}, in the layout of placement.<role>",
    "<role>.{fsdp_config,fsdp}.**": f"FSDP is not there; {MEGATRON}, in the layout of placement.<role>",
    # actor, reference and critic
    "<role>.rollout_n": "use rollout.n",
    "<trained>.ppo_micro_batch_size*": f"use <trained>.ppo_max_token_len_per_gpu; {PACKED}",
    "critic.forward_m*": f"use critic.ppo_max_token_len_per_gpu; {PACKED}",
    "ref.log_prob_micro_batch_size*": f"use ref.log_prob_max_token_len_per_gpu; {PACKED}",
    "rollout.log_prob_m*": f"use actor.ppo_max_token_len_per_gpu; {PACKED}",
    "{actor,critic,ref,rollout}.{,log_prob_}use_dynamic_bsz": PACKED,
    "actor.freeze_vision_tower": "use model.vision.train: none, merger, tower or all",
    "actor.use_prefix_grouper": "a prompt is computed once for its samples in generation only",
    "<trained>.data_loader_seed": SEED,
    "<trained>.checkpoint.async_save": "use trainer.checkpoint.async_save",
    "<trained>.checkpoint.{save,load}_contents": "use trainer.save_hf for a Hugging Face directory; the rest is always "
    "saved and loaded",
    "<trained>.checkpoint.**": CHECKPOINTS,
    "{actor,critic,ref,rollout}.profiler.**": "use trainer.profile_steps",
    "critic.enable": "the role exists where algorithm.adv_estimator needs values",
    "critic.shuffle": "use actor.shuffle, which is for both",
    "{critic.,}nccl_timeout": "use run.nccl_timeout",
    "critic.model.path": "use model.path or model.init_from, with which both roles begin",
    "{critic.model.tokenizer_path,model.tokenizer_path,data.tokenizer}": "use model.tokenizer",
    "critic.model.**": "the critic has the actor's architecture, and the keys of model are for both",
    "hybrid_engine": "roles share ranks where placement.pools says so",
    # rollout
    "rollout.name": "use rollout.engine: native, vllm or tensorrt_llm",
    "rollout.mode": SERVERS,
    "rollout.{nnodes,n_gpus_per_node,data_parallel_size}": "use placement.rollout.pool, whose ranks are divided by tp",
    "rollout.tensor_model_parallel_size": "use placement.rollout.tp",
    "rollout.pipeline_model_parallel_size": "use placement.rollout.pp",
    "rollout.expert_parallel_size": "use placement.rollout.ep",
    "rollout.full_determinism": "use run.full_determinism",
    "rollout.{prompt_length,response_length}": "use data.max_<last>",
    "rollout.max_model_len": "it is data.max_prompt_length + data.max_response_length",
    "rollout.cudagraph_capture_sizes": "use rollout.enforce_eager: no CUDA graphs; else the engine chooses",
    "rollout.do_sample": "use rollout.temperature; training always draws",
    "rollout.calculate_log_probs": "log-probs of sampled tokens are always kept",
    "rollout.over_sample_rate": "a step waits for all of its samples",
    "rollout.{load_format,layered_summon}": "the engine's weights come from the actor",
    "rollout.multi_turn.tool_config_path": "use rollout.multi_turn.function_tool_path: Python functions in one file",
    "rollout.multi_turn.interaction_config_path": "use rollout.multi_turn.interaction_path: a class in a Python file",
    "rollout.multi_turn.num_repeat_rollouts": "use rollout.n",
    "rollout.multi_turn.{use_inference_chat_template,tokenization_sanity_check_mode}": TURNS,
    "rollout.agent.num_workers": "use rollout.multi_turn.num_tool_workers",
    "rollout.agent.**": "use rollout.multi_turn.enable, whose tools and users are Python files",
    "rollout.checkpoint_engine.**": "weights go from shard to shard, without a backend",
    "rollout.trace.**": "use trainer.save_rollouts: `hpcrl samples` shows every sample",
    "rollout.enable_rollout_routing_replay": "use actor.router_replay.mode=R3",
    "rollout.moe_load_balance_metrics_interval": "the load of experts is among every step's metrics",
    "rollout.quantization_config_file": "use rollout.quantization, fp8 or null",
    "rollout.qat.**": QUANTIZED,
    "{rollout,model}.mtp.**": "there is no multi-token prediction",
    "rollout.{engine_kwargs,router_config_path,prometheus,disaggregation}.**": SERVERS,
    "rollout.{enable_chunked_prefill,scheduling_policy,disable_log_stats}": ENGINES,
    "rollout.{logprobs_mode,multi_stage_wake_up,skip_tokenizer_init}": ENGINES,
    # model
    "model.hf_config_path": "use model.path",
    "model.custom_chat_template": "use data.chat_template",
    "{model,data,reward.reward_model.model}.{trust_remote_code,external_lib}": CODE,
    "model.override_config.**": "use the keys of model, without model.path",
    "model.enable_gradient_checkpointing": "use model.recompute.granularity: selective or full",
    "model.enable_activation_offload": "activations are computed again (model.recompute.granularity), not offloaded",
    "model.use_remove_padding": PACKED,
    "{actor.use_fused_kernels,model.use_fused_kernels,model.use_liger}": CHUNKED,
    "model.{fused_kernel_options,tiled_mlp}.**": CHUNKED,
    "model.lora.{rank,alpha}": "use model.lora_<last>",
    "model.lora.target_modules": "use model.target_modules",
    "model.{exclude_modules,lora.exclude_modules}": "use model.target_modules: what is to have adapters",
    "model.{lora_adapter_path,lora.adapter_path}": "adapters begin anew, or continue with their run",
    "model.lora.freeze_*": "use model.vision.train",
    "model.lora.**": "adapters are LoRA's, with model.lora_rank, model.lora_alpha and model.target_modules",
    "{model,data}.use_shm": "files are read where they are",
    # data
    "{data,rollout}.seed": SEED,
    "data.reward_fn_key": "rules are chosen by the column data_source",
    "data.val_batch_size": "all validation prompts are generated together",
    "data.{tool_config_path,function_tool_path}": "use rollout.multi_turn.function_tool_path",
    "data.mm_processor_kwargs.**": "use data.min_pixels and data.max_pixels",
    "data.dataloader_num_workers": "use data.image_workers, for pictures; the rest is read at the start",
    "data.custom_cls.**": "rows are in verl's schema; `hpcrl data` converts others",
    "data.image_patch_size": "preprocessor_config.json has it",
    "data.audio_key": "there are no audio models",
    "data.validation_shuffle": "validation takes the rows in the order of their files",
    "data.filter_overlong_prompts_workers": "the ranks share the work",
    "data.return_*": "the roles that need it always get it",
    # rewards
    "reward.{reward_manager.source,reward_manager.module.**,reward_model.reward_loop_*}": PLUGIN,
    "reward.{reward_model.num_workers,sandbox_fusion.max_concurrent}": "use reward.num_workers",
    "reward.reward_model.reward_manager": "use reward.reward_manager.name",
    "reward.reward_model.{enable_resource_pool,n_gpus_per_node,nnodes}": "use placement.reward.pool",
    "reward.reward_model.model_path": "use reward.reward_model.init_from, or reward.judge.init_from for a model that "
    "writes its verdict",
    "reward.reward_model.rollout.{gpu_memory_utilization,enforce_eager,temperature}": "use reward.judge.<last>",
    "reward.reward_model.rollout.{max_num_batched_tokens,max_num_seqs}": "use reward.judge.<last>",
    "reward.reward_model.rollout.tensor_model_parallel_size": "use placement.judge.tp",
    "reward.reward_model.rollout.{prompt_length,response_length}": "use reward.judge.max_<last>",
    "reward.reward_model.rollout.**": "the engine of reward.judge has the options of rollout that it needs",
    "reward.sandbox_fusion.memory_limit_mb": "use reward.memory_limit_mb",
    "reward.sandbox_fusion.url": "programs run in processes of the job; see reward.sandbox",
    # distillation
    "distillation.{n_gpus_per_node,nnodes}": "use placement.teacher.pool",
    "distillation.teacher_models.*.model_path": "use teacher.model.path, or teacher.init_from for a run",
    "distillation.teacher_models.*.inference.tensor_model_parallel_size": "use placement.teacher.tp",
    "distillation.teacher_models.**": "the teacher is a role with the keys of teacher and placement.teacher",
    "distillation.teacher_key": "there is one teacher",
    # the loop
    "trainer.nnodes": f"use job.nodes in batch jobs; {RANKS}",
    "trainer.n_gpus_per_node": f"use job.ntasks_per_node in batch jobs; {RANKS}",
    "trainer.default_local_dir": "use run.dir and run.name",
    "trainer.rollout_data_dir": "use trainer.save_rollouts: samples go to rollouts/ in the run's folder",
    "trainer.max_{actor,critic}_ckpt_to_keep": "use trainer.max_ckpt_to_keep",
    "trainer.resume_from_path": "use run.dir and run.name to continue a run, or model.init_from for its weights only",
    "trainer.val_only": "use `hpcrl evaluate`",
    "trainer.esi_redundant_time": "use trainer.walltime_margin",
    "trainer.checkpoint_callback_class": "use job.on_event: commands that run when a checkpoint is saved",
    "trainer.{default_hdfs_dir,del_local_ckpt_after_load}": "checkpoints stay in the run's folder",
    "trainer.device": "GPUs are used where they are",
    "trainer.ray_wait_register_center_timeout": "there is no Ray",
    "{trainer.v1,async_training}.trainer_mode": "use async_training.mode: sync, one_step_off or bounded_staleness",
    "{trainer.v1.sampler,async_training}.max_off_policy_threshold": "use async_training.staleness_threshold",
    "trainer.v1.sampler.custom_sampler.{path,name}": "use data.sampler.class_<last>",
    "trainer.v1.**": "the keys of async_training are all that can be set",
    "trainer.use_v1": "there is one trainer",
    "async_training.{require_batches,concurrent_samples_per_replica}": "a step takes data.train_batch_size "
    "prompts as soon as they are there",
    "async_training.trigger_parameter_sync_step": "weights go to the engine after every step",
    "async_training.{use_dynamic_resource_scheduling,dynamic_*}": "placement.pools is fixed",
    "global_profiler.steps": "use trainer.profile_steps",
    "global_profiler.**": "use trainer.profile_steps; traces are torch's, of each rank",
    "skip.**": "use trainer.rollouts_from: the folder of recorded rollouts that feeds the steps",
    "transfer_queue.**": "samples stay on the ranks",
    "{ray_kwargs,ray_init}.**": "there is no Ray",
    # keys of this program in the place where a reader of verl's would look for them
    "{actor,critic,ref,rollout,reward,teacher,judge}.{tp,pp,cp,ep,etp,vpp,pool}": "use placement.<first>.<last>",
}


class Counterpart(NamedTuple):
    """What to write instead of a key. names: how many of the key's names the words are about: a subtree's, or all."""

    words: str
    names: int


def plain(key: str) -> str:
    """The key where it would stand here, without verl's prefix."""
    prefix = next((prefix for prefix in PREFIXES if f"{key}.".startswith(prefix)), None)
    return key if prefix is None else f"{PREFIXES[prefix]}{key[len(prefix) :]}".strip(".")


def counterpart(key: str) -> Counterpart | None:
    """Of a dotted key of verl without a namesake; None if the table has no words for it."""
    inside = plain(key)
    matches = ((pattern.fullmatch(inside), words) for pattern, words in patterns())
    found, words = next((match for match in matches if match[0] is not None), (None, ""))
    if found is None:
        return None
    named = found.groupdict("") | {"first": inside.split(".")[0], "last": inside.split(".")[-1]}
    text = re.sub(r"<(\w+)>", lambda name: named[name[1]], words)
    below = named.get("below", "").count(".")
    return Counterpart(text if text.startswith("use ") else f"leave it out: {text}", key.count(".") + 1 - below)


@cache
def patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(_regex(pattern)), words) for pattern, words in OF_VERL.items())


def _regex(pattern: str) -> str:
    text = re.escape(pattern)
    text = text.replace(r"\{", "(?:").replace(r"\}", ")").replace(",", "|")
    text = re.sub(r"<(\w+)>", lambda match: f"(?P<{match[1]}>{ROLES[match[1]]})", text)
    text = text.replace(r"\*\*\.", r"(?:.*\.)?") if text.startswith(r"\*\*") else text
    text = text.replace(r"\.\*\*", r"(?P<below>(?:\..*)?)")
    return text.replace(r"\*", r"[^.]*")

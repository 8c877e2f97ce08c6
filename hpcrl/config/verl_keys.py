"""What to write instead of keys of verl that have no namesake here."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from hpcrl.config import verl_values as values
from hpcrl.config.verl_values import Converted, Missing

# where verl's sections are here, with and without older places of the same keys
PREFIXES = {
    "actor_rollout_ref.": "",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.sandbox_fusion.": "reward.sandbox_fusion.",
    "reward_model.": "reward.reward_model.",
    "reward_manager.": "reward.reward_manager.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "sandbox_fusion.": "reward.sandbox_fusion.",
}
ROLES = {"role": "actor|critic|ref", "trained": "actor|critic"}

PACKED = "sequences are always packed, and micro-batches filled, by tokens"
CHUNKED = "log-probs and entropy are always computed in chunks of trainer.head_chunk_tokens"
MEGATRON = "training is always megatron-core's"
KERNELS = "kernels and fusions are those of the layers here"
CODE = "no code of a model's directory is run; families of models are those of model.family"
ENGINES = "it is an option of vLLM or SGLang"
RANKS = "the ranks are those that srun or mpiexec starts, in placement.pools"
CHECKPOINTS = "checkpoints are always sharded, and resume under any layout"
QUANTIZED = Missing("there is no quantisation in training")
TURNS = "tokens of earlier turns are never tokenised again"
SERVERS = "there are no servers; the ranks generate"
PLUGIN = "use run.plugins: a Python file that registers it"
SEED = "use run.seed: data order, mini-batches and samples follow from it"

# A key matches the first pattern that fits: <role> is actor, critic or ref, <trained> one of the first two, {a,b} one
# of several, * any text of one name, and ** at an end any names. Words that do not begin with "use" follow "leave it
# out: ". `hpcrl from-verl` writes the value under the key of "use KEY"; Converted has a function for it. Other words
# with "use", and Missing ones, are for its user to decide; the rest has no effect.
OF_VERL: dict[str, str | Converted] = {
    "**._target_": "such lines are Hydra's",
    # optimizers
    "<trained>.optim.total_training_steps": "schedules end with the run, or at <trained>.optim.lr_decay_steps",
    "<trained>.optim.{lr_scheduler_type,warmup_style}": "use <trained>.optim.lr_decay_style",
    "<trained>.optim.min_lr_ratio": Converted(
        "use <trained>.optim.min_lr, a learning rate and not a share", values.min_lr
    ),
    "<trained>.optim.use_precision_aware_optimizer": "use <trained>.optim.exp_avg_dtype and "
    "<trained>.optim.exp_avg_sq_dtype",
    "<trained>.optim.weight_decay_incr_style": Missing("the weight decay is constant"),
    "<trained>.optim.lr_wsd_*": Missing("<trained>.optim.lr_decay_style has no such shape"),
    "<trained>.optim.{num_cycles,zero_indexed_step}": Missing(
        "<trained>.optim.lr_decay_style has one form of each shape"
    ),
    "<trained>.optim.use_checkpoint_opt_param_scheduler": "a resumed run continues the schedule of its template",
    "<trained>.optim.main_grads_dtype": "gradients are summed in float32",
    "<trained>.optim.muon_*": Missing(
        "Muon updates queries, keys, values, gate and up apart, with AdamW's root mean square"
    ),
    "<trained>.optim.{use_layer_wise_distributed_optimizer,optimizer_impl}": Missing(
        "optimizers are those of <trained>.optim.optimizer"
    ),
    "<trained>.optim.override_optimizer_config.use_precision_aware_optimizer": "Adam's moments are in float32 unless "
    "<trained>.optim.exp_avg_dtype says otherwise",
    "<trained>.optim.override_optimizer_config.optimizer_cpu_offload": "use <trained>.optimizer_offload",
    "<trained>.optim.override_optimizer_config.{optimizer_offload_fraction,overlap_cpu_*}": "with "
    "<trained>.optimizer_offload the whole state is in host memory, while other roles compute",
    "<trained>.optim.override_optimizer_config.**": Missing("the keys of <trained>.optim are all that can be set"),
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
    "<role>.{megatron,fsdp_config,fsdp}.{dtype,model_dtype}": Converted("use model.dtype", values.dtype),
    "<role>.{megatron,fsdp_config,fsdp}.seed": SEED,
    "<role>.{megatron,fsdp_config,fsdp}.full_determinism": "use run.full_determinism",
    "<role>.{megatron,fsdp_config,fsdp}.forward_only": "the role says whether it is trained",
    "<role>.{,megatron.,fsdp_config.,fsdp.}entropy_from_logits_*": CHUNKED,
    "<role>.{,fsdp_config.,fsdp.}entropy_checkpointing": CHUNKED,
    "<role>.{,megatron.,fsdp_config.,fsdp.}{use_remove_padding,pad_*}": PACKED,
    "<role>.{,megatron.,fsdp_config.,fsdp.}qat.**": QUANTIZED,
    "<role>.{,fsdp_config.,fsdp.}strategy": MEGATRON,
    "<role>.{,fsdp_config.,fsdp.}use_torch_compile": "nothing is compiled",
    "<role>.megatron.sequence_parallel": "it is on where tp is above 1",
    "<role>.megatron.use_distributed_optimizer": "the optimizer is always distributed",
    "<role>.megatron.dist_checkpointing_path": "weights come from model.path or model.init_from",
    "<role>.megatron.{use_dist_checkpointing,dist_checkpointing_prefix,dist*_optim_*}": CHECKPOINTS,
    "<role>.megatron.{dynamic_context_parallel,max_seqlen_per_dp_cp_rank}": "placement.<role>.cp is fixed",
    "<role>.megatron.override_transformer_config.recompute_granularity": "use model.recompute.granularity",
    "<role>.megatron.override_transformer_config.recompute_method": "use model.recompute.method",
    "<role>.megatron.override_transformer_config.recompute_num_layers": "use model.recompute.num_layers",
    "<role>.megatron.override_transformer_config.recompute_modules": "use model.recompute.modules",
    "<role>.megatron.override_transformer_config.{fp8,fp8_recipe}": "use model.transformer_engine.<last>",
    "<role>.megatron.override_transformer_config.moe_aux_loss_coeff": "use model.moe.aux_loss_coeff",
    "<role>.megatron.override_transformer_config.moe_z_loss_coeff": "use model.moe.z_loss_coeff",
    "<role>.megatron.override_transformer_config.{attention_backend,use_flash_attn}": "the device decides",
    "<role>.megatron.override_transformer_config.gradient_accumulation_fusion": "use "
    "model.gradient_accumulation_fusion",
    "<role>.megatron.override_transformer_config.{*_fusion,moe_token_dispatcher_type,moe_enable_deepep}": KERNELS,
    "<role>.megatron.override_transformer_config.{moe_grouped_gemm,moe_shared_expert_overlap,persist_*}": KERNELS,
    "<role>.megatron.override_transformer_config.deallocate_*": KERNELS,
    "<role>.megatron.override_transformer_config.moe_router_dtype": "routers compute in float32",
    "<role>.megatron.override_{transformer,mcore_model}_config.**": Missing(
        "the keys of model are all that can be set"
    ),
    "<role>.megatron.override_ddp_config.**": "use model.ddp.overlap_grad_reduce, model.ddp.overlap_param_gather and "
    "model.ddp.bucket_size",
    "<role>.megatron.{use_mbridge,vanilla_mbridge}": "Hugging Face directories are read and written directly",
    "<role>.megatron.router_replay.mode": "use actor.router_replay.mode",
    "{actor,ref}.router_replay.{record_file,replay_file}": "routes stay in memory for their step",
    "ref.router_replay.mode": "use actor.router_replay.mode",
    "<role>.megatron.router_replay.*": "routes stay in memory for their step",
    "<role>.megatron.**": f"{MEGATRON}, in the layout of placement.<role>",
    "<role>.{fsdp_config,fsdp}.**": f"FSDP is not there; {MEGATRON}, in the layout of placement.<role>",
    # actor, reference and critic
    "<role>.rollout_n": "use rollout.n",
    "<role>.load_weight": "weights come from model.path or model.init_from",
    "actor.sum_pi_squared_checkpointing": CHUNKED,
    "<trained>.ppo_micro_batch_size*": Converted(
        f"use <trained>.ppo_max_token_len_per_gpu; {PACKED}", values.micro_batch
    ),
    "critic.forward_m*": "values have the micro-batches of critic.ppo_max_token_len_per_gpu",
    "ref.log_prob_micro_batch_size*": Converted(
        f"use ref.log_prob_max_token_len_per_gpu; {PACKED}", values.micro_batch
    ),
    "rollout.log_prob_m*": "old log-probs have the micro-batches of actor.ppo_max_token_len_per_gpu",
    "{actor,critic,ref,rollout}.{,log_prob_}use_dynamic_bsz": PACKED,
    "actor.freeze_vision_tower": "use model.vision.train: none, merger, tower or all",
    "actor.use_prefix_grouper": "a prompt is computed once for its samples in generation only",
    "<trained>.data_loader_seed": SEED,
    "<trained>.checkpoint.async_save": "use trainer.checkpoint.async_save",
    "<trained>.checkpoint.{save,load}_contents": Converted(
        "use trainer.save_hf for a Hugging Face directory; the rest is always saved and loaded", values.save_contents
    ),
    "<trained>.checkpoint.**": CHECKPOINTS,
    "{actor,critic,ref,rollout}.profiler.**": "traces are torch's, of each rank, in trainer.profile_steps",
    "critic.enable": "the role exists where algorithm.adv_estimator needs values",
    "critic.shuffle": "use actor.shuffle, which is for both",
    "{critic.,}nccl_timeout": "use run.nccl_timeout",
    "critic.model.path": Converted(
        "use model.path or model.init_from, with which both roles begin", values.critic_path
    ),
    "{critic.model.tokenizer_path,model.tokenizer_path,data.tokenizer}": "use model.tokenizer",
    "critic.model.{fsdp_config,fsdp}.{param,optimizer}_offload": "use critic.<last>",
    "critic.model.{fsdp_config,fsdp}.**": f"FSDP is not there; {MEGATRON}, in the layout of placement.critic",
    "critic.model.lora*.**": Missing("adapters are the policy's"),
    "critic.model.**": "the critic has the actor's architecture, and the keys of model are for both",
    "hybrid_engine": "roles share ranks where placement.pools says so",
    # rollout
    "rollout.name": Converted("use rollout.engine: native, vllm or tensorrt_llm", values.engine),
    "rollout.mode": SERVERS,
    "rollout.{nnodes,n_gpus_per_node}": "use placement.rollout.pool, whose ranks are divided by tp",
    "rollout.data_parallel_size": "the engine has as many replicas as placement.rollout.tp leaves",
    "rollout.tensor_model_parallel_size": "use placement.rollout.tp",
    "rollout.pipeline_model_parallel_size": "use placement.rollout.pp",
    "rollout.expert_parallel_size": Converted(
        "the engine divides experts, as all weights, by placement.rollout.tp", values.engine_experts
    ),
    "rollout.full_determinism": "use run.full_determinism",
    "rollout.{prompt_length,response_length}": "use data.max_<last>",
    "rollout.max_model_len": "it is data.max_prompt_length + data.max_response_length",
    "rollout.cudagraph_capture_sizes": "use rollout.enforce_eager: no CUDA graphs; else the engine chooses",
    "rollout.do_sample": Missing("use rollout.temperature; training always draws"),
    "rollout.calculate_log_probs": "log-probs of sampled tokens are always kept",
    "rollout.over_sample_rate": Missing("a step waits for all of its samples"),
    "rollout.{load_format,layered_summon}": "the engine's weights come from the actor",
    "rollout.multi_turn.tool_config_path": "use rollout.multi_turn.function_tool_path: Python functions in one file",
    "rollout.multi_turn.interaction_config_path": "use rollout.multi_turn.interaction_path: a class in a Python file",
    "rollout.multi_turn.num_repeat_rollouts": "use rollout.n",
    "rollout.multi_turn.{use_inference_chat_template,tokenization_sanity_check_mode}": TURNS,
    "rollout.agent.num_workers": "use rollout.multi_turn.num_tool_workers",
    "rollout.agent.**": "use rollout.multi_turn.enable, whose tools and users are Python files",
    "rollout.checkpoint_engine.**": "weights go from shard to shard, without a backend",
    "rollout.{skip_rollout,skip_dump_dir,skip_use_default_dir}": "use trainer.rollouts_from: recorded rollouts",
    "rollout.layer_name_map.**": "weights go from shard to shard by their own names",
    "rollout.trace.**": "`hpcrl samples` shows every sample, with trainer.save_rollouts",
    "rollout.enable_rollout_routing_replay": Converted("use actor.router_replay.mode=R3", values.routing_replay),
    "rollout.moe_load_balance_metrics_interval": "the load of experts is among every step's metrics",
    "rollout.quantization_config_file": "use rollout.quantization, fp8 or null",
    "rollout.qat.**": QUANTIZED,
    "{rollout,model}.mtp.**": Missing("there is no multi-token prediction"),
    "rollout.sglang_rollout_mode": SERVERS,
    "rollout.server.**": SERVERS,
    "rollout.{engine_kwargs,router_config_path,prometheus,disaggregation}.**": SERVERS,
    "rollout.{enable_chunked_prefill,scheduling_policy,disable_log_stats}": ENGINES,
    "rollout.{logprobs_mode,multi_stage_wake_up,skip_tokenizer_init}": ENGINES,
    # model
    "model.torch_dtype": Converted("use model.dtype", values.dtype),
    "model.hf_config_path": "use model.path",
    "model.custom_chat_template": "use data.chat_template",
    "{model,data,reward.reward_model.model}.{trust_remote_code,external_lib}": CODE,
    "model.override_config.**": "use the keys of model, without model.path",
    "model.enable_gradient_checkpointing": Converted(
        "use model.recompute.granularity: selective or full", values.recompute
    ),
    "model.enable_activation_offload": "activations are computed again (model.recompute.granularity), not offloaded",
    "model.use_remove_padding": PACKED,
    "{actor.use_fused_kernels,model.use_fused_kernels,model.use_liger}": CHUNKED,
    "model.{fused_kernel_options,tiled_mlp}.**": CHUNKED,
    "model.lora.rank": "use model.lora_rank",
    "model.lora.alpha": Converted("use model.lora_alpha", values.lora_alpha),
    "model.lora.target_modules": Converted("use model.target_modules", values.projections),
    "model.{exclude_modules,lora.exclude_modules}": "use model.target_modules: what is to have adapters",
    "model.{lora_adapter_path,lora.adapter_path}": "adapters begin anew, or continue with their run",
    "model.lora.freeze_*": "use model.vision.train",
    "model.lora.**": Missing("adapters are LoRA's, with model.lora_rank, model.lora_alpha and model.target_modules"),
    "{model,data}.use_shm": "files are read where they are",
    # data
    "{data,rollout}.seed": SEED,
    "data.reward_fn_key": "rules are chosen by the column data_source",
    "data.val_batch_size": "all validation prompts are generated together",
    "data.{tool_config_path,function_tool_path}": "use rollout.multi_turn.function_tool_path",
    "data.mm_processor_kwargs.**": "use data.min_pixels and data.max_pixels",
    "data.dataloader_num_workers": "use data.image_workers, for pictures; the rest is read at the start",
    "data.custom_cls.**": Missing("rows are in verl's schema; `hpcrl data` converts others"),
    "data.image_patch_size": "preprocessor_config.json has it",
    "data.datagen.**": Missing("rows come from data.train_files"),
    "data.audio_key": "there are no audio models",
    "data.validation_shuffle": "validation takes the rows in the order of their files",
    "data.filter_overlong_prompts_workers": "the ranks share the work",
    "data.return_*": "the roles that need it always get it",
    # rewards
    "reward.{reward_manager.source,reward_manager.module.**,reward_model.reward_loop_*}": PLUGIN,
    "reward.{reward_model.num_workers,sandbox_fusion.max_concurrent}": "use reward.num_workers",
    "reward.reward_model.reward_manager": Converted("use reward.reward_manager.name", values.reward_manager),
    "reward.reward_model.{use_reward_loop,launch_reward_fn_async}": "responses are scored as they are finished",
    "reward.reward_model.micro_batch_size*": Converted(
        "use reward.reward_model.max_token_len_per_gpu", values.micro_batch
    ),
    "reward.reward_model.{forward_max_token_len_per_gpu,use_dynamic_bsz}": PACKED,
    "reward.reward_model.megatron.tensor_model_parallel_size": "use placement.reward.tp",
    "reward.reward_model.megatron.pipeline_model_parallel_size": "use placement.reward.pp",
    "reward.reward_model.{megatron,model.fsdp_config}.param_offload": "use reward.reward_model.param_offload",
    "reward.reward_model.{megatron,fsdp_config,model.fsdp_config,profiler}.**": "placement.reward places the role",
    "reward.reward_model.{strategy,nccl_timeout,load_weight,ulysses_*}": "placement.reward places the role",
    "reward.reward_model.max_length": "a sequence is scored whole",
    "reward.reward_model.model.input_tokenizer": "texts are rendered by the model's own tokenizer",
    "reward.reward_model.model.{use_shm,use_remove_padding,use_fused_kernels,override_config}": PACKED,
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
    "distillation.teacher_key": Missing("there is one teacher"),
    # the loop
    "trainer.nnodes": Converted(f"use job.nodes in batch jobs; {RANKS}", values.num_nodes),
    "trainer.n_gpus_per_node": Converted(f"use job.ntasks_per_node in batch jobs; {RANKS}", values.gpus_per_node),
    "trainer.default_local_dir": Converted("use run.dir and run.name", values.run_dir),
    "trainer.rollout_data_dir": Converted(
        "use trainer.save_rollouts: samples go to rollouts/ in the run's folder", values.rollouts
    ),
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
    "trainer.{use_v1,use_legacy_worker_impl}": "there is one trainer",
    "async_training.{require_batches,concurrent_samples_per_replica}": "a step takes data.train_batch_size "
    "prompts as soon as they are there",
    "async_training.trigger_parameter_sync_step": "weights go to the engine after every step",
    "async_training.{use_dynamic_resource_scheduling,dynamic_*}": "placement.pools is fixed",
    "global_profiler.steps": "use trainer.profile_steps",
    "global_profiler.**": "traces are torch's, of each rank, in trainer.profile_steps",
    "skip.**": "use trainer.rollouts_from: the folder of recorded rollouts that feeds the steps",
    "transfer_queue.**": "samples stay on the ranks",
    "{ray_kwargs,ray_init}.**": "there is no Ray",
    # keys of this program in the place where a reader of verl's would look for them
    "{actor,critic,ref,rollout,reward,teacher,judge}.{tp,pp,cp,ep,etp,vpp,pool}": "use placement.<first>.<last>",
}


# Keys with a namesake here whose values have another form, or another unit.
SAME_NAME: dict[str, values.Convert] = {
    "<trained>.ppo_max_token_len_per_gpu": values.token_length,
    "ref.log_prob_max_token_len_per_gpu": values.token_length,
    "<trained>.optim.optimizer": values.optimizer,
    "<trained>.optim.lr_warmup_steps": values.warmup_steps,
    "actor.clip_ratio": values.clip_ratio,
    "model.lora_alpha": values.lora_alpha,
    "model.target_modules": values.projections,
    "reward.reward_manager.name": values.reward_manager,
    "reward.reward_model.model.path": values.reward_path,
    "rollout.val_kwargs.do_sample": values.greedy,
    "rollout.multi_turn.max_tool_response_length": values.tool_response,
    "trainer.experiment_name": values.run_name,
    "trainer.logger": values.logger,
    "trainer.{save,test}_freq": values.frequency,
    "trainer.validation_data_dir": values.validation_folder,
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
    found, entry = entry_of(inside)
    if found is None or entry is None:
        return None
    text = named(found, inside, entry.words if isinstance(entry, Converted) else entry)
    below = found.groupdict("").get("below", "").count(".")
    return Counterpart(
        text if text.startswith(("use ", "leave ")) else f"leave it out: {text}", key.count(".") + 1 - below
    )


def entry_of(key: str) -> tuple[re.Match[str] | None, str | Converted | None]:
    """The first entry of the table that fits a key without prefix."""
    matches = ((pattern.fullmatch(key), entry) for pattern, entry in patterns())
    return next((match for match in matches if match[0] is not None), (None, None))


def named(found: re.Match[str], key: str, words: str) -> str:
    """The words with the names that stand in the key: <role>, <last> and others."""
    names = found.groupdict("") | {"first": key.split(".")[0], "last": key.split(".")[-1]}
    return re.sub(r"<(\w+)>", lambda name: names[name[1]], words)


def converter_of_namesake(key: str) -> values.Convert | None:
    """Of the value of a key that is written here under the same name."""
    return next((convert for pattern, convert in SAME_NAME.items() if re.fullmatch(_regex(pattern), key)), None)


@cache
def patterns() -> tuple[tuple[re.Pattern[str], str | Converted], ...]:
    return tuple((re.compile(_regex(pattern)), entry) for pattern, entry in OF_VERL.items())


def _regex(pattern: str) -> str:
    text = re.escape(pattern)
    text = text.replace(r"\{", "(?:").replace(r"\}", ")").replace(",", "|")
    text = re.sub(r"<(\w+)>", lambda match: f"(?P<{match[1]}>{ROLES[match[1]]})", text)
    text = text.replace(r"\*\*\.", r"(?:.*\.)?") if text.startswith(r"\*\*") else text
    text = text.replace(r"\.\*\*", r"(?P<below>(?:\..*)?)")
    return text.replace(r"\*", r"[^.]*")

# ruff: noqa: E501
"""A command of verl becomes a template that trains the same, and each of its keys is accounted for."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli import load_job
from hpcrl.config import from_verl, yaml_core
from hpcrl.config.from_verl import NO_EFFECT, RENAMED, TO_DECIDE, WRITTEN, Template, read_source, rendered, template_of
from hpcrl.config.loader import load_config
from hpcrl.config.shell_script import read_commands
from hpcrl.config.verl_keys import plain
from hpcrl.config.yaml_core import ConfigError
from hpcrl.forecast.command import describe
from hpcrl.runtime.exits import InputError

TRIAL = [  # an architecture in place of a model's directory
    "model.path=null",
    "model.tokenizer=configs/tokenizer",
    "model.num_layers=8",
    "model.num_attention_heads=8",
    "model.num_query_groups=8",
]

MEGATRON = """\
#!/usr/bin/env bash
set -xeuo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1   # nothing here
SIZE=${SIZE:-"small"}
tp=4; pp=${PP:-2}
prompt=512
answer=$((prompt * 3 - 512))           # 1024
if [ "$SIZE" = "large" ]; then
    pp=8
elif [[ $tp -gt 2 ]]; then
    answer=$((answer + 512))
else
    answer=nonsense
fi
cat <<EOF > notes.txt
python3 -m verl.trainer.main_ppo not=this
EOF
name="qwen-${SIZE^^}-tp${tp}"
ACTOR=(
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$tp
    # actor_rollout_ref.actor.optim.lr=1
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${pp}
)
ACTOR+=(+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full)
python3 -m verl.trainer.main_ppo --config-path=config \\
    --config-name='ppo_megatron_trainer.yaml' \\
    "${ACTOR[@]}" \\
    algorithm.adv_estimator=grpo data.train_files="['$PWD/a.parquet','b.parquet']" \\
    data.max_prompt_length=$prompt data.max_response_length=${answer} \\
    data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=1e-3 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.param_offload=True \\
    critic.optim.lr=3e-6 trainer.device=cuda trainer.nnodes=2 trainer.n_gpus_per_node=8 \\
    trainer.logger='["console","swanlab"]' trainer.experiment_name="$name" \\
    trainer.default_local_dir=out/$name "$@" 2>&1 | tee log.txt
"""


def converted(tmp_path: Path, script: str, **given: str) -> tuple[Template, str]:
    path = tmp_path / "run.sh"
    path.write_text(script)
    source = read_source([str(path)], given)
    template = template_of(source)
    return template, rendered(source, template)


def test_a_megatron_script_becomes_the_template_that_trains_the_same(tmp_path: Path) -> None:
    template, text = converted(tmp_path, MEGATRON)
    (tmp_path / "job.yaml").write_text(text)
    config = load_config(tmp_path / "job.yaml")
    assert (config.data.max_prompt_length, config.data.max_response_length) == (512, 1536)
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size) == (64, 32)
    assert config.actor.ppo_max_token_len_per_gpu == 2 * (512 + 1536)
    for role in ("actor", "ref"):  # verl's reference has the actor's layout unless it has its own
        layout = getattr(config.placement, role)
        assert (layout.tp, layout.pp) == (4, 2)
    assert (config.placement.rollout.tp, config.rollout.engine, config.rollout.n) == (2, "native", 8)
    assert (config.job.nodes, config.job.ntasks_per_node, config.job.gpus_per_node) == (2, 8, 8)
    assert (config.run.dir, config.run.name) == ("out", "qwen-SMALL-tp4")
    assert config.trainer.logger == ["console"] and config.model.recompute.granularity == "full"
    assert config.actor.param_offload and not config.actor.shuffle and config.model.dtype == "bfloat16"
    assert config.data.train_files[1] == "b.parquet"
    kinds = {plain(one.key): one.kind for one in template.outcomes}
    assert kinds["critic.optim.lr"] == kinds["trainer.device"] == NO_EFFECT
    assert kinds["rollout.name"] == kinds["trainer.logger"] == RENAMED and kinds["rollout.n"] == WRITTEN
    assert len(describe(load_job("train"), str(tmp_path / "job.yaml"), TRIAL)) > 10


def test_an_fsdp_script_keeps_its_units(tmp_path: Path) -> None:
    start = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=False "
    own = "data.max_prompt_length=100 data.max_response_length=200 actor_rollout_ref.actor."
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000 "
    dynamic = "actor_rollout_ref.actor.use_dynamic_bsz=True "
    two = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 "
    for arguments, expected in {
        f"{own}ppo_micro_batch_size_per_gpu=3": 900,
        f"{own}ppo_micro_batch_size=16": 600,  # of 8 GPUs together
        f"{own}ppo_micro_batch_size_per_gpu=3 {tokens} {dynamic}": 1000,
        f"{tokens} {dynamic} {two}": 2000,  # verl's is a GPU's share of a sequence
        f"{dynamic} {two}": 32768,
        tokens: None,
    }.items():
        template, _ = converted(tmp_path, start + arguments)
        assert template.get("actor.ppo_max_token_len_per_gpu") == expected, arguments
        assert template.get("placement.actor.cp") == (2 if two in arguments else None)
    template, _ = converted(tmp_path, f"{start} algorithm.adv_estimator=gae critic.optim.lr=3e-6 trainer.save_freq=0")
    assert template.get("critic.optim.lr") == 3e-6 and template.get("trainer.save_freq") == -1
    assert template.get("model.recompute.granularity") == "full"  # verl's default for FSDP


KEYS: dict[str, Any] = {
    "data.train_batch_size": [8, 64],
    "data.reward_fn_key": ["source"],
    "data.apply_chat_template_kwargs.enable_thinking": ["False"],
    "actor_rollout_ref.model.path": ["m/model", "~/model"],
    "actor_rollout_ref.model.target_modules": ["all-linear", "[linear_qkv]", "[strange]"],
    "actor_rollout_ref.actor.optim.lr": ["1e-6", "null", "fast"],
    "actor_rollout_ref.actor.optim.lr_warmup_steps": ["null", 3],
    "actor_rollout_ref.actor.fsdp_config.param_offload": ["True"],
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": [-1, 4],
    "actor_rollout_ref.actor.megatron.use_mbridge": ["True"],
    "actor_rollout_ref.actor.not_there": [1, "null"],
    "actor_rollout_ref.actor.qat.enable": ["True", "False"],
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": [4],
    "actor_rollout_ref.rollout.response_length": [7, "${data.max_response_length}"],
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": ["tools.yaml", "null"],
    "actor_rollout_ref.rollout.val_kwargs": ["{n:2,temperature:0.5}"],
    "data.max_response_length": [9],
    "critic.model.path": ["m/model", "m/other"],
    "algorithm.adv_estimator": ["grpo", "gae"],
    "algorithm.use_kl_in_reward": ["True", "False"],
    "reward_model.reward_manager": ["dapo", "prime"],
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": [5],
    "custom_reward_function.path": ["a.py"],
    "trainer.logger": ["[console,wandb]", "swanlab"],
    "trainer.resume_mode": ["auto", "resume_path"],
    "ray_kwargs.ray_init.num_cpus": [3],
}


@pytest.mark.parametrize("seed", range(12))
def test_each_key_of_a_script_is_in_exactly_one_list(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    chosen = {key: draw.choice(KEYS[key]) for key in draw.sample(list(KEYS), k=14)}
    words = [f"{draw.choice(['', '+', '++'])}{key}='{value}'" for key, value in chosen.items()]
    again = next(iter(chosen))
    template, text = converted(tmp_path, " \\\n  ".join(["python3 -m verl.trainer.main_ppo", *words, words[0]]))
    listed = [one.key for one in template.outcomes]
    inside = [key for key in listed if key.startswith("actor_rollout_ref.rollout.val_kwargs.")]
    whole = {"actor_rollout_ref.rollout.val_kwargs"} if inside else set()
    assert sorted(listed) == sorted({*chosen, *inside} - whole) and listed.count(again) <= 1
    assert all(one.kind in (WRITTEN, RENAMED, TO_DECIDE, NO_EFFECT) for one in template.outcomes)
    assert all(
        f"{one.key}=" in one.line and len(one.line.rsplit("): ")[-1]) > 3
        for one in template.outcomes
        if one.kind != WRITTEN
    )
    (tmp_path / "job.yaml").write_text(text)
    load_config(tmp_path / "job.yaml")
    tree = yaml_core.parse(text, "").plain()
    for one in template.outcomes:  # what is written has the value of the script
        if one.kind == WRITTEN and one.key in chosen:
            node = tree
            for name in plain(one.key).split("."):
                node = node[name]
            assert node == yaml_core.parse(str(chosen[one.key]), "").plain()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=$B\npython -m verl.trainer.main_ppo data.seed=1 x.y=$A", "run.sh:1: the variable B is not set; give it with --set B=VALUE"),
        ("A=$(date)\npython -m verl.trainer.main_ppo x.y=$A", "run.sh:1: $(date) is what a command prints, and none is run here; give it with --set A=VALUE"),
        ("for A in 1 2; do B=$A; done\npython -m verl.trainer.main_ppo x.y=$B", "run.sh:1: it is set inside `for`; give it with --set B=VALUE"),
        ("if [ -f a ]; then B=1; fi\npython -m verl.trainer.main_ppo x.y=$B", "run.sh:1: it depends on a condition that cannot be read here; give it with --set B=VALUE"),
        ("if [ -z \"$A\" ]; then\n exit 1\nfi\npython -m verl.trainer.main_ppo", "run.sh:2: the script ends here, before it trains"),
        ("python -m verl.trainer.main_ppo x.y='a", "run.sh:1: ' is missing; close the quotation"),
        ("A=(b c\npython -m verl.trainer.main_ppo", "run.sh:2: ) is missing; close the array"),
        ("if [ a ]; then\n" * 3000, "run.sh: blocks or expansions are nested too deep"),
        ("torchrun -m verl.trainer.sft_trainer a.b=1", "found run.sh:1 runs verl.trainer.sft_trainer in run.sh; expected one command"),
        ("echo hello", "found no Python program in run.sh; expected one command python -m verl.trainer.main_ppo"),
        ("python -m verl.trainer.main_ppo --config-name=mine", "no such config file: mine.yaml; run from-verl in the folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(script)
    with pytest.raises((ConfigError, InputError)) as caught:
        read_source(["run.sh"], {})
    (line,) = caught.value.lines
    assert line.startswith(words)


def test_bash_reads_a_script_in_the_same_way(tmp_path: Path) -> None:
    """The arguments are those that bash gives the program."""
    (tmp_path / "python3").write_text('#!/bin/sh\nfor each in "$@"; do printf "%s\\n" "$each"; done\n')
    (tmp_path / "python3").chmod(0o755)
    more = 'a.b=${name##*-} a.c=${name%%-*} a.d=${tp:+yes}${none:-} \'a.e="$x"\' a.f="\\$y \\"z\\"" a.g=$((7 / 2 + 2 ** 3 % 5)) a.h=$(basename out/dir)'
    script = MEGATRON.replace(" 2>&1 | tee log.txt", f" {more}").replace(
        "cat <<EOF > notes.txt", "cat <<EOF >/dev/null"
    )
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PWD": str(tmp_path), "PP": ""}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    (command,), dangling = read_commands(script, "run.sh", {"PWD": str(tmp_path)})
    assert ["-m", command.module, *(one.text for one in command.arguments)] == done.stdout.splitlines()
    assert not dangling


def test_the_command_writes_a_file_and_lists_what_is_lost(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("defaults: [ppo_megatron_trainer, _self_]\ndata: {train_batch_size: 5}\n")
    (tmp_path / "mine.yaml").write_text(
        "defaults: [base, other]\nactor_rollout_ref:\n  actor: {optim: {lr: 2e-6}, strange: 3}\ntrainer: {nnodes: 3}\n"
    )
    words = [sys.executable, "-m", "hpcrl", "from-verl", "mine.yaml", "trainer.nnodes=4", "--out", "job.yaml"]
    done = subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    config = load_config(tmp_path / "job.yaml")
    assert (config.data.train_batch_size, config.job.nodes, config.actor.optim.lr) == (5, 4, 2e-6)
    assert "strange=3 (mine.yaml:3): no key of verl" in done.stderr and "the entry other of defaults" in done.stderr
    assert from_verl.TO_DECIDE in done.stderr and "next: hpcrl plan job.yaml" in done.stderr

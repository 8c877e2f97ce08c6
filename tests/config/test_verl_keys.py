"""Unknown keys: all at once, each with what to write instead, and nothing that was only guessed."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrl.config.loader import load_config
from hpcrl.config.problems import keys_of, validated
from hpcrl.config.verl_keys import OF_VERL, ROLES, counterpart, patterns, plain
from hpcrl.config.yaml_core import ConfigError, Node
from hpcrl.jobs.train import Train
from hpcrl.runtime.exits import one_line

SCHEMA = Train.schema()
KNOWN = {".".join(key) for key in keys_of(SCHEMA)}
VERL = "verl==0.9.1"
FILES = ("_generated_ppo_megatron_trainer.yaml", "_generated_ppo_trainer.yaml")


def lines_of(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides, SCHEMA)
    return list(caught.value.lines)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=3", "use actor.optim.lr_warmup_steps"),
        ("critic.megatron.pipeline_model_parallel_size=2", "use placement.critic.pp"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=true", "use ref.param_offload"),
        ("actor_rollout_ref.rollout.name=vllm", "use rollout.engine: native, vllm or tensorrt_llm"),
        ("rollout.response_length=9", "use data.max_response_length"),
        ("custom_reward_function.path=a.py", "use reward.custom_reward_function.path"),
        ("reward_model.reward_manager=dapo", "use reward.reward_manager.name"),
        ("data.reward_fn_key=source", "leave it out: rules are chosen by the column data_source"),
        ("judge.tp=2", "use placement.judge.tp"),
        ("actor_rollout_ref.actor.ppo_epoch=3", "did you mean actor.ppo_epochs?"),
        ("actor_rollout_ref.zzz.lr=3", "known here: run, model, "),
        ("trainer.totl_epochs=3", "did you mean trainer.total_epochs?"),
        ("rollout.temprature=1", "did you mean rollout.temperature?"),
        # near in another section only, or not near
        ("critic.temperature=1", "known here: optim, "),
        ("data.prompts=9", "known here: train_files, "),
        ("rollout.interaction_path=a.py", "known here: max_num_seqs, "),
    ],
)
def test_a_hint_is_from_the_table_or_a_slip_in_the_same_section(override: str, words: str) -> None:
    (line,) = lines_of(override)
    assert line.startswith(f"override {override}: unknown key ") and f"; {words}" in line


def test_all_mistakes_of_a_command_and_its_files_are_listed_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("ray_kwargs:\n  ray_init: {num_cpus: 3}\n  timeline_json_file: x\n")
    job = tmp_path / "job.yaml"
    job.write_text(
        "extends: base.yaml\n"
        "trainer: {nnodes: 2, save_freq: often}\n"
        "actor_rollout_ref:\n"
        "  actor:\n"
        "    optim: {lr: 1e-6}\n"
        "    fsdp_config:\n"
        "      param_offload: true\n"
        "      fsdp_size: 8\n"
        "      wrap_policy: {min_num_params: 0}\n"
        "rollout: {val_kwargs: [{n: 1}, {temprature: 0}]}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(job, ["run.nam=x", "actor.entropy_coeff=much", "algorithm.my_estimator.scale=2"])
    fsdp = "leave it out: FSDP is not there; training is always megatron-core's, in the layout of placement.actor"
    names = "use job.nodes in batch jobs; the ranks are those that srun or mpiexec starts, in placement.pools"
    expected = [
        "base.yaml:1: unknown key ray_kwargs; leave it out: there is no Ray",
        f"job.yaml:2: unknown key trainer.nnodes; {names}",
        "job.yaml:2: trainer.save_freq is the text 'often'; expected an integer",
        "job.yaml:5: unknown key actor_rollout_ref.actor.optim.lr; use actor.optim.lr",
        f"job.yaml:6: unknown key actor_rollout_ref.actor.fsdp_config; {fsdp}",
        "job.yaml:7: unknown key actor_rollout_ref.actor.fsdp_config.param_offload; use actor.param_offload",
        "job.yaml:10: unknown key rollout.val_kwargs.temprature; did you mean rollout.val_kwargs.temperature?",
        "override run.nam=x: unknown key run.nam; did you mean run.name?",
        "override algorithm.my_estimator.scale=2: unknown key algorithm.my_estimator; known here: ",
        "override actor.entropy_coeff=much: actor.entropy_coeff is the text 'much'; expected a number",
    ]
    found = [line.removeprefix(f"{tmp_path}/") for line in caught.value.lines]
    assert found[:7] == expected[:7]
    assert all(any(line.startswith(want) for want in expected[7:]) for line in found[7:]) and len(found) == 10
    shown = one_line(caught.value).splitlines()
    assert len(shown) == len(found) and all(line.startswith("hpcrl: error: ") for line in shown)


def samples(pattern: str) -> Iterator[str]:
    """Keys that match a pattern of the table."""
    parts = re.split(r"(\{[^}]*\}|<\w+>)", pattern)
    choices = [
        part[1:-1].split(",") if part[:1] == "{" else ROLES[part[1:-1]].split("|") if part[:1] == "<" else [part]
        for part in parts
    ]
    for chosen in itertools.product(*choices):
        yield "".join(chosen).replace("**", "x.y").replace("*", "x")


def test_every_pattern_is_reached_and_names_keys_that_exist() -> None:
    own = {key.split(".")[0] for key in KNOWN}
    for index, (pattern, words) in enumerate(OF_VERL.items()):
        keys = list(samples(pattern))
        first = {next(i for i, (regex, _) in enumerate(patterns()) if regex.fullmatch(key)) for key in keys}
        assert index in first, f"an earlier pattern matches all of {pattern}"
        for key in keys:
            found = counterpart(key)
            assert found is not None and key not in KNOWN, f"{pattern}: {key}"
            named = re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+", found.words)
            named = [name for name in named if name.split(".")[0] in own]
            assert all(name in KNOWN for name in named), (pattern, key, named)
            assert named or not words.startswith("use ") or "`hpcrl" in words or "keys of model" in words, pattern


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, dict) and tree:
        for name, inner in tree.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path, tree


def resolved(value: Any, tree: Any) -> Any:
    """The value of an interpolation: that of the key that it names, or its default."""
    found = (
        re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*(.*))?\}", value, re.DOTALL)
        if isinstance(value, str)
        else None
    )
    if found is None or found[1].startswith("."):
        return value
    node = tree
    for name in found[1].split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return yaml.safe_load(found[2]) if node is None and found[2] else resolved(node, tree)


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The configs with all keys, from the wheel, which is not installed."""
    folder = tmp_path_factory.mktemp("verl")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--dest", str(folder), VERL], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip could not download {VERL}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return [yaml.safe_load(wheel.read(f"verl/trainer/config/{name}")) for name in FILES]


@pytest.mark.slow
def test_every_key_of_verl_is_accepted_or_has_words(verl: list[Any]) -> None:
    count: Counter[str] = Counter()
    for tree in verl:
        for path, value in leaves(tree):
            key = ".".join(path)
            node = Node.of(resolved(value, tree))
            for name in reversed(path):
                node = Node({name: node}, "")
            try:
                validated(node, SCHEMA)
                count["accepted"] += 1
                continue
            except ConfigError as error:
                lines = error.lines
            if key in KNOWN:  # AdamW, fp32
                assert len(lines) == 1 and lines[0].startswith(f"{key} is the text") and "; expected " in lines[0], (
                    lines
                )
                count["accepted, with another value"] += 1
                continue
            for line in lines:
                assert re.fullmatch(r"unknown key [\w.-]+; (use |leave it out: ).*", line), line
            is_namesake = plain(key) in KNOWN
            assert not is_namesake or lines == (f"unknown key {key}; use {plain(key)}",)
            renamed = any("; use " in line for line in lines)
            count["accepted, without the prefix" if is_namesake else "renamed" if renamed else "none"] += 1
    print(count)
    assert count["renamed"] > 300 and count["accepted, without the prefix"] > 100

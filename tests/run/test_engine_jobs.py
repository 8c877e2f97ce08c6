"""Jobs with another engine, vLLM or a plugin: texts and metrics are those of the native one, and their ends.

Those with vLLM run in an environment of its own (tools/vllm_environment.sh), which tools/test.sh --all makes.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest

from tests.preloaded import RANK
from tests.run.small_run import MODEL, checkpoints, compared, log_of, run_folder, train, write_config, write_rows
from tests.runtime.conftest import MPIEXEC, REPOSITORY, run, start  # noqa: F401  # fixtures

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here")
PLUGIN = str(REPOSITORY / "docs" / "examples" / "transformers_engine.py")

WIDE = {**MODEL, "hidden_size": 128, "ffn_hidden_size": 96}  # vLLM's attention on a CPU has no heads below 32
OTHER = ("training/rollout_", "rollout_corr/", "fully_async/")  # what differs by rounding, and shares of times
GAP = 1e-4
TP2 = {"actor": {"tp": 2}, "ref": {"tp": 2}, "rollout": {"tp": 2}}
APART = {"pools": {"train": "1", "generate": "2"}, "rollout": {"pool": "generate"}}
APART |= dict.fromkeys(("actor", "ref"), {"pool": "train"})
LORA = {**WIDE, "lora_rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}

# Random weights write no calls: here a turn is one unless it ends in a letter.
TOOLS = """
from hpcrl.rollout.environments.tools import ToolCall, register_tool_parser, tool

@tool
def reverse(text: str) -> str:
    "Reverses."
    return text[::-1][:5] + "!"

@register_tool_parser("nearly_all")
def nearly_all(text):
    return [] if text[-1:].isalpha() else [ToolCall("reverse", {"text": text})]
"""

# Rank 1 is killed in the update of step 3.
KILLED = """
import functools
import os
import signal

from hpcrl.workers.actor import ActorWorker

update_actor = ActorWorker.update_actor

@functools.wraps(update_actor)
def die(self, batch):
    if (self.rank, batch.meta_info["step"]) == (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return update_actor(self, batch)

ActorWorker.update_actor = die
"""


def job(folder: Path, ranks: int, engine: str, *, steps: int = 4, **sections: Any) -> Path:
    """Run a GRPO job that validates greedily after each step, and return its folder."""
    folder.mkdir()
    write_rows(folder / "train.jsonl")
    assert start_job(folder, ranks, engine, steps=steps, **sections) == 0
    return folder


def start_job(
    folder: Path, ranks: int, engine: str, *, steps: int = 4, script: str | None = None, **sections: Any
) -> int:
    data = {
        "train_files": [str(folder / "train.jsonl")],
        "val_files": [str(folder / "train.jsonl")],
        "train_batch_size": 8,
        "max_prompt_length": 16,
        "max_response_length": 8,
    }
    rollout = {"engine": engine, "n": 2, "kv_cache_gib": 0.01, "val_kwargs": [{"n": 1, "temperature": 0.0}]}
    trainer = {"total_training_steps": steps, "test_freq": 1, "save_freq": steps, "validation_data_dir": "validation"}
    return train(
        folder,
        ranks,
        script=script,
        model=sections.pop("model", WIDE),
        algorithm={"adv_estimator": "grpo"},
        data={**data, **sections.pop("data", {})},
        rollout={**rollout, **sections.pop("rollout", {})},
        actor={"ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 128, "optim": {"lr": 1e-3}},
        trainer={**trainer, **sections.pop("trainer", {})},
        **sections,
    )


def texts(folder: Path) -> dict[str, Any]:
    """Return what each step drew, and the responses of each validation."""
    found: dict[str, Any] = {}
    for path in sorted((run_folder(folder) / "rollouts").glob("*.h5")):
        with h5py.File(path) as file:
            tokens = file["tokens"]
            found[path.name] = {
                name: (tokens[name]["offsets"][:].tolist(), tokens[name]["values"][:].tolist())
                for name in ("input_ids", "response_mask")
            }
    for path in sorted((run_folder(folder) / "validation").glob("*.jsonl")):
        found[path.name] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def assert_as_native(found: Path, expected: Path, steps: int) -> None:
    assert len(texts(expected)) == 2 * steps + 1  # the first validation is before training
    assert texts(found) == texts(expected)
    for line, other in zip(compared(found), compared(expected), strict=True):
        assert line.keys() == other.keys()
        gaps = [it["training/rollout_log_probs_diff_max"] for it in (line, other) if it["step"] > 0]
        assert not gaps or gaps[0] == pytest.approx(gaps[1], abs=GAP)  # one step ahead, the weights are others
        for name, value in line.items():
            if not name.startswith(OTHER):
                assert value == pytest.approx(other[name], rel=1e-5, abs=1e-6, nan_ok=True), name


@needs_vllm
@pytest.mark.parametrize(
    ("placement", "steps"), [(TP2, 10), pytest.param({}, 10, marks=pytest.mark.exhaustive)], ids=["tp2", "dp2"]
)
def test_ten_steps_are_those_of_the_native_engine(tmp_path: Path, placement: dict[str, Any], steps: int) -> None:
    vllm, native = (job(tmp_path / it, 2, it, steps=steps, placement=placement) for it in ("vllm", "native"))
    assert_as_native(vllm, native, steps)
    assert not re.search(r"(INFO|WARNING|ERROR) vllm|site-packages/vllm", log_of(vllm))


@pytest.mark.skipif(HAS_VLLM, reason="it runs where vLLM is not installed")
def test_a_plugins_engine_takes_the_steps_of_the_native_one(tmp_path: Path) -> None:
    engines = {"transformers": {"transformers": {"batch_size": 5}}, "native": {}}
    other, native = (
        job(
            tmp_path / name,
            2,
            name,
            steps=2,
            run={"name": "ends", "dir": str(tmp_path / name / "runs"), "plugins": [PLUGIN]},
            rollout=own,
        )
        for name, own in engines.items()
    )
    assert_as_native(other, native, 2)


@needs_vllm
def test_a_rollout_pool_of_its_own_one_step_ahead(tmp_path: Path) -> None:
    options = {"placement": APART, "async_training": {"mode": "one_step_off"}}
    assert_as_native(*(job(tmp_path / it, 3, it, **options) for it in ("vllm", "native")), 4)


@needs_vllm
def test_adapters_are_merged(tmp_path: Path) -> None:
    vllm, native = (job(tmp_path / it, 2, it, model=LORA, placement=TP2) for it in ("vllm", "native"))
    assert_as_native(vllm, native, 4)


@needs_vllm
def test_conversations_with_tools(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    multi_turn = {
        "enable": True,
        "format": "nearly_all",
        "function_tool_path": str(tmp_path / "tools.py"),
        "max_assistant_turns": 4,
    }
    options = {"rollout": {"multi_turn": multi_turn}, "data": {"max_response_length": 32}}
    vllm, native = (job(tmp_path / it, 2, it, **options) for it in ("vllm", "native"))
    assert_as_native(vllm, native, 4)
    assert all(line["tool_call_counts/mean"] > 0 for line in compared(vllm) if line["step"] > 0)


@needs_vllm
def test_a_job_that_was_killed_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    options = {"trainer": {"save_freq": 1}, "placement": TP2}
    whole = job(tmp_path / "whole", 2, "vllm", **options)
    folder = tmp_path / "killed"
    folder.mkdir()
    write_rows(folder / "train.jsonl")
    assert start_job(folder, 2, "vllm", script=KILLED, **options) != 0
    assert checkpoints(folder)[-1] == "step_00000002"
    assert start_job(folder, 2, "vllm", **options) == 0
    assert compared(folder) == compared(whole)


MIXTURE = ("model.family=mixtral", "model.num_experts=4")
SIX_HEADS = ("model.num_attention_heads=6", "model.num_query_groups=3", "model.hidden_size=192")
WINDOW = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
WINDOW |= {"vocab_size": 99, "hidden_size": 128, "intermediate_size": 96}
WINDOW |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
BAD = {
    "exact": (("rollout.exact=true",), "rollout.exact is for engine=native"),
    "mixture": (MIXTURE, "its layout of a mixture of experts (layer 0) is not known"),
    "window": (("model.path=window",), "its layout of attention with a window (layer 0) is not known"),
    "tp": ((*SIX_HEADS, "placement.rollout.tp=3"), "placement.rollout.tp=3; use 1, 2, 4 or 8"),
}
if not HAS_VLLM:
    BAD = {"vLLM": ((), "vLLM is not installed here; make an environment with tools/vllm_environment.sh")}


@pytest.mark.parametrize("name", BAD)
def test_an_error_is_one_line_before_anything_is_built(run: Callable, tmp_path: Path, name: str) -> None:  # noqa: F811
    settings, expected = BAD[name]
    (tmp_path / "window").mkdir()
    (tmp_path / "window" / "config.json").write_text(json.dumps(WINDOW))
    config = write_config(tmp_path, model=WIDE)
    command = ("-m", "hpcrl", "train", config, "rollout.engine=vllm", *settings)
    ended = run(MPIEXEC, "-n", "3" if name == "tp" else "1", *RANK, *command)
    assert ended.code == 2 and "derived values" not in ended.stdout
    assert expected in ended.stderr and ended.stderr.count("\n") == 1

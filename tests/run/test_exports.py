"""Exported directories as other programs read them: they generate what the engine does, and stop where it stops."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.model.families import make_model
from tests.preloaded import RANK
from tests.run.small_run import MODEL, PROMPTS, SCORE, write_config
from tests.runtime.conftest import MPIEXEC, REPOSITORY, environment

NUM_TOKENS = 25  # of configs/tokenizer
ENDS = [2, 4, 7, 11, 14, 18, 21]
LONGEST = 40
LORA = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def hpcrl(folder: Path, *arguments: str) -> None:
    command = [str(MPIEXEC), "-n", "2", *RANK, "-m", "hpcrl", *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr


FAMILIES = (
    *("smollm3", "ministral", "seed-oss", "olmo3", "apertus", "gemma3", "glm4-moe", "minimax-m2", "gpt-oss"),
    *("qwen3-next", "qwen3.5", "qwen3.5-moe", "nemotron-h"),
)


@pytest.mark.parametrize(
    "name, options",
    [
        *(
            pytest.param(name, options, id=kind, marks=pytest.mark.slow)
            for kind, name, options in (
                ("dense", "llama", {}),
                ("tied", "llama-3.1", {}),
                ("moe", "qwen3-moe", {}),
                ("lora", "llama", LORA),
            )
        ),
        *(pytest.param(name, {}, id=name, marks=pytest.mark.exhaustive) for name in FAMILIES),
    ],
)
def test_transformers_generates_what_the_engine_generated(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    source = tmp_path / "source"
    make_model(name, vocab_size=NUM_TOKENS).save_pretrained(source)
    shutil.copytree(REPOSITORY / "configs" / "tokenizer", source, dirs_exist_ok=True)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS, "max_length": 99}))
    (tmp_path / "score.py").write_text(SCORE)
    config = write_config(
        tmp_path,
        model={"path": str(source), **options},
        data={
            "train_files": [str(tmp_path / "train.jsonl")],
            "val_files": [str(tmp_path / "train.jsonl")],
            "train_batch_size": 8,
            "max_prompt_length": 16,
            "max_response_length": LONGEST,
        },
        actor={"ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 256, "optim": {"lr": 1e-3}},
        reward={"custom_reward_function": {"path": str(tmp_path / "score.py")}},
        trainer={"total_training_steps": 2, "save_freq": 2, "save_hf": True},
    )
    hpcrl(tmp_path, "train", str(config))
    likeliest = ("rollout.n=1", "rollout.top_k=1", "generate.log_probs=true")
    hpcrl(tmp_path, "generate", str(config), f"model.init_from={tmp_path}/runs/ends", *likeliest)
    rows = [json.loads(line) for line in next((tmp_path / "runs").rglob("generations.jsonl")).read_text().splitlines()]

    (exported,) = tmp_path.glob("runs/ends/checkpoints/*/huggingface")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    found = []
    for prompt, row in zip(PROMPTS, rows, strict=True):
        ids = tokenizer.apply_chat_template(prompt["prompt"], add_generation_prompt=True, return_tensors="pt")
        # For some model types AutoTokenizer has a class that does not read the whole tokenizer.json.
        ids = torch.tensor([row["prompt_ids"]]) if name in FAMILIES else ids["input_ids"]
        tokens = model.generate(ids, do_sample=False, max_length=None, max_new_tokens=LONGEST)
        found.append(tokens[0, ids.shape[1] :].tolist())
    assert found == [row["response_ids"] for row in rows]
    stopped = [response[-1] for response in found if len(response) < LONGEST]
    assert set(stopped) <= set(ENDS)
    assert stopped or name in ("smollm3", "apertus")  # of the others some ended by themselves

    config_json = json.loads((exported / "config.json").read_text())
    generation = json.loads((exported / "generation_config.json").read_text())
    for key, value in {"eos_token_id": ENDS, "bos_token_id": 1, "pad_token_id": 0}.items():
        assert config_json[key] == generation[key] == value
    assert generation["max_length"] == 99  # that of model.path is kept
    assert tokenizer.chat_template


def test_an_export_of_random_weights_is_complete(tmp_path: Path) -> None:
    """Without model.path, all comes from the tokenizer, and from data.chat_template in place of its own."""
    from hpcrl.cli import load_job
    from hpcrl.run.saver import tokenizer_files

    config = write_config(tmp_path, data={"train_files": ["train.jsonl"], "chat_template": "{{ messages }}"})
    found = tokenizer_files(load_job("train").read_config(str(config), []))
    assert found is not None and found.folder == Path(MODEL["tokenizer"])
    assert found.token_ids == {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    assert found.chat_template == "{{ messages }}"

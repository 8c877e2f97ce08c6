"""The layouts of four ranks that tools/bench_layouts.py measures and tools/compare_layouts.py predicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
PROMPTS, SAMPLES = 8, 4
PROMPT_LENGTH, RESPONSE_LENGTH, LONGEST = 64, 32, 96
MEAN, SIGMA = 32.0, 0.6  # of log-normal lengths, before they are cut off at LONGEST
LENGTHS = ("fixed", "log-normal")
ALGORITHMS = ("grpo", "ppo")
VOCABULARY = 4096
DENSE = {
    "vocab_size": VOCABULARY,
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 704,
    "num_attention_heads": 8,
    "num_query_groups": 4,
}
MOE = DENSE | {"family": "qwen3_moe", "num_experts": 8, "moe_topk": 2, "moe_ffn_hidden_size": 352}
MOE["moe"] = {"load_imbalance": 2.5}  # actor/moe_load_imbalance/mean of such a job: routers are as initialised
MODELS = {"dense": DENSE, "moe": MOE}
AXES = ("tp", "pp", "cp", "vpp", "ep")
SINGLE = (("single", 1),)  # one rank trains, beside the one that leads and two that generate


@dataclass(frozen=True)
class Case:
    """actor: sizes by axis. engine_tp: of the rollout engine. split: half of the ranks train, the others generate."""

    model: str
    algorithm: str
    lengths: str
    actor: tuple[tuple[str, int], ...]
    engine_tp: int = 1
    split: bool = False
    mode: str = "sync"

    @property
    def layout(self) -> str:
        """What is the same for all algorithms and lengths."""
        sizes = " ".join(f"{axis}{size}" for axis, size in self.actor if size > 1)
        sizes = sizes or ("single" if self.actor == SINGLE else "dp")
        return f"{sizes}, engine tp{self.engine_tp}" + (f", split, {self.mode}" if self.split else "")

    @property
    def name(self) -> str:
        return f"{self.model} {self.algorithm} {self.lengths}: {self.layout}"

    def config(self, folder: Path) -> dict[str, Any]:
        """A job's template. folder: has prompts.jsonl and score.py, and gets the runs."""
        sizes = {axis: size for axis, size in self.actor if axis in AXES}
        placement: dict[str, Any] = {"actor": sizes, "rollout": {"tp": self.engine_tp}}
        if self.algorithm == "ppo":
            placement["critic"] = sizes
        if self.split:
            first = {"lead": "0", "train": "1"} if self.actor == SINGLE else {"train": "0-1"}
            placement["pools"] = {**first, "generate": "2-3"}
            for role in placement.keys() - {"pools"}:
                placement[role] = {**placement[role], "pool": "generate" if role == "rollout" else "train"}
        most = 512
        trained = {"ppo_max_token_len_per_gpu": most, "optim": {"lr": 1e-6}}
        return {
            "run": {"name": crc_name(self.name), "dir": str(folder / "runs")},
            "model": {"tokenizer": str(ROOT / "configs" / "tokenizer"), **MODELS[self.model]},
            "placement": placement,
            "data": {
                "train_files": [str(folder / "prompts.jsonl")],
                "train_batch_size": PROMPTS,
                "max_prompt_length": PROMPT_LENGTH,
                "max_response_length": LONGEST,
            },
            "rollout": {"n": SAMPLES, "ignore_eos": True, "max_num_seqs": PROMPTS * SAMPLES},
            "actor": {"ppo_mini_batch_size": PROMPTS // 2, **trained},
            "critic": trained,
            "algorithm": {"adv_estimator": "grpo" if self.algorithm == "grpo" else "gae"},
            "reward": {"custom_reward_function": {"path": str(folder / "score.py")}},
            "async_training": {"mode": self.mode},
            "trainer": {"save_rollouts": False, "save_freq": -1, "logger": []},
            "job": {"nodes": 1, "ntasks_per_node": RANKS},
        }


def crc_name(name: str) -> str:
    return f"{crc32(name.encode()):08x}"


def response_length(lengths: str, uid: str, sample: int) -> int:
    """Tokens of a sample, the same for every layout."""
    if lengths == "fixed":
        return RESPONSE_LENGTH
    uniform = (crc32(f"{uid} {sample}".encode()) + 0.5) / 2**32
    middle = log(MEAN) - SIGMA**2 / 2
    return max(1, min(LONGEST, round(exp(middle + SIGMA * NormalDist().inv_cdf(uniform)))))


def cases() -> Iterator[Case]:
    for model, algorithm, lengths in product(MODELS, ALGORITHMS, LENGTHS):
        if model == "moe" and (algorithm == "grpo") != (lengths == "fixed"):
            continue  # takes half an hour
        for sizes in actor_layouts(RANKS, with_experts=model == "moe"):
            for engine_tp in sorted({1, dict(sizes).get("tp", 1)}) if model == "dense" else [1]:
                yield Case(model, algorithm, lengths, sizes, engine_tp)
        if model == "dense":
            for sizes, engine_tp in product(actor_layouts(RANKS // 2, with_experts=False), (1, 2)):
                yield Case(model, algorithm, lengths, sizes, engine_tp, True)
            for engine_tp, mode in product((1, 2), ("sync", "one_step_off")):
                yield Case(model, algorithm, lengths, SINGLE, engine_tp, True, mode)


def actor_layouts(ranks: int, *, with_experts: bool) -> Iterator[tuple[tuple[str, int], ...]]:
    """All sizes whose product divides the ranks; the rest are replicas."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, pp, cp in product(divisors, repeat=3):
        if ranks % (tp * pp * cp):
            continue
        of_stage = ranks // pp
        for vpp in [1, 2] if 1 < pp < MODELS["dense"]["num_layers"] else [1]:
            for ep in [size for size in divisors if of_stage % size == 0] if with_experts else [1]:
                yield tuple(zip(AXES, (tp, pp, cp, vpp, ep), strict=True))

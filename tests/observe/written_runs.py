"""Folders of runs as a run leaves them, written without one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcrl.observe.record.archive import RecordLog, RolloutLog, finish_step, log_path
from hpcrl.observe.trace.records import encode, trace_path
from hpcrl.runtime.spans import Events

PHASES = {
    "gen": 4.0,
    "reward": 0.2,
    "old_log_prob": 1.0,
    "ref": 1.0,
    "adv": 0.1,
    "update_actor": 3.0,
    "update_weights": 0.4,
}
BUSY = {"rollout.generate": 4.0, "actor.update_actor": 3.0, "actor.compute_log_prob": 1.0}


def metrics(step: int, rng: random.Random, *, gain: float = 0.6) -> dict[str, float]:
    """A line of a run that learns."""
    learned = gain * (1 - math.exp(-step / 200))
    row: dict[str, float] = {
        "step": step,
        "critic/score/mean": 0.1 + learned + rng.gauss(0, 0.03),
        "actor/ppo_kl": abs(rng.gauss(0.002, 0.001)),
        "actor/kl_loss": 0.1 * learned,
        "actor/entropy": 1.5 - learned + rng.gauss(0, 0.02),
        "actor/pg_loss": rng.gauss(0, 0.01),
        "actor/pg_clipfrac": abs(rng.gauss(0.03, 0.01)),
        "actor/grad_norm": abs(rng.gauss(1.0, 0.2)),
        "response_length/mean": 300 + 200 * learned + rng.gauss(0, 8),
        "response_length/max": 1024.0,
        "response_length/clip_ratio": max(rng.gauss(0.05, 0.01), 0.0),
        "training/rollout_log_probs_diff_mean": abs(rng.gauss(1e-4, 2e-5)),
        "training/rollout_log_probs_diff_max": abs(rng.gauss(1e-2, 2e-3)),
        "training/off_policy/trajectory_staleness/mean": rng.choice((0.0, 1.0)),
        "perf/throughput": rng.gauss(5200, 150),
        "perf/mfu/actor": rng.gauss(0.38, 0.01),
        "perf/max_memory_allocated_gb": 61.0 + rng.gauss(0, 0.5),
        "perf/max_memory_reserved_gb": 68.0,
        "perf/cpu_memory_used_gb": 12.0,
        "perf/refit/seconds": rng.gauss(0.35, 0.02),
    }
    row |= {f"timing_s/{phase}": seconds * rng.uniform(0.9, 1.2) for phase, seconds in PHASES.items()}
    row["timing_s/step"] = sum(row[f"timing_s/{phase}"] for phase in PHASES) + 0.2
    row["perf/time_per_step"] = row["timing_s/step"]
    for phase, seconds in BUSY.items():
        median = seconds * rng.uniform(0.9, 1.1)
        row |= {
            f"perf/busy_s/{phase}/{end}": median * ratio for end, ratio in (("min", 0.9), ("median", 1.0), ("max", 1.1))
        }
    if step % 20 == 0:
        row |= {"val-core/maths/acc/mean@1": 0.2 + 0.9 * learned, "timing_s/testing": 12.0}
    if step % 50 == 0:
        row |= {"perf/save_seconds": rng.gauss(9.0, 1.0), "timing_s/save_checkpoint": rng.gauss(0.5, 0.05)}
    return row


def write_metrics(run: Path, rows: Sequence[Mapping[str, Any]], *, torn: bool = False) -> None:
    run.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text[: -len(text) // 50] if torn else text)


def write_config(run: Path, **changes: Any) -> None:
    """changes: of section__key=value"""
    config: dict[str, Any] = {
        "run": {"name": run.name, "dir": str(run.parent), "seed": 0},
        "actor": {"clip_ratio": 0.2, "optim": {"lr": 1e-6}},
        "rollout": {"n": 8},
        "model": {"tokenizer": "tokenizer"},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(json.dumps(config))  # JSON is YAML


def write_tokenizer(run: Path, words: Sequence[str]) -> dict[str, int]:
    """A tokenizer whose tokens are these texts; returns their ids."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*words, "<end>"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    (run / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(run / "tokenizer" / "tokenizer.json"))
    return vocabulary


@dataclass
class WrittenSample:
    row: int
    prompt: Sequence[int]
    response: Sequence[int]
    score: float
    source: str = "maths"
    finish: str = "stop"
    extras: dict[str, Any] = field(default_factory=dict)
    entropies: bool = True


def write_step(run: Path, step: int, samples: Sequence[WrittenSample], seed: int = 0) -> None:
    rng = np.random.default_rng(step)
    log = RolloutLog(log_path(run / "rollouts", step, 0))
    seen: dict[int, int] = {}
    for position, sample in enumerate(samples):
        length = len(sample.response)
        rollout = -rng.exponential(1.0, length).astype(np.float32)
        tokens = {
            "input_ids": np.array([*sample.prompt, *sample.response], np.int32),
            "response_mask": np.ones(length, np.int32),
            "rollout_log_probs": rollout,
            "old_log_probs": rollout + rng.normal(0, 0.01, length).astype(np.float32),
            "advantages": np.full(length, sample.score - 0.5, np.float32)
            * rng.uniform(0.5, 1, length).astype(np.float32),
        }
        if sample.entropies:
            tokens["entropies"] = rng.exponential(1.0, length).astype(np.float32)
        index = seen[sample.row] = seen.get(sample.row, -1) + 1
        log.append_sample(
            tokens,
            {
                "position": position,
                "uid": f"/data/train.parquet:{sample.row}:{step // 100}",
                "sample_index": index,
                "data_source": sample.source,
                "prompt_length": len(sample.prompt),
                "response_length": length,
                "finish_reason": sample.finish,
                "score": np.float32(sample.score),
                "acc": float(sample.score > 0.5),
                "extras": json.dumps({"acc": float(sample.score > 0.5)} | sample.extras),
            },
        )
    log.close()
    finish_step(run / "rollouts", step, seed=seed, weight_version=step, report=lambda line: None)


def write_log(run: Path, rank: int, lines: Sequence[tuple[str, str, str]]) -> None:
    """lines: (time of day, level, text)"""
    (run / "logs").mkdir(parents=True, exist_ok=True)
    path = run / "logs" / f"rank_{rank:05d}.log"
    with open(path, "a", encoding="utf-8") as file:
        for when, level, text in lines:
            file.write(f"2026-11-25 {when},123 {level} hpcrl: {text}\n")


def write_events(run: Path, opened: int, host: str, steps: Sequence[int]) -> None:
    """A TensorBoard file as one start of a run leaves it, by tensorboard's own writer."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    (run / "tensorboard").mkdir(parents=True, exist_ok=True)
    with open(run / "tensorboard" / f"events.out.tfevents.{opened}.{host}.77.0", "wb") as file:
        writer = RecordWriter(file)
        events = [Event(wall_time=opened, file_version="brain.Event:2")]
        layout = Summary(value=[Summary.Value(tag="custom_scalars__config__", simple_value=0.0)])
        events.append(Event(wall_time=opened, step=0, summary=layout))
        for number, step in enumerate(steps):
            for tag in ("critic/score/mean", "timing_s/step"):
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=1.0)])
                events.append(Event(wall_time=opened + 10 + number, step=step, summary=summary))
        for event in events:
            writer.write(event.SerializeToString())


def write_trace(run: Path, rank: int, node: str, busy: Mapping[int, float], seconds: float = 20.0) -> None:
    """A rank's trace file: steps of `seconds`, of which it waits those in which it is not busy."""
    file = RecordLog(trace_path(run, rank))
    for number, (step, worked) in enumerate(busy.items()):
        began = 100.0 + seconds * number
        events = Events(began, began + seconds, seconds - worked)
        file.append(encode(events, step=step, rank=rank, node=node, slice_ns=1, wall=1.8e9, clock=[]))
    file.close()

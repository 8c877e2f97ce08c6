"""Train a template, then print a row of its figures: `python tools/gpu/job.py NAME [key=value ...]`.

Means over the steps between the first, which compiles and captures, and the last, which is left out where a profile is
taken of it. `plan` is what `hpcrl plan` expects at most, beside the peak that torch's allocator had.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.loader import load_config
from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import GIB, TrainingPlan
from hpcrl.runtime.job import run_directory
from tools.gpu.qwen import CONFIG

# Title of a column, metric, how it is written.
COLUMNS = (
    ("step, s", "timing_s/step", "{:.2f}"),
    ("generation", "timing_s/gen", "{:.2f}"),
    ("log-probs", "timing_s/old_log_prob", "{:.2f}"),
    ("update", "timing_s/update_actor", "{:.2f}"),
    ("refit", "timing_s/update_weights", "{:.2f}"),
    ("tokens/s", "perf/throughput", "{:,.0f}"),
    ("MFU of log-probs", "perf/mfu/actor_infer", "{:.1%}"),
    ("MFU of update", "perf/mfu/actor", "{:.1%}"),
)
GAPS = (
    ("log-prob gap, largest", "training/rollout_log_probs_diff_max", "{:.3f}"),
    ("mean", "training/rollout_log_probs_diff_mean", "{:.5f}"),
    ("probability ratio off by at most", "actor/ratio_deviation_max", "{:.3f}"),
)
PEAKS = (
    ("allocated, GiB", "perf/max_memory_allocated_gb", "{:.1f}"),
    ("reserved", "perf/max_memory_reserved_gb", "{:.1f}"),
)
Line = dict[str, float]


def main(name: str, overrides: Sequence[str]) -> int:
    overrides = [*overrides, f"run.name={name}"]
    code = subprocess.run([sys.executable, "-m", "hpcrl", "train", str(CONFIG), *overrides]).returncode
    if code:
        print(f"fail: hpcrl train ended with code {code}")
        return code
    config = load_config(CONFIG, overrides)
    folder = run_directory(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    planned = tightest(TrainingPlan(config).rows()).total / GIB
    head, row = table(lines, planned)
    print(f"| {' | '.join(head)} |\n|{'---:|' * len(head)}\n| {' | '.join(row)} |")
    traces = ", ".join(path.name for path in sorted(folder.glob("profile/*")))
    print(f"pass: {len(lines)} steps" + f", profile {traces}" * bool(traces))
    return 0


def table(lines: list[Line], planned: float) -> tuple[list[str], list[str]]:
    """Titles and cells; `-` where there is no such metric."""
    steady = lines[1:-1] or lines
    cells = [cell(steady, metric, form, statistics.mean) for _, metric, form in COLUMNS]
    cells += [cell(lines, metric, form, max) for _, metric, form in (*GAPS, *PEAKS)]
    return [title for title, _, _ in (*COLUMNS, *GAPS, *PEAKS)] + ["plan"], [*cells, f"{planned:.1f}"]


def cell(lines: list[Line], metric: str, form: str, over) -> str:
    found = [line[metric] for line in lines if metric in line]
    return form.format(over(found)) if found else "-"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).name, sys.argv[2:]))

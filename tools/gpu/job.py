"""Train a template, then print a row of its figures: `python tools/gpu/job.py TEMPLATE NAME [key=value ...]`.

Means over the steps after the first, which compiles and captures, without one of which a profile is taken. The second
row is the forecast: times for the machine of tools/gpu/models.py, and what `hpcrl plan` expects at most. Weights are
drawn on the device. With --done in place of NAME it only prints the rows, of a run that has ended.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import GIB, TrainingPlan
from hpcrl.forecast.time.lengths import Lengths
from hpcrl.forecast.time.step import predict
from hpcrl.runtime.job import run_directory
from tools.gpu.models import config_of, machine, rehearsed

# Title of a column, metric, how it is written.
COLUMNS = (
    ("step, s", "timing_s/step", "{:.2f}"),
    ("generation", "timing_s/gen", "{:.2f}"),
    ("log-probs", "timing_s/old_log_prob", "{:.2f}"),
    ("update", "timing_s/update_actor", "{:.2f}"),
    ("refit", "timing_s/update_weights", "{:.2f}"),
    ("tokens/s a rank", "perf/throughput", "{:,.0f}"),
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


def main(template: Path, name: str, overrides: Sequence[str]) -> int:
    if name == "--done":
        return describe(template, overrides)
    overrides = [*overrides, f"run.name={name}", *rehearsed(template)]
    train = [sys.executable, str(Path(__file__).with_name("altered_train.py")), "train", str(template), *overrides]
    code = subprocess.run(train).returncode
    if code:
        print(f"fail: hpcrl train ended with code {code}")
        return code
    return describe(template, overrides)


def describe(template: Path, overrides: Sequence[str]) -> int:
    config = config_of(template, *overrides)
    folder = run_directory(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if not lines:
        print("fail: the run has no steps")
        return 1
    traces = ", ".join(path.name for path in sorted(folder.glob("profile/*")))
    steady = [line for line in lines[1:] if line["training/global_step"] not in config.trainer.profile_steps] or lines
    print_table(steady, lines, TrainingPlan(config))
    print(f"pass: {len(lines)} steps" + f", profile {traces}" * bool(traces))
    return 0


def print_table(steady: list[Line], lines: list[Line], job: TrainingPlan) -> None:
    """`-` where there is no such metric or forecast."""
    expected = forecast(job)
    cells = [cell(steady, metric, form, statistics.mean) for _, metric, form in COLUMNS]
    cells += [cell(lines, metric, form, max) for _, metric, form in (*GAPS, *PEAKS)]
    planned = [cell([expected], metric, form, max) for _, metric, form in (*COLUMNS, *GAPS, *PEAKS)]
    titles = ["", *(title for title, _, _ in (*COLUMNS, *GAPS, *PEAKS))]
    print(f"| {' | '.join(titles)} |\n|---|{'---:|' * (len(titles) - 1)}")
    print(f"| measured | {' | '.join(cells)} |\n| forecast | {' | '.join(planned)} |")


def forecast(job: TrainingPlan) -> Line:
    """Of hpcrl.forecast, by metric; responses as long as they may be."""
    data = job.config.data
    found = predict(job, machine(), Lengths.fixed(data.max_prompt_length, data.max_response_length))
    line = {f"timing_s/{name}": seconds for name, seconds in found.phases.items()}
    peak = tightest(job.rows()).total / GIB
    rate = found.tokens_per_second / (job.config.job.nodes * job.config.job.ntasks_per_node)  # of a rank, as in metrics
    return line | {"timing_s/step": found.step, "perf/throughput": rate, PEAKS[0][1]: peak}


def cell(lines: list[Line], metric: str, form: str, over) -> str:
    found = [line[metric] for line in lines if metric in line]
    return form.format(over(found)) if found else "-"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))

"""The runs that the tests of the report read: a long one, one with kills and requeues, a hostile one, seeds."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.observe.written_runs import (
    WrittenSample,
    metrics,
    write_config,
    write_events,
    write_log,
    write_metrics,
    write_step,
    write_tokenizer,
    write_trace,
)

WORDS = [
    "What",
    " is",
    " the",
    " sum",
    " of",
    " 3",
    " and",
    " 4",
    " 5",
    "?",
    " It",
    " answer",
    " 7",
    " 8",
    " 9",
    ",",
    ".",
    "\n",
]


def write_samples(run: Path, steps: range, *, prompts: int = 6, per_prompt: int = 4, length: int = 40) -> None:
    ids = write_tokenizer(run, WORDS)
    rng = random.Random(0)
    for step in steps:
        samples = []
        for prompt in range(prompts):
            for _ in range(per_prompt):
                response = [rng.randrange(10, len(WORDS)) for _ in range(rng.randrange(length // 2, length))]
                score = min(max(rng.gauss(0.2 + 0.1 * prompt * step / steps[-1], 0.1), 0.0), 1.0)
                samples.append(
                    WrittenSample(
                        row=prompt,
                        prompt=[ids["What"], ids[" is"], 2, 3, 4, 5 + prompt % 4, 9],
                        response=[*response, ids["<end>"]],
                        score=score,
                        source="maths" if prompt % 2 else "words",
                        finish="length" if rng.random() < 0.1 else "stop",
                        extras={"format": score > 0.3, "judge": "close" if score > 0.5 else "far off"},
                    )
                )
        write_step(run, step, samples)


def write_long_run(run: Path, steps: int = 1000, *, archived: range | None = None) -> Path:
    rng = random.Random(1)
    write_config(run)
    write_metrics(run, [metrics(step, rng) for step in range(1, steps + 1)])
    if archived is not None:
        write_samples(run, archived)
    (run / "exit.json").write_text(json.dumps({"code": 0, "rank": None, "role": None, "phase": None, "error": None}))
    (run / "times.json").write_text(json.dumps({"total_steps": steps, "step_s": 9.9}))
    write_log(
        run,
        0,
        [
            ("10:00:00", "INFO", "derived values on 16 ranks\n  actor (all)  tp 2"),
            ("10:01:00", "INFO", f"step 1 of {steps} begins"),
        ],
    )
    return run


NODES = ("n[1-4]", "n[1-4]", "n[1,3-5]", "n[1,4-6]")


def write_run_with_kills(run: Path) -> Path:
    """Slices: 1 saved and requeued at step 20; 2 killed at step 33 after a save at 30; 3 ended by a hang at step 45;
    4 still going on at step 52, with the checkpoint of step 40."""
    rng = random.Random(2)
    write_config(run)
    write_metrics(run, [metrics(step, rng) for step in range(1, 53)], torn=True)
    start, begins = "derived values on 8 ranks\n  actor (all)  tp 1  pp 1  dp 8", "step {} of 200 begins"
    resumed = "resuming after step {0} from " + str(run / "checkpoints") + "/step_{0:08d}"
    saved = "saved " + str(run / "checkpoints") + "/step_{:08d}"
    slow = "rank 5 on n3 is {}% slower than its peers in actor.update_actor, in 7 of the last 10 steps"
    hang = "rank 6 on n3 is in actor.update_actor, no progress for 612 s; the other 7 wait in actor.update_actor"
    write_log(
        run,
        0,
        [
            ("10:00:00", "INFO", start),
            ("10:00:20", "INFO", begins.format(1)),
            ("10:10:00", "INFO", saved.format(10)),
            ("10:20:00", "WARNING", "stopping: the allocation ends in 55s; gen and a save take 1m10s"),
            ("10:20:30", "INFO", saved.format(20)),
            ("10:20:31", "INFO", "stopped after step 20; the next start continues from there"),
            ("11:00:00", "INFO", start),
            ("11:00:20", "INFO", resumed.format(20)),
            ("11:00:21", "INFO", begins.format(21)),
            ("11:10:00", "INFO", saved.format(30)),
            ("11:12:00", "WARNING", slow.format(41)),
            ("12:00:00", "INFO", start),
            ("12:00:20", "INFO", resumed.format(30)),
            ("12:00:21", "INFO", begins.format(31)),
            ("12:05:00", "WARNING", slow.format(38)),
            ("12:10:00", "INFO", saved.format(40)),
            ("12:30:00", "ERROR", "no rank made progress for 612 s; collecting stack traces"),
            ("12:30:05", "ERROR", hang),
            ("13:00:00", "INFO", start),
            ("13:00:20", "INFO", resumed.format(40)),
            ("13:00:21", "INFO", begins.format(41)),
        ],
    )
    for rank in (1, 2):
        write_log(run, rank, [(f"11:0{rank}:00", "WARNING", f"metrics of rank {rank} took {rank}.5e-3 s")])
    for number, steps in enumerate((range(1, 21), range(21, 34), range(31, 46), range(41, 53))):
        write_events(run, 1_790_000_000 + 3600 * number, "n0.site.org", steps)
    slices = [{"job": "17", "restart": number, "step": step} for number, step in enumerate((-1, 20, 30, 40))]
    (run / "slices.json").write_text(json.dumps(slices))
    (run / "slurm-17.out").write_text(
        "".join(
            f"hpcrl: job 17, restart {number}: 8 ranks on 4 node(s) {NODES[number]}, mpi pmi2, interface hsn0, "
            f"end 2026-11-25T10:21:00\n{ended}"
            for number, ended in enumerate(
                (
                    "hpcrl: saved; asking for restart 1\n",
                    "slurmstepd: error: *** STEP 17.0 ON n2 CANCELLED AT 2026-11-25T11:13:00 DUE TO NODE FAILURE ***\n"
                    "hpcrl: killed (srun's exit code 137); asking for restart 2\n",
                    "",
                    "",
                )
            )
        )
    )
    (run / "verdict.md").write_text(f"# Hang: {hang}.\n\nStep 45. The job was ended with exit code 86.\n")
    slow_rank = {"rank": 5, "node": "n3", "phase": "actor.update_actor"}
    (run / "stragglers.jsonl").write_text(
        "".join(
            json.dumps({"step": step, **slow_rank, "ratio": ratio}) + "\n" for step, ratio in ((32, 1.41), (36, 1.38))
        )
        + '{"step": 4'
    )
    for rank in range(8):
        busy = {step: 14.0 if rank == 5 and step > 21 else 10.0 for step in range(1, 53)}
        write_trace(run, rank, f"n{rank // 2 + 1}", busy)
    for step in (30, 40):
        folder = run / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(
            json.dumps({"files": [{"path": "actor/0", "bytes": 3 * 2**30, "xxh3_128": ""}]})
        )
    (run / "checkpoints" / "step_00000050.tmp").mkdir()
    return run


HOSTILE = [
    "<script>window.attacked = 1</script>",
    "</script><script>window.attacked = 2</script>",
    "<img src=x onerror='window.attacked = 3'>",
    "<!--<script>",
    "]]>&lt;b&gt;",
    "\u2028\u2029\u0000\u0007\u202e\u0085",
    "\ud7ff\ue000\U0001f600",
    "{{DATA}}{{SCRIPT}}",
    "javascript:window.attacked=4",
]


def write_hostile_run(run: Path) -> Path:
    """Texts that look like code everywhere, a line of 100 kB, NaN, missing steps, and damaged files."""
    name = "<script>window.attacked = 5</script>"
    write_config(run, run__plugins=[name], actor__loss_mode="</script><script>window.attacked = 6</script>")
    rng = random.Random(3)
    rows = [metrics(step, rng) for step in (*range(1, 40), *range(60, 90))]
    for row in rows[10:20]:
        row["critic/score/mean"] = None  # as NaN is written
        row["actor/grad_norm"] = float("nan")
    rows[5]["val-core/<img src=x onerror=window.attacked=7>/acc/mean@1"] = 0.5
    rows[6]["actor/entropy"] = 1e308
    write_metrics(run, rows)
    ids = write_tokenizer(run, [*HOSTILE, "y" * 100_000, " plain"])
    for step in (1, 2, 39, 60, 89):
        samples = [
            WrittenSample(
                row=place,
                prompt=[ids[text], ids[" plain"]],
                response=[ids[" plain"], ids[text], ids[" plain"]],
                score=float("nan") if place == 2 else place / 10,
                source=HOSTILE[0],
                finish=HOSTILE[1] if place == 3 else "stop",
                extras={HOSTILE[2]: HOSTILE[0], "list": [HOSTILE[1]] * 100},
                entropies=False,
            )
            for place, text in enumerate((*HOSTILE, "y" * 100_000))
        ]
        write_step(run, step, samples)
    (run / "rollouts" / "step_00000003.h5").write_bytes(b"no archive")
    (run / "rollouts" / "step_00000089.h5.tmp").write_bytes(b"half")
    write_log(run, 0, [("10:00:00", "INFO", "derived values on 1 ranks"), ("10:00:01", "INFO", "step 1 of 100 begins")])
    write_log(
        run,
        0,
        [("10:00:02", "WARNING", HOSTILE[0] + "x" * 100_000), ("10:00:03", "ERROR", HOSTILE[1] + "\n" + HOSTILE[2])],
    )
    (run / "logs" / "rank_00001.log").write_bytes(b"\xff\xfe\x00 no log\n" * 100)
    (run / "slices.json").write_text('[{"job": 3}, "x", {"job": "1", "restart": 0, "step": -1}]')
    (run / "exit.json").write_text(
        json.dumps({"code": 1, "rank": 0, "role": HOSTILE[0], "phase": None, "error": HOSTILE[1]})
    )
    (run / "stragglers.jsonl").write_text('{"step": "x"}\n[]\nnull\n')
    (run / "verdict.md").write_text(HOSTILE[0] * 10)
    (run / "times.json").write_text('{"total_steps": "many"}')
    return run


def write_seeds(folder: Path) -> list[Path]:
    """Two configurations of three seeds each."""
    runs = []
    for name, gain, clip in (("grpo", 0.4, 0.2), ("dapo", 0.6, 0.28)):
        for seed in range(3):
            run = folder / f"{name}_{seed}"
            rng = random.Random(seed)
            write_config(run, run__seed=seed, actor__clip_ratio=clip)
            write_metrics(run, [metrics(step, rng, gain=gain) for step in range(1, 101)])
            runs.append(run)
    return runs

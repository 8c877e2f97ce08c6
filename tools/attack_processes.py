"""Hostile programs under test, answers of models, and a second user of the node, for `attack.py`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import checkout
import sandbox_attacks
from attack_files import job
from attack_place import NotPossible, Place, Reached, attack

PROGRAM, ANSWER, USER = "program under test", "answer", "another user"
FILES = """
import os, sys
for path in ({key!r}, {project!r}, "/etc/passwd"):
    if os.path.exists(path):
        print("reached", path)
if {secret!r} in str(os.environ):
    print("reached the environment")
for path in (os.__file__, sys.executable, os.path.dirname(os.__file__) + "/marker"):
    try:
        open(path, "ab").close()
        print("reached", path)
    except OSError:
        pass
print([number for number in os.listdir("/proc") if number.isdecimal() and int(number) > 9 and "reached"] or "")
"""
RUN = """
import json, sys
from hpcrl.sandbox.program import Limits, SandboxUnavailable, run_python
programs, limits = json.load(sys.stdin)
for name, program in programs.items():
    try:
        ran = run_python(program, limits=Limits(**limits))
    except SandboxUnavailable as error:
        print("unavailable", error)
        break
    if "reached" in ran.stdout or ran.fate == "ok" and ran.stdout.strip():
        print(f"{name}: {ran.stdout}")
    if any(f"{error}Error: " in ran.stderr for error in ("Syntax", "Name", "Type", "Attribute", "Import")):
        print(f"{name}: not run: {ran.stderr[-200:]}")
"""


def run_programs(place: Place, programs: dict[str, str], **limits: int) -> None:
    """Run them as code rewards do."""
    (place.root / "programs").write_text(json.dumps([programs, limits]))
    source = RUN.replace("sys.stdin", f"open({str(place.root / 'programs')!r})")
    said = place.python("-c", source, cwd=place.private)
    if said.startswith("unavailable"):
        raise NotPossible(said.removeprefix("unavailable").strip())
    if said:
        raise Reached(" ".join(said.split()))


@attack(PROGRAM, "private files, variables, other processes, Python's own files", "run_python", is_fast=True)
def files_of_programs(place: Place) -> None:
    names = {"key": str(place.key), "project": str(checkout.ROOT / "pyproject.toml"), "marker": str(place.marker)}
    run_programs(place, {"files": FILES.format(secret=place.secret, **names)})


@attack(PROGRAM, "keys, io_uring, sockets, namespaces, tracing, uncounted memory", "run_python", is_fast=True)
def calls_of_programs(place: Place) -> None:
    run_programs(place, {name: sandbox_attacks.program(name) for name in sandbox_attacks.CALLS})


@attack(PROGRAM, "memory beyond the limit", "run_python")
def memory_of_programs(place: Place) -> None:
    programs = {name: sandbox_attacks.program(name) for name in sandbox_attacks.MEMORY}
    run_programs(place, programs, seconds=20, memory_mb=sandbox_attacks.LIMIT_MB)


BOMBS = {
    "math_verify": [
        r"\boxed{" + "{" * 10**5 + "1" + "}" * 10**5 + "}", r"\boxed{9^{9^{9}}}", "7" * 10**6, r"\( x " * 20_000,
    ],
    "countdown": ["<answer>" + "(" * 10**5 + "1+1" + ")" * 10**5 + "</answer>", "<answer>9**9**9**9</answer>"],
    "numina_x": [r"\boxed{" + "1+" * 10**5 + "1}"],
    "openai/gsm8k": ["#### " + "1," * 10**6],
}  # fmt: skip
WRONG = {
    "numina_strict": [
        (r"\boxed{7200}", "72"), (r"\boxed{72_99}", "72"), (r"\boxed{(100,0.02)}", "(1,2)"), (r"\boxed{314}", r"\pi"),
    ],
    "math_strict": [(r"\boxed{1=2=72}", "72"), (r"\boxed{72 \text{ or 73}}", "72"), (r"\boxed{}", "72")],
    "math_dapo_strict": [("Answer: $72$ or 73", "72")],
    "searchR1_strict": [("<answer></answer>", {"target": "The"})],
    "countdown": [
        ("<answer>1+2+3+4</answer>", {"numbers": [1, 2], "target": 10}),
        ("<answer>2</answer>", {"numbers": [1, 1], "target": 2}),
    ],
    "code_strict": [("```python\nimport os\nos._exit(0)\n```", {"inputs": ["", ""], "outputs": ["", "3"]})],
    "taco": [("```python\nprint(open(0).read())\n```", {"inputs": ["1"], "outputs": ["3"]})],
}  # fmt: skip
SCORE = """
import json, sys, time
from hpcrl.rewards.registry import scorer_for
bombs, wrong = json.load(open(sys.argv[1]))
scorer_for("math_verify")("math_verify", r"\boxed{2}", "2")  # imports the library
for source, answer, truth in bombs + wrong:
    began = time.process_time()
    found = scorer_for(source)(source, answer, truth)
    seconds = time.process_time() - began
    score = found.get("score", found.get("acc", 0)) if isinstance(found, dict) else found
    if score > 0.1 or seconds > 3:
        print(f"{source}: score {score} after {seconds:.1f} s for {answer[:40]!r}")
"""


def score(place: Place, bombs: list[object], wrong: list[object]) -> None:
    given = place.root / "answers"
    given.write_text(json.dumps([bombs, wrong]))
    if said := place.python("-c", SCORE, given):
        raise Reached(" ".join(said.split()))


@attack(ANSWER, "braces, towers of powers, digits, open formulas: 3 s at most", "rules of rewards", is_fast=True)
def costly_answers(place: Place) -> None:
    truths = {"countdown": {"numbers": [1, 1], "target": 2}}
    score(place, [[rule, text, truths.get(rule, "2")] for rule, texts in BOMBS.items() for text in texts], [])


@attack(ANSWER, "full marks without a right answer", "strict rules", is_fast=True)
def wrong_answers(place: Place) -> None:
    score(place, [], [[rule, *pair] for rule, pairs in WRONG.items() for pair in pairs])


@attack(USER, "a run folder made before, with links to private files", "train", is_fast=True)
def folder_of_another_user(place: Place) -> None:
    run = place.open_to_others() / "attacked"

    def plant() -> None:
        run.mkdir(mode=0o777)
        for name in ("config.yaml", "metrics.jsonl", "logs/rank_00000.log", "exit.json", "checkpoints/latest"):
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).symlink_to(place.key)

    place.as_other_user(plant)
    before = sorted(run.rglob("*"))
    place.hpcrl("train", job(place, run={"name": "attacked", "dir": str(run.parent)}), codes=(2,))
    if sorted(run.rglob("*")) != before:
        raise Reached("the job wrote to the folder")


@attack(USER, "ports, files, signals and /proc of a job, at random", "train on 2 ranks")
def neighbour(place: Place) -> None:
    if os.geteuid() != 0:
        raise NotPossible("needs root to become another user")
    mpiexec = Path(sys.executable).with_name("mpiexec")
    launcher = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
    if launcher is None:
        raise NotPossible("no mpiexec")
    shared, metrics = place.open_to_others(), []
    for attacked in (False, True):
        config = job(place, run={"name": f"run_{attacked}", "dir": str(place.out)}, trainer={"total_training_steps": 6})
        command = [
            launcher,
            "-n",
            "2",
            sys.executable,
            "-m",
            "hpcrl",
            "train",
            str(config),
            "data.train_batch_size=2",
            "actor.ppo_mini_batch_size=2",
        ]
        tool = Path(__file__).with_name("attack_neighbour.py")
        before = [sys.executable, str(tool), "--user", place.user, "--folders", str(shared), str(place.out), "--"]
        environment = {**os.environ, "TMPDIR": str(shared), "HOME": str(place.home), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*(before if attacked else []), *command], env=environment, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise Reached(f"exit code {done.returncode}: {done.stdout[-300:]} {done.stderr[-300:]}")
        rows = [json.loads(line) for line in (place.out / f"run_{attacked}" / "metrics.jsonl").read_text().splitlines()]
        timed = ("timing", "perf/", "memory/")
        metrics.append([{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows])
    if metrics[0] != metrics[1]:
        raise Reached("metrics differ from those of an undisturbed job")


@attack(USER, "modes of a job's files, and what it leaves in the temporary folder", "train")
def modes(place: Place) -> None:
    place.hpcrl("train", job(place), codes=(0,))
    run = place.out / "runs" / "attacked"
    if open_files := [path.name for path in (run, *run.rglob("*")) if path.stat().st_mode & 0o077]:
        raise Reached(f"open to others: {', '.join(open_files[:5])}")
    if left := [path.name for path in place.root.iterdir() if path.name.startswith(("hpcrl_", "pymp-", "tmp"))]:
        raise Reached(f"left in the temporary folder: {', '.join(left)}")

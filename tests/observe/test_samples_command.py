"""`hpcrl samples` in a pipe and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.observe.read.samples import read_step_samples
from hpcrl.observe.report.sample_choice import packed
from tests.observe.recorded_run import byte_level, write_config, write_step

ROOT = Path(__file__).parents[2]
SGR = re.compile(rb"\x1b\[[0-9;]*m")  # colours: the only sequences of a terminal that may come
HOSTILE = [
    "\x1b]0;title\x07\x1b[2J\x1b[31mred",
    "\x9b31m\x90\x85 8-bit controls",
    "overprint\rline\x08\x7f",
    "\u202eright to left\u2066\u2028",
    "[bold red]markup[/] <script>alert(1)</script> 漢字 🙂",
    "x" * 100_000,
    "\0\x01\x0e",
    "a|b\tc\n\nd",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 and 2, of four prompts with two samples each; the second step's responses are hostile."""
    run = tmp_path / "runs" / "small"
    write_config(run, "tokenizer")
    (run / "tokenizer").mkdir()
    byte_level().save(str(run / "tokenizer" / "tokenizer.json"))
    plain = [(f"question {row // 2}", f"answer {row}") for row in range(8)]
    write_step(run, 1, plain, byte_level(), scores=[3, 1, 4, 1, 5, 9, 2, 6])
    odd = [(f"question {row // 2}\x1b[1m", text) for row, text in enumerate(HOSTILE)]
    extras = [json.dumps({"\x1b[5mblink": "\x1b[5m", "x": float("nan")})] * 8
    write_step(run, 2, odd, byte_level(), extras=extras, data_source=["\x1b[7m"] * 8)
    return run


def hpcrl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcrl", "samples", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def rows(*arguments: str | Path) -> list[dict[str, Any]]:
    done = hpcrl(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def in_terminal(*arguments: str | Path, columns: int = 100) -> bytes:
    """What the command writes to a terminal."""
    leader, follower = pty.openpty()
    environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "50"}
    command = [sys.executable, "-m", "hpcrl", "samples", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=follower, stderr=follower, env=environ)
    os.close(follower)
    found = b""
    try:
        while text := os.read(leader, 1 << 16):
            found += text
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    assert process.wait() == 0, found
    return found


def test_selections_in_a_pipe_are_json_lines(run: Path) -> None:
    def found(*arguments: str) -> list[str]:
        return [row["response"] for row in rows(run, "--step", "1", *arguments)]

    assert found() == [f"answer {row}" for row in (1, 3, 6, 0, 2, 4, 7, 5)]
    assert found("--worst", "2") == ["answer 1", "answer 3"]
    assert found("--best", "2") == ["answer 5", "answer 7"]
    assert found("--grep", "swer 4") == ["answer 4"] and found("--grep", "question 3") == ["answer 6", "answer 7"]
    assert found("--uid", "a.parquet:1") == found("--uid", "a.parquet:1:0") == ["answer 2", "answer 3"]
    assert found("--limit", "1") == ["answer 1"] and found("--grep", "none of them") == []
    row = rows(run, "--step", "1", "--worst", "1", "--tokens")[0]
    assert (row["step"], row["uid"], row["sample_index"], row["score"]) == (1, "a.parquet:0:0", 1, 1)
    assert "".join(row["token_texts"]) == "answer 1<|end|>"
    assert len(row["advantages"]) == len(row["entropies"]) == len(row["token_texts"]) == row["length"]


def test_turns_and_their_rewards_are_shown(tmp_path: Path) -> None:
    """The second of five letters is an answer. Of the failed one nothing counts."""
    run = tmp_path / "acts"
    write_config(run, "tokenizer")
    (run / "tokenizer").mkdir()
    byte_level().save(str(run / "tokenizer" / "tokenizer.json"))
    extras = [json.dumps({"error": "timeouts: longer than 60 s"})]
    columns = ("response_mask", "token_level_scores")
    numbers = {"num_turns": np.array([2]), "tool_call_counts": np.array([3])}
    write_step(run, 1, [("go", "vwxyz")], byte_level(), columns=columns, answered=slice(1, 2), **numbers)
    write_step(run, 2, [("go", "vw")], byte_level(), columns=columns, answered=slice(9), extras=extras)
    good, failed = rows(run, "--step", "all")
    assert [(turn["text"], turn["answer"]) for turn in good["turns"]] == [("v", "w"), ("xyz<|end|>", "")]
    assert [turn["reward"] for turn in good["turns"]] == [-1.0, -1.0 + 5 / 8]
    assert good["parts"].items() >= {"num_turns": 2, "tool_call_counts": 3, "turn_rewards": "-1 -0.375"}.items()
    assert "turns" not in failed and failed["parts"]["error"] == "timeouts: longer than 60 s"
    in_page = packed(read_step_samples(run, 1)[0])
    assert in_page["labels"] == {0: "[turn 1, reward -1]", 1: "[answer to turn 1]", 2: "[turn 2, reward -0.375]"}
    text = SGR.sub(b"", in_terminal(run, "--step", "1")).decode()
    assert "[turn 1, reward -1]\r\nv\r\n[answer to turn 1]\r\nw\r\n[turn 2, reward -0.375]\r\nxyz" in text


def test_texts_survive_json(run: Path) -> None:
    found = {row["response"] for row in rows(run, "--best", "8")}
    assert found == {text.replace("\0", "\0") for text in HOSTILE}
    assert {row["step"] for row in rows(run, "--step", "all", "--worst", "3")} == {1, 2}
    assert [row["step"] for row in rows(run, "--uid", "a.parquet:3")] == [1, 1, 2, 2]


def test_two_runs_are_shown_by_prompt(run: Path, tmp_path: Path) -> None:
    """The prompts at which the second run is worse come first; another epoch of the prompts is found, too."""
    other = tmp_path / "runs" / "other"
    write_config(other, str(run / "tokenizer"))
    texts = [(f"question {row // 2}", f"other {row}") for row in range(2, 8)]
    uids = [f"a.parquet:{row // 2}:4" for row in range(2, 8)]
    write_step(other, 1, texts, byte_level(), scores=[4, 4, 0, 0, 4, 4], uid=uids)
    found = rows(run, "--diff", other)
    assert [row["uid"] for row in found] == ["a.parquet:2", "a.parquet:3", "a.parquet:1"]
    assert [(row["mean_score"], row["mean_score_2"]) for row in found] == [(7, 0), (4, 4), (2.5, 4)]
    assert [sample["response"] for sample in found[0]["samples"]] == ["answer 4", "answer 5"]
    assert [sample["response"] for sample in found[0]["samples_2"]] == ["other 4", "other 5"]
    assert len(rows(run, "--diff", other, "--limit", "1")) == 1
    for columns in (60, 120):
        shown = SGR.sub(b"", in_terminal(run, "--diff", other, columns=columns)).decode()
        assert shown.index("answer 4") < shown.index("other 4") < shown.index("answer 6")


@pytest.mark.parametrize("options", [[], ["--json"], ["--color", "gap", "--full"], ["--diff"]])
def test_model_text_never_reaches_a_terminal_raw(run: Path, options: list[str]) -> None:
    shown = in_terminal(run, "--step", "2", *options, *([run] if options == ["--diff"] else []))
    text = SGR.sub(b"", shown).decode()
    assert "<script>alert(1)</script>" in text and "[bold red]markup[/]" in text.replace("\\n", "")
    odd = {character for character in text if not character.isprintable() and character not in "\r\n\t\u200d"}
    assert not odd
    assert all(line.endswith("\r\n") or "\r" not in line for line in text.splitlines(keepends=True))


def test_tokens_are_coloured_by_the_sign_of_their_advantage(run: Path, tmp_path: Path) -> None:
    shown = in_terminal(run, "--step", "1", "--worst", "1")
    assert SGR.search(shown) and b"answer 1<|end|>" in SGR.sub(b"", shown)
    plain = in_terminal(run, "--step", "1", "--worst", "1", "--color", "none")
    (line,) = [line for line in plain.split(b"\r\n") if b"answer 1" in line]
    assert SGR.search(line) is None


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["{run}", "--step", "9"], "samples: --step 9 is not archived; archived steps: 1-2"),
        (["{run}", "--step", "x"], "samples: --step x; expected a step, A:B, A:, :B, or all"),
        (["{run}", "--worst", "0"], "samples: argument --worst: found '0'; expected a number of at least 1"),
        (["{run}", "--worst", "--best"], "samples: argument --best: not allowed with argument --worst"),
        (["/none"], "/none is no folder; expected the folder of a run that has archived a step"),
        (["{run}/tokenizer"], "{run}/tokenizer/rollouts has no step_*.h5; expected the folder of a run"),
        (["{run}", "--diff", "/none"], "/none is no folder"),
    ],
)
def test_wrong_command_lines(run: Path, arguments: list[str], line: str) -> None:
    done = hpcrl(*(argument.format(run=run) for argument in arguments))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("hpcrl: error: " + line.format(run=run)) and done.stderr.count("\n") == 1


def test_a_damaged_step_is_a_warning_unless_it_is_the_one_asked_for(run: Path) -> None:
    path = run / "rollouts" / "step_00000002.h5"
    path.write_bytes(path.read_bytes()[:4000])
    for arguments in ([], ["--step", "all"]):
        done = hpcrl(run, *arguments)
        assert done.returncode == 0 and {json.loads(line)["step"] for line in done.stdout.splitlines()} == {1}
        assert done.stderr.startswith("hpcrl: warning: skipped: ") and done.stderr.count("\n") == 1
    done = hpcrl(run, "--step", "2")
    assert done.returncode == 2 and "not a whole rollout archive" in done.stderr


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(run: Path) -> None:
    command = f"{sys.executable} -m hpcrl samples {run} --step all --worst 8 --tokens | head -c 10"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_what_is_needed_is_imported(run: Path) -> None:
    code = f"""
import sys
from hpcrl import cli
try:
    cli.main(["samples", {str(run)!r}])
except SystemExit as end:
    assert end.code == 0
loaded = {{name.split(".")[0] for name in sys.modules}}
sys.exit(f"{{loaded}}" if loaded & {{"torch", "mpi4py", "transformers", "megatron", "rich", "pydantic"}} else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Evaluations read back and compared; what cannot be compared is one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl import cli
from hpcrl.api import compare_evaluations, plot_comparison
from hpcrl.observe.read.evaluation import digest_of_bytes
from hpcrl.runtime.exits import InputError

GREEDY = {"n": 1, "temperature": 0.0, "top_k": -1, "top_p": 1.0}
SAMPLED = {"n": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
Line = dict[str, Any]


def line(row: int, values: Sequence[float | None], *, source: str = "math", **other: Any) -> Line:
    """The results of a problem in the way with as many samples."""
    count = len(values)
    return {
        "file": f"{source}.parquet",
        "row": row,
        "digest": f"{source} {row}",
        "data_source": source,
        "way": GREEDY if count == 1 else {**SAMPLED, "n": count},
        "acc": values,
        "reward": values,
        "truncated": [False] * count,
        "response_length": [10] * count,
        **other,
    }


def evaluated(run: Path, lines: Sequence[Line], **settings: Any) -> Path:
    """A run's folder with an evaluation of these results."""
    run.mkdir(parents=True)
    content = "".join(json.dumps(one) + "\n" for one in lines)
    (run / "evaluation.jsonl").write_text(content)
    settings = {"metrics": {}, "step": 1, "max_response_length": 8, **settings}
    settings = {"problems_digest": digest_of_bytes(content.encode()), **settings}
    (run / "evaluation.json").write_text(json.dumps(settings))
    return run


def test_levels_and_differences_by_hand(tmp_path: Path) -> None:
    first = [line(0, [1, 1]), line(1, [0, 0]), line(2, [1, None]), line(0, [0, 1], source="code")]
    second = [line(0, [1, 0]), line(1, [1, 0]), line(2, [1, 1]), line(0, [1, 1], source="code")]
    found = compare_evaluations([evaluated(tmp_path / "a", first), evaluated(tmp_path / "b", second)])
    levels = {(level.name, level.source): level.estimates for level in found.levels}
    assert {key: estimates["acc"].mean for key, estimates in levels.items()} == {
        ("a", "math"): 0.5,
        ("a", "code"): 0.5,
        ("a", "all"): 0.5,
        ("b", "math"): pytest.approx(2 / 3),
        ("b", "code"): 1.0,
        ("b", "all"): 0.75,
    }
    assert levels["a", "all"]["acc"].standard_error == pytest.approx(math.sqrt((0.25 + 0.25) / 3 / 4))
    assert levels["a", "math"]["pass@2"].mean == pytest.approx(2 / 3)
    changes = {change.source: change.differences["acc"] for change in found.changes}
    # differences of math -1/2, 1/2, 1/2; of code 1/2
    assert changes["math"].mean == pytest.approx(1 / 6) and (changes["math"].wins, changes["math"].losses) == (2, 1)
    assert changes["all"].mean == 0.25 and changes["all"].standard_error == pytest.approx(math.sqrt(0.75 / 3 / 4))
    assert math.isnan(changes["code"].standard_error) and not found.notes


def test_problems_are_matched_by_content(tmp_path: Path) -> None:
    """In another order, from another file, with repeated rows; a part of them is compared, with a note."""
    first = [line(row, [row % 2], digest=f"{row // 2}") for row in range(6)]  # each prompt twice, wrong then right
    moved = [{**one, "file": "other/val.jsonl", "row": 9 - one["row"]} for one in first]
    found = compare_evaluations([evaluated(tmp_path / "a", first), evaluated(tmp_path / "b", moved)])
    assert [change.differences["acc"].ties for change in found.changes] == [6] and not found.notes

    fewer = evaluated(tmp_path / "c", moved[:3], max_response_length=16)
    found = compare_evaluations([tmp_path / "a", fewer])
    assert found.changes[0].differences["acc"].num_problems == 3
    assert list(found.notes) == [
        "3 problems are common: a has 6, c 3",
        "responses of a have at most 8 tokens and those of c 16 (data.max_response_length)",
    ]


def test_only_equal_ways_are_compared(tmp_path: Path) -> None:
    both = [line(row, values) for row in range(3) for values in ([1], [1, 0, 0, 1])]
    one = [line(row, [0]) for row in range(3)]
    found = compare_evaluations([evaluated(tmp_path / "a", both), evaluated(tmp_path / "b", one)])
    assert [change.way.n for change in found.changes] == [1]
    assert list(found.notes) == ["(n=4, temperature=1) of a is not compared: b was not sampled in this way"]


def test_rewards_that_are_not_right_or_wrong_have_no_pass_at_k(tmp_path: Path) -> None:
    lines = [line(row, [0.5, 1.0], acc=None) for row in range(3)]
    (level,) = compare_evaluations([evaluated(tmp_path / "a", lines)]).levels
    assert list(level.estimates) == ["reward"]


def changed(**of_row_1: Any) -> Callable[[list[Line]], list[Line]]:
    return lambda lines: [{**one, **of_row_1} if one["row"] == 1 else one for one in lines]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(digest="else"), "row 1 of math.parquet has another prompt, answer or data source in b than in a; "),
        (
            lambda lines: [{**one, "file": "other", "digest": f"other {one['row']}"} for one in lines],
            "a (3 problems) and b (3) have no problem in common; evaluate both on the same data.val_files",
        ),
        (
            lambda lines: [{**one, "way": {**GREEDY, "temperature": 0.5, "top_p": 0.9}} for one in lines],
            "a was sampled with (n=1, temperature=0) and b with (n=1, temperature=0.5, top_p=0.9); evaluate one",
        ),
        (
            lambda lines: [{**one, "acc": None} for one in lines],
            "math is scored by acc in a and by reward in b; expected the same",
        ),
        (lambda lines: [*lines, lines[0]], "line 4: row 0 of math.parquet is there twice"),
        (changed(acc=[1, 0]), "line 2: not the results of a problem (expected 1 samples with finite values)"),
        (changed(acc=[math.nan]), "line 2: not the results of a problem"),
        (changed(way=None), "line 2: not the results of a problem"),
        (changed(row="one"), "line 2: not the results of a problem"),
        (lambda lines: [], "evaluation.jsonl holds no problem"),
    ],
)
def test_what_cannot_be_compared(change: Callable[[list[Line]], list[Line]], message: str, tmp_path: Path) -> None:
    lines = [line(row, [1]) for row in range(3)]
    paths = [evaluated(tmp_path / "a", lines), evaluated(tmp_path / "b", change(lines))]
    with pytest.raises(InputError) as caught:
        compare_evaluations(paths)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_path_without_an_evaluation(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(InputError) as caught:
            compare_evaluations([path])
        return str(caught.value)

    run = tmp_path / "sft"
    assert refused(run).startswith(f"{run}: no such run or file; expected the folder of a run that `hpcrl evaluate`")
    run.mkdir()
    assert refused(run).startswith(f"{run} has no evaluation.json; expected")
    (run / "config.yaml").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 1, "val/loss": 1.5, "val/perplexity": 4.5}\n')
    command = f"make it with: hpcrl evaluate {run}/config.yaml model.init_from={run}"
    losses = "val/loss and val/perplexity depend on the tokenizer and are not compared, scores are"
    assert refused(run) == f"{run} has no evaluation.json; {losses}; {command}"
    assert refused(run / "config.yaml").endswith("a template is evaluated without --compare")
    (run / "evaluation.json").write_text('{"metrics": {}}')  # of a version without results of each problem
    assert refused(run).endswith(
        f"evaluation.json has no evaluation.jsonl with the results of each problem beside it; {command}"
    )
    (run / "evaluation.jsonl").write_text(json.dumps(line(0, [1])) + "\n")
    assert "is not of the same evaluation as evaluation.json" in refused(run)
    (run / "evaluation.json").write_text("[" * 9)
    assert "evaluation.json: not readable" in refused(run)
    (run / "evaluation.json").unlink()
    (run / "evaluation.json").symlink_to("/etc/hostname")
    assert "a link that leads out of" in refused(run)


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`hpcrl evaluate` in this process; gives its exit code."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    def command(*arguments: Any) -> int:
        with pytest.raises(SystemExit) as caught:
            cli.main(["evaluate", *map(str, arguments)])
        return int(caught.value.code or 0)

    monkeypatch.setattr("os._exit", leave)
    return command


def test_the_command(run_command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    names = ("runs/base", "runs/new", "more/new")
    runs = [
        evaluated(
            tmp_path / name,
            [
                line(row, rng.integers(2, size=n).tolist(), source=s)
                for n in (1, 4)
                for s in ("a$b", "x\u202e")
                for row in range(9)
            ],
        )
        for name in names
    ]
    copy = tmp_path / "copy.json"  # an evaluation that was kept under another name
    for suffix in (".json", ".jsonl"):
        copy.with_suffix(suffix).write_bytes((runs[1] / "evaluation.json").with_suffix(suffix).read_bytes())
    picture = tmp_path / "compared.svg"
    assert run_command(runs[0], copy, "--compare", "--plot", picture) == 0
    text = capsys.readouterr().out
    assert "difference to base" in text and "x<U+202E>" in text and "\u202e" not in text and "pass@4" in text
    assert b"<svg" in picture.read_bytes() and picture.stat().st_mode & 0o077 == 0

    assert run_command(*runs, "--compare", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["evaluations"]] == ["base", str(runs[1]), str(runs[2])]
    assert len(found["levels"]) == 2 * 3 * 3 and len(found["differences"]) == 2 * 3 * 2
    row = found["differences"][0]["metrics"]["acc"]
    assert row["wins"] + row["losses"] + row["ties"] == row["num_problems"] == 9
    assert row["interval"][0] < row["mean"] < row["interval"][1]
    assert plot_comparison(compare_evaluations(runs)).axes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--json"], "evaluate: found --json, which needs --compare"),
        (["run"], "run is a run that has an evaluation; to see it, add --compare; evaluate again"),
        (["run", "none", "--compare"], "none: no such run or file"),
        (["run", "--compare", "--plot", "none/a.png"], "--plot none/a.png: cannot write the picture"),
    ],
)
def test_wrong_commands(
    arguments: list[str],
    message: str,
    run_command: Callable[..., int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    evaluated(tmp_path / "run", [line(0, [1])])
    assert run_command(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"hpcrl: error: {message}") and err.count("\n") == 1

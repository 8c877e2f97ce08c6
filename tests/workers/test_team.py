"""What is checked before models are built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.config.schema import Config
from hpcrl.workers import team


@pytest.mark.parametrize("local_rank", [0, 1])
def test_rewards_are_checked_once_per_node(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of the node take part in reporting what its first one finds."""
    checked: list[list[str]] = []
    entered: list[Any] = []
    monkeypatch.setattr(team, "check_rewards", lambda _, sources: checked.append(list(sources)))
    world = SimpleNamespace(local_rank=local_rank, run_collectively=lambda fn: entered.append(fn()))
    dataset = SimpleNamespace(source_of_rows=lambda: ["apps"], ground_truths=list)
    prompts: Any = {"train": dataset, "val": dataset}
    team._check_scorers(team.Inputs(cast(Any, None), prompts=prompts), Config(), cast(Any, world))
    assert checked == ([["apps", "apps"]] if local_rank == 0 else [])
    assert len(entered) == 1

"""What is checked before models are built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.config.schema import Config
from hpcrl.runtime.exits import InputError
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


def test_the_error_for_data_without_a_rule_says_how_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `hpcrl sft` reads a file of another tool, which has no data_source."""
    dataset = SimpleNamespace(source_of_rows=lambda: [""], ground_truths=list)
    monkeypatch.setattr(team, "PromptDataset", lambda *_, **__: dataset)
    world = SimpleNamespace(local_rank=0, run_collectively=lambda fn: fn())
    config = Config.model_validate({"data": {"val_files": ["val.json"]}})
    with pytest.raises(InputError) as raised:
        inputs = team.Inputs(cast(Any, None), cast(Any, None))
        team.add_validation_prompts(inputs, config, cast(Any, world), "sft.eval_score=false")
    (line,) = raised.value.lines
    assert line.startswith("data_source '' has no built-in reward rule") and line.endswith(
        "; or set sft.eval_score=false"
    )

"""The calculator example: answers of the warm start are what conversations with the tool look like."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.data.tokenizer import load_tokenizer
from hpcrl.jobs.sft import Sft
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.protocol import Request, SamplingParams
from hpcrl.runtime.user_code import import_file
from tests.rollout.environments.scripted import ScriptedEngine

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("template", ["sft_tool_countdown_cpu", "tool_countdown_cpu"])
def test_warm_start_writes_conversations_as_they_are(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.chdir(REPOSITORY)
    config = Sft.read_config(f"configs/{template}.yaml")
    tokenizer: Any = load_tokenizer(str(config.model.tokenizer))
    prepare = import_file("tools/prepare_countdown.py")
    rng = random.Random(5)
    drawn = list(prepare.draws(12, rng))
    answers = [prepare.with_calculator(problem, expression, rng) for problem, expression in drawn]
    assert {answer.count("<tool_call>") for answer in answers} >= {1, 2}
    turns = {str(i): re.split("<tool_response>.*?</tool_response>", answer) for i, answer in enumerate(answers)}

    def says(request: Request) -> np.ndarray:
        turn = turns[request.uid].pop(0).removesuffix("<|eos|>") + "<|eos|>"
        return np.array(tokenizer(turn, add_special_tokens=False)["input_ids"], np.int32)

    loop = AgentLoop(config.rollout.multi_turn, config.data, tokenizer)
    sampling = SamplingParams(config.data.max_response_length, eos_token_ids=(tokenizer.eos_token_id,))
    requests = [Request([1], uid) for uid in turns]
    found, _ = loop.run(ScriptedEngine(says), requests, None, sampling, seed=0, step=0)
    loop.close()
    score = import_file(str(config.reward.custom_reward_function.path)).compute_score
    for one, answer, (problem, _) in zip(found, answers, drawn, strict=True):
        assert tokenizer.decode(one.token_ids) == answer + "<|eos|>"
        truth = {"numbers": list(problem[0]), "target": problem[1]}
        assert score("countdown", answer, truth, {"finish_reason": one.finish_reason})["acc"] == 1
        assert score("countdown", answer, truth | {"target": 40}, {})["score"] == 0.1


def test_shipped_tokenizer_is_what_its_tool_makes(tmp_path: Path) -> None:
    import_file(REPOSITORY / "tools" / "make_char_tokenizer.py").main(["--out", str(tmp_path), "--tools"])
    for file in tmp_path.iterdir():
        assert file.read_text() == (REPOSITORY / "configs" / "tool_tokenizer" / file.name).read_text()

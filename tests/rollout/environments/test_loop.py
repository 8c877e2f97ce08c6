"""Conversations with tools and users: what the model drew stays, what others say is masked, and all of them end.

The model is scripted; tools and users run in their real processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcrl.algorithms.metrics import finish
from hpcrl.algorithms.parameters import UnknownName
from hpcrl.config.schema import DataConfig, MultiTurnConfig
from hpcrl.data.conversations import Conversations
from hpcrl.data.tokenizer import end_token_ids
from hpcrl.rollout.environments.loop import AgentLoop
from hpcrl.rollout.environments.turn_handler import turn_metrics
from hpcrl.rollout.protocol import Request, SamplingParams, Trajectory
from hpcrl.runtime.exits import InputError
from tests.chat_families import FAMILIES
from tests.rollout.environments.scripted import ScriptedEngine

TOOLS = """
import os, sys, time
from hpcrl.rollout.environments.tools import ToolCall, register_tool_parser
from hpcrl.rollout.environments.tools import tool

@tool
def add(a: int, b: int = 1) -> dict:
    "Adds."
    return {"text": str(a + b), "metrics": {"sum": a + b}}

@tool
def say(text: str) -> str:
    "Says it."
    print("said", text)
    return text

@tool
def fail(how: str) -> str:
    "Fails."
    if how == "raise":
        raise KeyError("no such thing")
    if how == "exit":
        os._exit(1)
    if how == "sys.exit":
        sys.exit(1)
    while how == "hang":
        pass
    return "x" * 100_000_000

@tool
def wait_for(file: str) -> str:
    "Waits for a file."
    while not os.path.exists(file):
        time.sleep(0.001)
    return "there"

@tool
def color(extra_info: dict) -> str:
    "Knows the row."
    return extra_info["color"]

@register_tool_parser("shout")
def shout(text):
    if text == "end":
        return None
    if text == "?!":
        raise ValueError("what?")
    return [ToolCall("say", {"text": text[:-1]})] if text.endswith("!") else []
"""

USER = """
class Interaction:
    def start(self, record):
        return {"left": record["extra_info"]["questions"], "heard": 0}

    def respond(self, state, messages):
        text = messages[-1]["content"]
        if text == "crash":
            raise RuntimeError("lost")
        state["left"] -= 1
        state["heard"] += len(messages)
        return state["left"] < 0, f"no {state['heard']}", 0.5 * state["left"] if text != "x" else None
"""

Run = Callable[..., tuple[list[Trajectory], dict[str, float], ScriptedEngine]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    (folder / "tools.py").write_text(TOOLS)
    (folder / "user.py").write_text(USER)
    return folder


@pytest.fixture(scope="module")
def make(files: Path, tokenizer: Any) -> Iterator[Callable[..., AgentLoop]]:
    """AgentLoops by their options; processes are shared by equal ones."""
    made: dict[str, AgentLoop] = {}

    def loop(**options: Any) -> AgentLoop:
        key = repr(sorted(options.items()))
        if key not in made:
            cfg = MultiTurnConfig(enable=True, function_tool_path=str(files / "tools.py"), tool_timeout=20.0)
            made[key] = AgentLoop(cfg.model_copy(update=options), DataConfig(), tokenizer, log_path=str(files / "log"))
        return made[key]

    yield loop
    for one in made.values():
        one.close()


@pytest.fixture
def run(make: Callable[..., AgentLoop], tokenizer: Any) -> Run:
    def go(
        conversations: Sequence[Sequence[str]],
        limit: int = 400,
        records: list[dict[str, Any]] | None = None,
        on_finished: Callable[[int, Trajectory], None] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> tuple[list[Trajectory], dict[str, float], ScriptedEngine]:
        """Conversation i is what the model says in its turns; it ends each by its end-of-sequence token."""
        turns: dict[str, int] = {}

        def says(request: Request) -> np.ndarray:
            turn = turns[request.uid] = turns.get(request.uid, -1) + 1
            return encoded(tokenizer, conversations[int(request.uid)][turn])

        engine = ScriptedEngine(says, seed)
        requests = [Request([1, 5], str(number)) for number in range(len(conversations))]
        sampling = SamplingParams(limit, eos_token_ids=(tokenizer.eos_token_id,))
        found: list[int] = []

        def note(number: int, done: Trajectory) -> None:
            found.append(number)
            if on_finished is not None:
                on_finished(number, done)

        loop = make(**options)
        trajectories, metrics = loop.run(engine, requests, records, sampling, seed=0, step=0, on_finished=note)
        assert sorted(found) == list(range(len(conversations)))
        check_tokens(trajectories, engine, limit)
        return trajectories, finish(metrics), engine

    return go


def encoded(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer(text + "<|eos|>", add_special_tokens=False)["input_ids"], np.int32)


def check_tokens(trajectories: list[Trajectory], engine: ScriptedEngine, limit: int) -> None:
    """What the engine drew is there as it was, behind the prefix that it was told, and nothing else counts."""
    for number, found in enumerate(trajectories):
        mine = [index for index, request in enumerate(engine.requests) if request.uid == str(number)]
        assert found.num_turns == len(mine) and len(found.token_ids) <= limit
        written = found.mask == 1
        assert found.token_ids[written].tolist() == [t for i in mine for t in engine.drawn[i].token_ids.tolist()]
        assert found.log_probs[written].tolist() == [p for i in mine for p in engine.drawn[i].log_probs.tolist()]
        assert not found.log_probs[~written].any() and found.mask[-1] == 1
        end = 0
        for index in mine:
            prefix, drawn = engine.requests[index].prefix_ids, engine.drawn[index].token_ids
            assert prefix.tolist() == found.token_ids[: len(prefix)].tolist() and len(prefix) >= end
            assert not found.mask[end : len(prefix)].any()
            end = len(prefix) + len(drawn)
            assert found.mask[len(prefix) : end].all()
        assert end == len(found.token_ids)
        for array, kind in ((found.token_ids, np.int32), (found.log_probs, np.float32), (found.mask, np.int32)):
            assert array.dtype == kind and len(array) == len(found.token_ids)


def call(name: str, **arguments: Any) -> str:
    words = ", ".join(f'"{key}": ' + (f'"{v}"' if isinstance(v, str) else str(v)) for key, v in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{words}}}}}</tool_call>'


def answers(tokenizer: Any, found: Trajectory) -> list[str]:
    """What tools said."""
    text = tokenizer.decode(found.token_ids[found.mask == 0])
    return re.findall("<tool_response>(.*?)</tool_response>", text)


def test_a_call_is_answered_and_the_model_goes_on(run: Run, tokenizer: Any) -> None:
    (found, plain), metrics, _ = run([[f"I ask {call('add', a=2, b=3)}", "it is 5"], ["no tool"]])
    assert tokenizer.decode(found.token_ids) == (
        f"I ask {call('add', a=2, b=3)}<|eos|><tool_response>5</tool_response>it is 5<|eos|>"
    )
    assert (found.finish_reason, found.num_turns, found.num_tool_calls) == ("stop", 2, 1)
    assert (plain.finish_reason, plain.num_turns, plain.num_tool_calls) == ("stop", 1, 0)
    assert (found.rewards, found.states, found.prompt_ids) == (None, None, None)  # which the journal would keep
    assert metrics["tools/calls"] == 1 and metrics["tools/sum/mean"] == 5
    turns = finish(turn_metrics([found, plain]))
    assert turns["training/num_turns/mean"] == 1.5 and turns["training/num_turns/max"] == 2
    assert turns["tool_call_counts/mean"] == 0.5


def test_a_call_whose_answer_has_no_room_is_cut_off_by_length(run: Run, tokenizer: Any) -> None:
    asks = call("say", text="<" * 18)
    size = len(tokenizer.encode(asks, add_special_tokens=False)) + 1  # the end token is the last that has room
    (calling,), *_ = run([[asks, "end"]], size)
    (plain,), *_ = run([["x" * (size - 1), "end"]], size)
    assert (calling.finish_reason, plain.finish_reason) == ("length", "stop")
    assert len(calling.token_ids) == len(plain.token_ids) == size


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_conversation_keeps_its_tokens_and_its_limit(run: Run, tokenizer: Any, data: st.DataObject) -> None:
    turn = st.one_of(
        st.builds(lambda a, b: f"s{call('add', a=a, b=b)}", st.integers(-999, 999), st.integers(0, 99)),
        st.builds(lambda text: call("say", text=text), st.text("abc<|>eos", max_size=40)),
        st.builds(lambda text: f"<tool_call>{text}", st.text('{}"name:</tool_call>', max_size=20)),
    )
    conversations = data.draw(st.lists(st.lists(turn, max_size=4), min_size=1, max_size=4))
    limit = data.draw(st.integers(1, 120))
    found, metrics, engine = run([[*turns, "end"] for turns in conversations], limit, seed=data.draw(st.integers(0, 9)))
    for one, turns in zip(found, conversations, strict=True):
        assert one.finish_reason == ("stop" if one.num_turns == len(turns) + 1 and ends(tokenizer, one) else "length")
    assert metrics["tools/calls"] == sum(one.num_tool_calls for one in found)
    assert metrics["tools/timeouts"] == metrics["tools/crashes"] == metrics["tools/errors"] == 0


def ends(tokenizer: Any, found: Trajectory) -> bool:
    return found.token_ids[-1] == tokenizer.eos_token_id


def test_failures_are_answered_and_cost_nobody_else_anything(run: Run, tokenizer: Any) -> None:
    failing = {
        call("fail", how="raise"): "error: KeyError: 'no such thing'",
        call("fail", how="sys.exit"): "error: SystemExit: 1",
        call("fail", how="exit"): "error: the process died",
        call("fail", how="hang"): "error: longer than 3 s",
        call("fail", how="long"): "x" * 40,
        call("nothing", a=1): "error: no tool 'nothing'; tools: add, say",
        call("add", a="1"): "error: add: a: Input should be a valid integer",
        "<tool_call>{</tool_call>": "error: not JSON: Expecting property name enc",
        "<tool_call>": "error: <tool_call> without </tool_call>",
    }
    well = [call("add", a=1, b=1)]
    conversations = [turns for bad in failing for turns in ([bad, "sorry"], [*well, "good"])]
    found, metrics, _ = run(
        conversations,
        tool_timeout=3.0,  # making 100 MB takes more than a second where cores are shared
        max_tool_response_length=47,
        tool_response_truncate_side="left",
        num_tool_workers=2,
    )
    for expected, bad, good in zip(failing.values(), found[::2], found[1::2], strict=True):
        (said,) = answers(tokenizer, bad)
        assert said.startswith(expected), said
        assert tokenizer.decode(bad.token_ids).endswith("sorry<|eos|>")
        assert answers(tokenizer, good) == ["2"]
    failures = {name: metrics[f"tools/{name}"] for name in ("calls", "errors", "crashes", "timeouts", "rejected")}
    assert failures == {"calls": 18, "errors": 2, "crashes": 1, "timeouts": 1, "rejected": 4}


def test_decoding_goes_on_while_a_tool_runs(run: Run, tokenizer: Any, tmp_path: Path) -> None:
    """The tool waits for what happens when the other conversation has ended."""
    file = tmp_path / "done"

    def note(number: int, _: Trajectory) -> None:
        if number == 1:
            file.touch()

    found, _, _ = run([[call("wait_for", file=str(file)), "a"], ["b" * 50]], on_finished=note)
    assert answers(tokenizer, found[0]) == ["there"]


def test_limits_of_turns_calls_and_answers(run: Run, tokenizer: Any) -> None:
    again = [call("add", a=number) for number in range(9)]
    assert run([again], max_assistant_turns=3)[0][0].num_turns == 3
    assert run([again], max_user_turns=3)[0][0].num_turns == 4
    for limit in (1, 2, 5):
        (found,), _, _ = run([["".join(again[:3]), "end"]], max_parallel_calls=limit)
        assert answers(tokenizer, found) == ["1", "2", "3"][:limit] and found.num_tool_calls == min(limit, 3)


@pytest.mark.parametrize(("side", "kept"), [("left", "abcde"), ("right", "cdefg"), ("middle", "abefg")])
def test_long_answers_are_cut(run: Run, tokenizer: Any, side: str, kept: str) -> None:
    options = {"max_tool_response_length": 5, "tool_response_truncate_side": side}
    (found,), _, _ = run([[call("say", text="abcdefg"), "end"]], **options)
    assert answers(tokenizer, found) == [kept]


def test_an_answer_without_room_for_a_reply_is_left_out(run: Run, tokenizer: Any) -> None:
    turn = call("say", text="abc")
    so_far, answer = len(encoded(tokenizer, turn)), len("abc") + 2
    (found,), _, _ = run([[turn, "end"]], limit=so_far + answer)
    assert found.finish_reason == "length" and len(found.token_ids) == so_far and found.num_tool_calls == 1
    (found,), _, _ = run([[turn, "end"]], limit=so_far + answer + 1)
    assert found.finish_reason == "length" and len(found.token_ids) == so_far + answer + 1 and found.num_turns == 2


def test_tools_know_the_row_and_files_may_bring_a_parser(run: Run, tokenizer: Any) -> None:
    (found,), _, _ = run([[call("color"), "end"]], records=[{"extra_info": {"color": "red"}}])
    assert answers(tokenizer, found) == ["red"]
    (found, lost), _, _ = run([["hi!", "end"], ["?!", "end"]], format="shout")
    assert answers(tokenizer, found) == ["hi"] and answers(tokenizer, lost) == ["error: ValueError: what?"]


def test_a_user_goes_on_until_satisfied(run: Run, files: Path, tokenizer: Any) -> None:
    records = [{"extra_info": {"questions": count}} for count in (2, 0, 9, 9)]
    found, metrics, _ = run(
        [["a", "x", call("add", a=1), "b"], ["c"], ["crash"], ["d", "crash"]],
        records=records,
        interaction_path=str(files / "user.py"),
        num_tool_workers=2,
    )
    assert tokenizer.decode(found[0].token_ids) == (
        f"a<|eos|>no 1x<|eos|>no 4{call('add', a=1)}<|eos|><tool_response>2</tool_response>b<|eos|>"
    )
    assert found[0].turn_scores == (0.5, -0.5) and found[0].num_tool_calls == 1 and found[0].finish_reason == "stop"
    assert found[1].turn_scores == (-0.5,) and found[1].num_turns == 1
    assert (found[2].num_turns, found[3].num_turns, metrics["tools/user_failures"]) == (1, 2, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_of_model_families_are_those_of_sft(files: Path, tmp_path: Path, name: str) -> None:
    """Tokens in are tokens out: over three turns, the response is what SFT trains on, bit for bit, with its mask."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": family.conversation()}) + "\n")
    data = DataConfig(max_prompt_length=999, max_response_length=999)
    prompt, response, mask = Conversations(str(tmp_path / "rows.jsonl"), tokenizer, data, "messages", "all").sequence(0)
    turns = iter(np.split(response, np.flatnonzero(np.diff(mask)) + 1)[::2])
    cfg = MultiTurnConfig(enable=True, function_tool_path=str(files / "tools.py"), format=family.format)
    loop = AgentLoop(cfg, data, tokenizer)
    try:
        engine = ScriptedEngine(lambda request: next(turns))
        sampling = SamplingParams(999, eos_token_ids=end_token_ids(tokenizer))
        (found,), metrics = loop.run(engine, [Request(prompt.tolist(), "0")], None, sampling, seed=0, step=0)
    finally:
        loop.close()
    last = len(mask) - int(mask[::-1].argmax())  # a template may write a line break behind it
    assert tokenizer.decode(found.token_ids) == tokenizer.decode(response[:last])
    assert found.token_ids.tolist() == response[:last].tolist() and found.mask.tolist() == mask[:last].tolist()
    assert (found.num_turns, found.num_tool_calls, finish(metrics)["tools/rejected"]) == (3, 2, 0)
    check_tokens([found], engine, 999)


def test_nobody_is_asked_for_nothing(make: Callable[..., AgentLoop]) -> None:
    engine = ScriptedEngine(lambda request: np.zeros(1, np.int32))
    trajectories, metrics = make().run(engine, [], None, SamplingParams(5), seed=0, step=0)
    assert trajectories == [] and finish(metrics)["tools/calls"] == 0
    assert turn_metrics(trajectories) == {}


def test_files_of_no_use_end_the_job_before_it_starts(make: Callable[..., AgentLoop], tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("class Interaction:\n    def start(self, record): return {}\n")
    with pytest.raises(InputError, match="no method respond"):
        make(interaction_path=str(tmp_path / "user.py"))
    with pytest.raises(InputError, match="function_tool_path=.*no such file"):
        make(function_tool_path=str(tmp_path / "nothing.py"))
    with pytest.raises(UnknownName, match="unknown rollout.multi_turn.format 'nothing'"):
        make(format="nothing")

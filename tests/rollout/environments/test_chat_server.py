"""The endpoint of a program: what a client without the token, or with nonsense, gets; requests that are repeated."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from hpcrl.rollout.environments import chat_server
from hpcrl.rollout.environments.chat_completions import BadRequest, ChatRequest, answer_of, is_same
from hpcrl.rollout.environments.chat_server import ChatServer, PendingRequest
from hpcrl.rollout.environments.environment import Turn
from hpcrl.rollout.environments.tools import BadCall, ToolCall

CHAT = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


class Endpoint(NamedTuple):
    server: ChatServer
    asked: SimpleQueue[PendingRequest]
    port: int

    def open(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def send(self, text: bytes) -> bytes:
        """What comes back until the server closes the connection."""
        with self.open() as connection:
            connection.sendall(text)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def post(self, body: Any, token: str | None = None, target: str = "/v1/chat/completions") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {"Authorization": f"Bearer {self.server.api_key if token is None else token}"}
        connection.request("POST", target, body if isinstance(body, bytes) else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(chat_server, "HEAD_SECONDS", 0.5)
    asked: SimpleQueue[PendingRequest] = SimpleQueue()
    server = ChatServer(asked.put)
    yield Endpoint(server, asked, int(server.base_url.split(":")[2].split("/")[0]))
    server.end()


def test_without_the_token(endpoint: Endpoint) -> None:
    other = ChatServer(endpoint.asked.put)
    for token in ("", "x", other.api_key, endpoint.server.api_key[:-1], "é"):
        status, body = endpoint.post(CHAT, token)
        assert status == 401 and list(body) == ["error"]
    assert b" 401 " in endpoint.send(b"GET /v1/models HTTP/1.1\r\n\r\n")
    assert endpoint.asked.empty()


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02" * 100 + b"\r\n\r\n",
        b"GET / HTTP/1.1 and more\r\n\r\n",
        b"\r\n\r\n",
        b"POST " + b"/" * 2**16,
        b"GET /v1/models HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-",
    ],
)
def test_nonsense_ends_its_connection(endpoint: Endpoint, text: bytes) -> None:
    assert endpoint.send(text) == b""
    assert endpoint.asked.empty() and endpoint.post({}, "x")[0] == 401


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "not JSON"),
        (b"[" * 10**5, "not JSON"),
        ([], "expected a JSON object with a list of messages"),
        ({"messages": []}, "expected a JSON object with a list of messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]: expected an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
        (CHAT | {"n": 2}, "n is 2"),
        (CHAT | {"tools": [{"type": "custom"}]}, "tools: expected a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "JSON"),
    ],
)
def test_bad_requests(endpoint: Endpoint, body: Any, why: str) -> None:
    status, found = endpoint.post(body)
    assert status == 400 and why in found["error"]["message"] and endpoint.asked.empty()


def test_bodies_are_bounded(endpoint: Endpoint) -> None:
    for length, code in ((b"-1", b" 411 "), (b"9" * 5000, b" 413 "), (b"%d" % (2**23 + 1), b" 413 ")):
        head = b"POST /v1/models HTTP/1.1\r\nAuthorization: Bearer %s\r\n" % endpoint.server.api_key.encode()
        assert code in endpoint.send(head + b"Content-Length: %s\r\n\r\n" % length)
    assert endpoint.post(CHAT, target="/v1/completions")[0] == 404


def test_slow_unauthenticated_do_not_keep_a_program_out(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "HEAD_SECONDS", 60.0)
    held = [endpoint.open() for _ in range(100)]
    for connection in held:
        connection.send(b"POST ")
    with ThreadPoolExecutor() as pool:
        found = pool.submit(endpoint.post, CHAT)
        asked = endpoint.asked.get(timeout=20)
        asked.answer({"choices": []})
        assert found.result() == (200, {"choices": []})
    for connection in held:
        connection.close()


def test_a_client_that_gave_up_gets_its_answer(endpoint: Endpoint) -> None:
    """It repeats its request after a timeout; the model draws once. An equal request of its own is another turn."""
    body = json.dumps(CHAT).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {endpoint.server.api_key}\r\n"
    with endpoint.open() as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        asked = endpoint.asked.get(timeout=20)
    with ThreadPoolExecutor() as pool:
        while not asked.reader.at_eof():
            time.sleep(0.01)
        again, same = pool.submit(endpoint.post, CHAT), pool.submit(endpoint.post, CHAT)
        other = endpoint.asked.get(timeout=20)
        asked.answer({"turn": 1})
        other.answer({"turn": 2})
        assert {again.result()[1]["turn"], same.result()[1]["turn"]} == {1, 2} and endpoint.asked.empty()
        once_more = pool.submit(endpoint.post, CHAT)
        endpoint.asked.get(timeout=20).answer({"turn": 3})
        assert once_more.result()[1] == {"turn": 3}
        waiting = pool.submit(endpoint.post, CHAT)
        endpoint.asked.get(timeout=20)
        endpoint.server.end()
        assert waiting.result()[1]["error"]["code"] == endpoint.post(CHAT)[1]["error"]["code"] == "trajectory_ended"


def test_messages_of_a_request() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    found = ChatRequest.of(json.dumps(CHAT | {"messages": messages, "temperature": 0.5, "n": 1}).encode())
    assert [one["role"] for one in found.messages] == ["system", "user", "assistant", "tool"]
    assert found.messages[1]["content"] == "a\nb" and found.messages[3]["name"] == "add"
    assert found.messages[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert found.ignored == ["temperature"]
    with pytest.raises(BadRequest):
        ChatRequest.of(os.urandom(64))


def test_calls_of_a_turn() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    call = ToolCall("f", {"a": "1", "b": "2", "c": "3"}, is_text=True)
    found = answer_of(Turn("so <tool_call>...", [call, BadCall("not JSON")]), tools, 7)
    assert found["content"] == "so" and [it["id"] for it in found["tool_calls"]] == ["call00007"]
    assert found["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": "2", "c": "3"}
    assert answer_of(Turn("<tool_call>x", [BadCall("not JSON")]), tools, 0)["content"] == "<tool_call>x"


def test_what_continues_a_conversation() -> None:
    """Programs strip texts and number calls anew; what they change otherwise is another conversation."""
    answer = answer_of(Turn(" so\n<tool_call>...", [ToolCall("f", {"a": 1, "b": 2})]), [], 0)

    def sent(content: str, name: str = "f", arguments: str = '{"b": 2, "a": 1}') -> Any:
        call = {"id": "mine", "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        return ChatRequest.of(json.dumps({"messages": [message]}).encode()).messages[0]

    assert is_same(sent("so"), answer) and is_same(sent(" so "), answer)
    for other in (sent("s"), sent("so", "g"), sent("so", "f", "{}"), {"role": "assistant", "content": "so"}):
        assert not is_same(other, answer)

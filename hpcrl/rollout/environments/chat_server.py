"""An HTTP server for the program of one trajectory, on loopback or a Unix socket: OpenAI's chat completions.

Other users of the node can connect to the port. Without the token they get an error, and they can hold few connections
for a short time.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from typing import Any

from hpcrl.rollout.environments.chat_completions import BadRequest, ChatRequest, body_of, error_body

MAX_HEAD = 2**15  # bytes of a request's line and headers
MAX_BODY = 2**23  # bytes
HEAD_SECONDS = 10.0  # for the first head on a connection
BODY_SECONDS = 60.0  # for a body to arrive, and for a response to be read
MAX_UNAUTHENTICATED = 32  # connections that have not sent the token; the oldest is closed
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "hpcrl"}]}

Response = tuple[int, str, bytes]  # status, media type, body


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for its completion. Methods may be called by any thread, once."""

    request: ChatRequest
    reader: asyncio.StreamReader  # of its client
    response: asyncio.Future[Response]

    def answer(self, completion: dict[str, Any]) -> None:
        self._set((HTTPStatus.OK, *body_of(completion, self.request)))

    def reject(self, message: str, code: str) -> None:
        """Answer with an error, after which clients do not try again."""
        self._set(_error(HTTPStatus.BAD_REQUEST, message, code))

    def _set(self, response: Response) -> None:
        def put() -> None:
            if not self.response.done():
                self.response.set_result(response)

        self.response.get_loop().call_soon_threadsafe(put)


class ChatServer:
    """Serves OpenAI's chat completions to a client of this job.

    `api_key` is the token that requests need, of this server only. A request that its client repeats after it has
    closed the connection, after its own timeout, gets the completion of the first.

    Args:
        on_request: called in the server's thread with each request.
        path: path of a Unix socket; None: a free port of loopback.
    """

    def __init__(self, on_request: Callable[[PendingRequest], None], path: str | None = None) -> None:
        self.api_key = secrets.token_urlsafe(32)
        if path is None:
            self._socket = socket.create_server(("127.0.0.1", 0), backlog=MAX_UNAUTHENTICATED)
            self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(path)
            self._socket.listen()
            self.base_url = "http://localhost/v1"
        self._on_request = on_request
        self._pending: list[PendingRequest] = []  # without a response that has reached its client
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Answer each request that waits, and each later one, with an error. Returns at once."""

        def end() -> None:
            self._ended.set()
            for pending in self._pending:
                pending.reject("the trajectory has ended", "trajectory_ended")

        self._loop.call_soon_threadsafe(end)

    async def _serve(self) -> None:
        start: Any = asyncio.start_server if self._socket.family == socket.AF_INET else asyncio.start_unix_server
        async with await start(self._connected, sock=self._socket, limit=MAX_HEAD) as server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._unauthenticated[writer] = None
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.TimeoutError):
            pass  # the client has gone, or is too slow
        except (EOFError, ValueError, asyncio.LimitOverrunError, http.client.HTTPException):
            pass  # it sends no HTTP
        finally:
            self._unauthenticated.pop(writer, None)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request. Return whether the connection stays open."""
        limit = HEAD_SECONDS if writer in self._unauthenticated else None
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), limit)
        line, _, fields = head.partition(b"\r\n")
        method, target, version = line.decode("ascii").split(" ")
        headers = http.client.parse_headers(io.BytesIO(fields))
        response = self._problem(headers)
        stays = response is None and version == "HTTP/1.1" and headers.get("Connection", "").lower() != "close"
        if response is None:
            self._unauthenticated.pop(writer, None)
            body = await asyncio.wait_for(reader.readexactly(int(headers.get("Content-Length", "0"))), BODY_SECONDS)
            response = await self._respond(f"{method} {target.partition('?')[0]}", body, reader)
        status, kind, content = response
        lines = [f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}", f"Content-Type: {kind}"]
        lines += [f"Content-Length: {len(content)}", f"Connection: {'keep-alive' if stays else 'close'}", "\r\n"]
        writer.write("\r\n".join(lines).encode() + content)
        await asyncio.wait_for(writer.drain(), BODY_SECONDS)
        return stays

    def _problem(self, headers: Message) -> Response | None:
        """Why a request is rejected before its body is read."""
        given, length = headers.get("Authorization", ""), headers.get("Content-Length", "0")
        if not secrets.compare_digest(given.encode(errors="replace"), f"Bearer {self.api_key}".encode()):
            return _error(HTTPStatus.UNAUTHORIZED, "expected the api_key of the trajectory")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in headers:
            return _error(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        if len(length) > 9 or int(length) > MAX_BODY:
            why = f"the body has {length[:20]} bytes; expected at most {MAX_BODY}"
            return _error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        return None

    async def _respond(self, called: str, body: bytes, reader: asyncio.StreamReader) -> Response:
        if called == "GET /v1/models":
            return HTTPStatus.OK, "application/json", json.dumps(MODELS).encode()
        if called != "POST /v1/chat/completions":
            return _error(HTTPStatus.NOT_FOUND, "expected POST /v1/chat/completions or GET /v1/models")
        try:
            pending = self._ask(ChatRequest.of(body), reader)
        except BadRequest as error:
            return _error(HTTPStatus.BAD_REQUEST, str(error), error.code)
        response = await asyncio.shield(pending.response)
        if not pending.reader.at_eof():
            with contextlib.suppress(ValueError):
                self._pending.remove(pending)
        return response

    def _ask(self, request: ChatRequest, reader: asyncio.StreamReader) -> PendingRequest:
        for pending in self._pending:
            if pending.reader.at_eof() and pending.request == request:
                pending.reader = reader
                return pending
        if self._ended.is_set():
            raise BadRequest("the trajectory has ended", "trajectory_ended")
        pending = PendingRequest(request, reader, self._loop.create_future())
        self._pending.append(pending)
        self._on_request(pending)
        return pending


def _error(status: HTTPStatus, message: str, code: str = "invalid_request") -> Response:
    return status, "application/json", error_body(message, code)

"""Many messages under way at once: each outstanding MPI request with what is to be done when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hpcrl.runtime.mpi import wait_for_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

EAGER_TESTS = 20  # what is waited for takes milliseconds, of a core that this rank would otherwise keep


class Events:
    """What is to be done may start further requests, so that each pair of ranks goes at its own pace."""

    def __init__(self) -> None:
        self._requests: list[MPI.Request] = []
        self._actions: list[Callable[[], None] | None] = []

    def add(self, request: MPI.Request, then: Callable[[], None] | None = None) -> None:
        self._requests.append(request)
        self._actions.append(then)

    def run(self, meanwhile: Iterator[None]) -> None:
        """Until no request is left and `meanwhile` is exhausted, which is advanced while there is nothing to react to.

        Waits with back-off. Raises MPI.Exception when an operation failed.
        """
        busy = True
        while self._requests:
            if self._react():
                continue
            if busy:
                busy = next(meanwhile, self) is not self
            else:
                wait_for_ranks(self._react, EAGER_TESTS)
        for _ in meanwhile:
            pass

    def _react(self) -> bool:
        from mpi4py import MPI

        index, done = MPI.Request.Testany(self._requests)
        if not done:
            return False
        del self._requests[index]
        action = self._actions.pop(index)
        if action is not None:
            action()
        return True

"""What a call of the `mpi_host` backend hands back: an operation that can be tested and waited for."""

# torch's stubs declare wait and its like with other return types than torch itself uses.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import Work

from hpcrl.launch.waiting import wait_for_ranks


class MpiWork(Work):
    """An operation under way or done. Holds its tensors, completes once, and raises on the thread that waits."""

    def __init__(
        self,
        tensors: list[Tensor],
        request: MPI.Request | None = None,
        finish: Callable[[MPI.Status], None] | None = None,
    ) -> None:
        """`finish` gets the status of `request` once it has ended, and delivers the result."""
        super().__init__()
        self._tensors = tensors
        self._request = request
        self._finish = finish
        self._source = -1
        self._error: Exception | None = None
        self._future: _MpiFuture | None = None

    def is_completed(self) -> bool:
        if self._request is None:
            return True
        status = MPI.Status()
        try:
            if not self._request.Test(status):
                return False
            self._source = status.Get_source()
            if self._finish is not None:
                self._finish(status)
        except Exception as error:
            self._error = error
        self._request = self._finish = None
        if self._future is not None:
            self._future.fire(self)
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """True when the operation ended well. `timeout` is ignored: hangs are the watchdog's business."""
        if self._request is not None:
            wait_for_ranks(self.is_completed)
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Group rank that a received message came from."""
        self.wait()
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Future of the tensors. Its callbacks run on the thread whose test or wait finds the operation ended."""
        if self._future is None:
            self._future = _MpiFuture(self)
            if self._request is None:
                self._future.fire(self)
        return self._future


class _MpiFuture(torch.futures.Future):
    """A future whose waiter drives MPI itself: no other thread would bring its message forward."""

    def __new__(cls, work: MpiWork) -> _MpiFuture:
        return super().__new__(cls)

    def __init__(self, work: MpiWork) -> None:
        super().__init__()
        self._work = work

    def fire(self, work: MpiWork) -> None:
        if work.exception() is None:
            self.set_result(work._tensors)
        else:
            self.set_exception(work.exception())

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> Any:
        wait_for_ranks(self._work.is_completed)
        return super().wait()

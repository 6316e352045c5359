"""A tensor that is computed on a stream of its own, beside what the current stream does next."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that a device's forked work runs on: always the same, so that its allocations are reused in its order."""
    return torch.cuda.Stream(device)


def wait_behind(later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
    """What is launched on `later` from now on starts after everything launched on `earlier` so far."""
    later.wait_stream(earlier)


class Forked:
    """`compute()` launched on the side stream, behind all that the current stream was given so far.

    `join()` is called on the stream that forked; until then the operands of `compute` must stay as they are. Works in eager
    mode and while a CUDA graph is captured, which refuses to end with a fork that was not joined. Without a GPU `compute`
    simply runs.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], device: torch.device):
        self._side: torch.cuda.Stream | None = None
        if device.type != "cuda":
            self._result = compute()
            return
        self._side = side_stream(device)
        wait_behind(self._side, torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            self._result = compute()

    def join(self) -> torch.Tensor:
        """The result, which what the current stream is given from now on may read."""
        if self._side is not None:
            current = torch.cuda.current_stream(self._result.device)
            wait_behind(current, self._side)
            self._result.record_stream(current)  # its memory is the side stream's, and must outlive the reader here
        return self._result

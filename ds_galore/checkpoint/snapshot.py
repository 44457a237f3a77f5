"""A consistent copy of device state in host memory that is used again, and the thread that writes it.

Imports torch and the standard library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Background", "HostBuffers"]


class HostBuffers:
    """Host memory for copies of tensors, kept for the next copy of tensors of the same sizes."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int, bool], list[Tensor]] = {}
        self.nbytes = 0  #: of all buffers, in use or not

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of tensors, flat; complete when this returns, whatever device the tensors are on."""
        copies, queued = [], False
        try:
            for tensor in tensors:
                source = tensor.detach().reshape(-1)
                pinned = source.device.type != "cpu"
                buffer = self._take(source.dtype, source.numel(), pinned)
                copies.append(buffer)
                buffer.copy_(source, non_blocking=pinned)
                queued = queued or pinned
        except BaseException:
            self.give_back(copies)
            raise
        finally:
            if queued:
                torch.accelerator.synchronize()
        return copies

    def _take(self, dtype: torch.dtype, numel: int, pinned: bool) -> Tensor:
        free = self._free.get((dtype, numel, pinned))
        if free:
            return free.pop()
        buffer = torch.empty(numel, dtype=dtype, pin_memory=pinned)
        self.nbytes += buffer.numel() * buffer.element_size()
        return buffer

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Let the memory of copies be used again."""
        for buffer in buffers:
            self._free.setdefault((buffer.dtype, buffer.numel(), buffer.is_pinned()), []).append(buffer)


class Background:
    """Two pieces of work, one after the other, in a thread of their own.

    The thread is not a daemon: an interpreter that ends waits for it. Nothing in it may be a collective.

    Parameters
    ----------
    work
        The first piece, whose end :meth:`wait_for_work` awaits.
    follow_up
        The second; it is given whether the first succeeded, and runs in any case.
    """

    def __init__(self, work: Callable[[], None], follow_up: Callable[[bool], None]) -> None:
        self._work, self._follow_up = work, follow_up
        self._worked = threading.Event()
        self.error: BaseException | None = None  #: of the first piece
        self.follow_up_error: BaseException | None = None  #: of the second
        self._thread = threading.Thread(target=self._run, name="ds_galore checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self.error = error
        finally:
            self._worked.set()
        try:
            self._follow_up(self.error is None)
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self.follow_up_error = error

    def wait_for_work(self) -> None:
        """Return when the first piece has ended."""
        self._worked.wait()

    def wait(self) -> None:
        """Return when both have ended."""
        self._thread.join()

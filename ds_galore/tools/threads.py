"""Work in threads that an interruption ends at any moment. Imports the standard library."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["run_all"]

Item = TypeVar("Item")
#: Seconds after which an interruption is noticed at the latest.
GLANCE = 0.1


def run_all(
    work: Callable[[Item], None], items: Iterable[Item], workers: int, *, stop: Callable[[], None] = lambda: None
) -> None:
    """Do the work on all items in threads; the first error, in their order of time, ends it.

    Python raises KeyboardInterrupt in the main thread, wherever that is; in the middle of what a pool of threads does
    with its locks it leaves one locked or unlocks it twice, and the program hangs. So the main thread does nothing but
    wait here, for a queue that is written in C; and it looks up from it now and then, since a signal that comes just
    before it blocks does not wake it.

    Parameters
    ----------
    work
        Done on an item.
    items
        In the order in which they are begun.
    workers
        How many at the same time.
    stop
        Called once there is an error or an interruption, so that work in progress may end early.

    Raises
    ------
    BaseException
        The first error of the work, or the interruption; no work is going on any more then.
    """
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    stopped = False

    def one(item: Item) -> None:
        if not stopped:
            work(item)

    def run() -> None:
        nonlocal stopped
        error: BaseException | None = None
        try:
            with ThreadPoolExecutor(workers) as pool:
                try:
                    for future in as_completed([pool.submit(one, item) for item in items]):
                        future.result()
                except BaseException as found:  # noqa: BLE001 - raised below
                    error, stopped = found, True
                    stop()
        except BaseException as found:  # noqa: BLE001 - raised below
            error = error or found
        for _ in range(2):  # an interruption may come between taking the first and having it
            ended.put(error)

    _thread.start_new_thread(run, ())
    try:
        error = _next(ended)
    except BaseException:
        stopped = True
        stop()
        _next(ended)
        raise
    if error is not None:
        raise error


def _next(queue: SimpleQueue[Item]) -> Item:
    while True:
        try:
            return queue.get(timeout=GLANCE)
        except Empty:
            continue

"""Work in threads: the first error ends it, and an interruption does at any moment."""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time

import pytest

from ds_galore.tools.threads import run_all

INTERRUPTED = """
import faulthandler, random, signal
from ds_galore.tools.threads import run_all
signal.signal(signal.SIGALRM, signal.default_int_handler)
random.seed(1)
seen = 0
for _ in range(1500):
    faulthandler.dump_traceback_later(30, exit=True)
    done = []
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 8e-3))
            run_all(done.append, range(300), 2)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        seen += 1
        count = len(done)
    else:
        assert sorted(done) == list(range(300))
    faulthandler.cancel_dump_traceback_later()
print(seen)
"""


def test_an_interruption_at_any_moment_ends_it():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300


def test_an_interruption_that_does_not_wake_the_main_thread_ends_it_too():
    told, waited = threading.Event(), []

    def work(item: int) -> None:
        time.sleep(0.2)  # until the main thread waits
        _thread.interrupt_main()  # as a signal that came just before it did
        waited.append(told.wait(20))

    with pytest.raises(KeyboardInterrupt):
        run_all(work, range(1), 1, stop=told.set)
    assert waited == [True]


def test_the_first_error_ends_it_and_nothing_goes_on_afterwards():
    begun, told = [], threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        if item == 3:
            raise ValueError("three")
        time.sleep(0.01)

    with pytest.raises(ValueError, match="three"):
        run_all(work, range(100), 2, stop=told.set)
    count = len(begun)
    assert told.is_set()
    assert count < 20
    time.sleep(0.05)
    assert len(begun) == count


def test_all_is_done_and_an_error_of_the_items_themselves_is_raised():
    done: list[int] = []
    run_all(done.append, range(50), 4)
    assert sorted(done) == list(range(50))
    with pytest.raises(ZeroDivisionError):
        run_all(done.append, (1 // item for item in (1, 0)), 2)

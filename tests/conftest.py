"""Fixtures for all tests."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import Pool

# The jobs that tests start find the environment's ninja first. If the pool's processes found another one, each would
# take the other's build of DeepSpeed's operator for stale, and compile it again, a minute of CPU at every turn.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# Several ranks of several tests share the cores. With more threads than that each, they spin while they wait for each
# other: two jobs of two ranks on two cores took three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# DeepSpeed's Muon is compiled with torch's compiler when the module is imported: a second of CPU of every rank of every
# job. Nothing that is tested here is compiled so.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# DeepSpeed's operator is compiled for this checkout: another version's would be loaded in its place, and a process that
# was killed in the middle of loading it leaves a lock, for which all later ones wait.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).resolve().parent.parent / "build" / "extensions"))


def pytest_report_header() -> str:
    """Which DeepSpeed is tested: `make compat` puts others before the environment's."""
    return f"deepspeed {importlib.metadata.version('deepspeed')}"


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Four real processes over gloo, kept for the session."""
    processes = Pool(tmp_path_factory.mktemp("stores"))
    yield processes
    processes.close()

"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real processes over gloo, kept for the session."""
    processes = Pool()
    yield processes
    processes.close()

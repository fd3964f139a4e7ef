"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import Cluster


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """The pool of worker processes; see tests/cluster.py."""
    pool = Cluster(warning_filters=pytestconfig.getini("filterwarnings"))
    yield pool
    pool.close()

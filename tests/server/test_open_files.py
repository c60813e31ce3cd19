"""How many files may be open."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from mlxcel.server.open_files import allow_open_files


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Those of this process, as they are again after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_as_many_as_the_system_lets_it(limits: tuple[int, int]) -> None:
    """The soft limit rises to what is wanted, or to the hard one, and never falls."""
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    allow_open_files(400)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (400, hard)
    allow_open_files(350)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (400, hard)
    if hard not in (resource.RLIM_INFINITY, 400):
        allow_open_files(hard + 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)

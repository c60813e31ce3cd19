"""Buffers that MLX keeps for later."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlxcel.stage.scratch import SCRATCH_BYTES, give_back_scratch


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    mx.clear_cache()
    yield
    mx.clear_cache()


def use_and_drop(nbytes: int) -> None:
    mx.eval(mx.zeros((nbytes,), mx.uint8) + 1)
    mx.synchronize()


def test_much_is_given_back() -> None:
    """A large buffer that nobody holds goes back to the system."""
    use_and_drop(4 * SCRATCH_BYTES)
    assert mx.get_cache_memory() > SCRATCH_BYTES
    give_back_scratch()
    assert mx.get_cache_memory() == 0


def test_little_stays() -> None:
    """A small one is kept, because to give it back takes longer than to make it again."""
    use_and_drop(SCRATCH_BYTES // 4)
    kept = mx.get_cache_memory()
    assert 0 < kept <= SCRATCH_BYTES
    give_back_scratch()
    assert mx.get_cache_memory() == kept

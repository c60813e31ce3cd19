"""Which matrix library a process runs (placeholder until the real module lands)."""

from __future__ import annotations

from pathlib import Path

import attrs


@attrs.frozen
class Blas:
    name: str
    path: Path | None = None


@attrs.frozen
class BlasChoice:
    environment: dict[str, str]
    notice: str


def running_blas() -> Blas:
    return Blas("wheel")


def choose_blas(requested: str, *, workers: str) -> BlasChoice:
    return BlasChoice({}, "BLAS: the wheel's")

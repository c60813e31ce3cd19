"""Every error that mlxcel raises on purpose has this base."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import attrs


class MlxcelError(Exception):
    """Base of all errors that mlxcel raises on purpose."""

    exit_code: ClassVar[int] = 1


@attrs.define(eq=False)
class UsageError(MlxcelError):
    """The request can never work: flags that exclude each other, an impossible shape."""

    exit_code: ClassVar[int] = 2

    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.problem} {self.way_out}"


@attrs.define(eq=False)
class DeadlineError(MlxcelError):
    """A wait that ended without an answer."""

    peer: str
    operation: str
    seconds: float
    way_out: str

    def __str__(self) -> str:
        return (
            f"{self.peer} did not answer within {self.seconds:g} s while waiting for "
            f"{self.operation}. {self.way_out}"
        )


@attrs.define(eq=False)
class FileError(MlxcelError):
    """A file that cannot be written; ``path`` says which."""

    path: Path
    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.path} {self.problem} {self.way_out}"

"""Bars on standard error while something takes long; only on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
)


class LoadingBars:
    """A bar per stage while weights are read.

    Callable with (stage, bytes done, bytes in all); :meth:`close` removes the bars.
    """

    def __init__(self) -> None:
        self._bars: dict[int, TaskID] = {}
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                console=Console(stderr=True),
                transient=True,
            )

    def __call__(self, stage: int, done: int, total: int) -> None:
        if self._progress is None or total == 0:
            return
        if not self._bars:
            self._progress.start()
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(f"loading stage {stage}", total=total)
        self._progress.update(self._bars[stage], completed=done, total=total)

    def close(self) -> None:
        if self._progress is not None and self._bars:
            self._progress.stop()


class CountingBar:
    """A bar for so many things of one kind, within its context."""

    def __init__(self, name: str, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._bar = self._progress.add_task(name, total=total)

    def __enter__(self) -> CountingBar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def advance(self) -> None:
        """One more is done."""
        self._progress.advance(self._bar)

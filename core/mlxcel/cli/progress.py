"""A bar per stage while weights are read, on standard error and only on a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn


class LoadingBars:
    """Callable with (stage, bytes done, bytes in all); :meth:`close` removes the bars."""

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
        if self._progress is None:
            return
        if not self._bars:
            self._progress.start()
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(f"loading stage {stage}", total=total)
        self._progress.update(self._bars[stage], completed=done, total=total)

    def close(self) -> None:
        if self._progress is not None and self._bars:
            self._progress.stop()

"""Cut a stream of text at the first stop string, wherever pieces begin and end."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Passes text on, except what may turn out to be the beginning of a stop string.

    Attributes:
        stopped: Whether a stop string has come; nothing passes after that.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stopped = False
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> str:
        """What can be shown once ``text`` has come: never a part of a stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        # The first to be complete ends the text; of those complete at once, the longest.
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            shown, self._held = self._held[: min(ends)[1]], ""
            return shown
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """What was held back, now that nothing can follow."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that ``stop`` begins with, short of all of it."""
    start = max(0, len(text) - len(stop) + 1)
    first = text.find(stop[0], start)  # most texts do not have it, and it is found fast
    if first < 0:
        return 0
    ends = (len(text) - at for at in range(first, len(text)) if stop.startswith(text[at:]))
    return next(ends, 0)

"""Prompts that the stages still know, so that the next one that begins alike starts later.

Only the engine knows what an entry means: a stage holds its caches under a handle and obeys.
An entry is the state after a whole prompt but its last token. A prompt that goes on where an
entry ends starts from a copy of it; one that leaves it earlier can do so only where every
cache of the model can forget its last tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import attrs

from mlxcel.engine.slot import Start
from mlxcel.family.caches import CacheGroup, CacheKind, KVCacheKind, RotatingCacheKind

LEAST_TOKENS = 16
"""Shorter beginnings are not worth a copy."""


@attrs.frozen
class Entry:
    """The state after ``tokens``, which the stages hold under ``handle``."""

    handle: int
    tokens: tuple[int, ...]


class PrefixCache:
    """Entries by handle, the least recently used first.

    Args:
        kinds: What the model's layers keep of a sequence; they decide who can forget.
        capacity: Entries at most; 0 switches the cache off.
    """

    def __init__(self, kinds: Sequence[CacheKind | None], capacity: int = 64) -> None:
        self.capacity = capacity
        self._pins: Counter[int] = Counter()
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._trims_below = min((_trims_below(kind) for kind in kinds), default=_ALWAYS)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, prompt: tuple[int, ...]) -> Start | None:
        """The best beginning for ``prompt``; its last token is never part of it."""
        wanted = prompt[:-1]
        best: Start | None = None
        for entry in self._entries.values():
            common = common_prefix(wanted, entry.tokens)
            trim = len(entry.tokens) - common
            if trim and len(entry.tokens) >= self._trims_below:
                continue
            if common >= LEAST_TOKENS and (best is None or common > best.cached):
                best = Start(entry.handle, trim, common)
        if best is not None:
            self._entries.move_to_end(best.source)
        return best

    def wants(self, prompt: tuple[int, ...]) -> bool:
        """Whether an entry for ``prompt`` would be new and worth it."""
        tokens = prompt[:-1]
        if self.capacity == 0 or len(tokens) < LEAST_TOKENS:
            return False
        return all(entry.tokens != tokens for entry in self._entries.values())

    def add(self, entry: Entry) -> None:
        """Remember an entry; the caller evicts first where there is no room."""
        self._entries[entry.handle] = entry

    def pin(self, handle: int) -> None:
        """Keep an entry: a step that copies it has still to be sent."""
        self._pins[handle] += 1

    def unpin(self, handle: int) -> None:
        """The step is sent, or will never be."""
        self._pins[handle] -= 1
        if not self._pins[handle]:
            del self._pins[handle]

    def evict(self) -> Entry | None:
        """Forget the least recently used entry that is not pinned; None if there is none."""
        for handle in self._entries:
            if handle not in self._pins:
                return self._entries.pop(handle)
        return None

    def discard(self, handle: int) -> None:
        """Forget an entry that the stages may not all hold."""
        self._entries.pop(handle, None)


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two sequences begin alike with; by halves, comparing whole slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_ALWAYS = 1 << 62


def _trims_below(kind: CacheKind | None) -> int:
    """Up to which length a cache can forget its last tokens exactly."""
    match kind:
        case None | KVCacheKind():
            return _ALWAYS
        case RotatingCacheKind(window=window):
            return window
        case CacheGroup(kinds):
            return min(map(_trims_below, kinds))
    return 0

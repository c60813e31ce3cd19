"""Which sequences of a model may share a pass."""

from __future__ import annotations

import enum


class Batching(enum.Enum):
    """Which rows a batch may have, for each of them to be what it is alone."""

    PADDED = "padded"
    """Prompts of any length, the shorter ones padded; and any rows for decoding."""

    EQUAL = "equal"
    """Prompts of one length, as padding would get into a layer's state; any rows for decoding."""

    SINGLE = "single"
    """One row."""

"""Memory for a frame that is about to be received."""

from __future__ import annotations


def allocate(size: int) -> memoryview:
    """``size`` bytes that hold anything: filling a large frame with zeros first takes its time."""
    import numpy as np  # here, as many processes that have connections never get large frames

    return np.empty(size, np.uint8).data

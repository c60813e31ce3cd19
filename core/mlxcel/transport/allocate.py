"""Memory for a frame that is about to be received."""

from __future__ import annotations

import numpy as np


def allocate(size: int) -> memoryview:
    """``size`` bytes that hold anything: filling a large frame with zeros first takes its time."""
    return memoryview(np.empty(size, np.uint8))

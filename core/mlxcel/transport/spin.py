"""Whether a receiver polls before it sleeps."""

from __future__ import annotations

import os

SPIN_SECONDS = 100e-6
"""Two wake-ups of a sleeping thread: enough to poll through a round trip of 64 KiB."""


def spin_for(stages: int, cores: int | None = None) -> float:
    """The seconds to poll where ``stages`` stages run on one machine.

    0 where a core that polls would be missing to one that computes: on up to two cores, or no
    more cores than stages.

    Args:
        stages: Stages on this machine.
        cores: Its cores; None looks.
    """
    if cores is None:
        cores = os.cpu_count() or 1
    return SPIN_SECONDS if cores > max(2, stages) else 0.0

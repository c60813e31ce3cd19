"""Whether a receiver polls before it sleeps."""

from __future__ import annotations

import os

from mlxcel.transport.contract import TrafficClass

SPIN_SECONDS = 300e-6
"""Some wake-ups of a sleeping thread: enough to poll while the other end seals and opens 1 MiB."""

RANK_SPIN_SECONDS = 1e-3
"""Ranks come to the end of a layer's half some hundred microseconds apart."""


def spin_for(
    workers: int, cores: int | None = None, traffic: TrafficClass = "pp_activation"
) -> float:
    """The seconds to poll where ``workers`` stages, or ranks of stages, run on one machine.

    0 where a core that polls would be missing to one that computes: on up to two cores, or no
    more cores than workers. Ranks wait for each other in every layer, with nothing else to do
    and the other about to come, so ``tp_collective`` polls as soon as each has a core.

    Args:
        workers: On this machine.
        cores: Its cores; None looks.
    """
    if cores is None:
        cores = os.cpu_count() or 1
    if traffic == "tp_collective":
        return RANK_SPIN_SECONDS if cores >= workers else 0.0
    return SPIN_SECONDS if cores > max(2, workers) else 0.0

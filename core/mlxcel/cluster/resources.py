"""What the peers of a cluster have, as the plan and the caches need to know it."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcel.checkpoint.weights_mode import RESERVE_BYTES
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.topology import Topology
from mlxcel.engine.model import Machine, Model
from mlxcel.partition.memory import LARGEST, MemoryLimits


def weakest(peers: Sequence[Introduction]) -> Machine:
    """What every stage can be asked to compute with.

    Types and unpacking of weights must be the same on all stages, so one CPU among GPUs, or
    one slow BLAS, decides for all. The memory is as if all had as little as the poorest one.
    """
    memory = [peer.memory for peer in peers]
    return Machine(
        device="cpu" if any(peer.device == "cpu" for peer in peers) else "gpu",
        fast_blas=all(peer.fast_blas for peer in peers),
        memory=min(memory) * len(memory) if all(memory) else None,
    )


def reported_limits(peers: Sequence[Introduction]) -> MemoryLimits:
    """What each peer says that it can hold; one that does not say has no limit."""
    return _limits([peer.memory for peer in peers])


def declared_limits(topology: Topology) -> MemoryLimits | None:
    """What a hand-written topology says that its stages can hold; None if it says nothing."""
    sizes = [node.memory_bytes for node in topology.stages]
    return _limits([size or 0 for size in sizes]) if any(sizes) else None


def _limits(sizes: Sequence[int]) -> MemoryLimits:
    known = tuple(size or LARGEST for size in sizes)
    # A peer with less than the reserve shall be named as too small, not the reserve as too large.
    return MemoryLimits(known, reserve=min(RESERVE_BYTES, *(size - 1 for size in known)))


def kv_budgets(
    model: Model, peers: Sequence[Introduction], given: int | None = None
) -> list[int | None]:
    """The cache bytes of each stage: as ``given``, or what its peer has left after the weights."""
    if given is not None:
        return [given] * len(peers)
    return [
        max(0, peer.memory - stage.estimated_memory_bytes - RESERVE_BYTES) if peer.memory else None
        for peer, stage in zip(peers, model.plan.stages, strict=True)
    ]

"""What the peers of a cluster have, as the plan and the caches need to know it.

Peers come in the order of their places: stage after stage, and in each its ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from mlxcel.checkpoint.weights_mode import RESERVE_BYTES
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.topology import Topology
from mlxcel.engine.model import Machine, Model
from mlxcel.partition.memory import LARGEST, MemoryLimits


def free_memory(peers: Sequence[Introduction]) -> list[int]:
    """The bytes that each peer has for its stage, 0 where it does not say.

    Peers of one machine report the same memory, of which each gets an equal part.
    """
    hosts = [peer.node.rpartition(":")[0] for peer in peers]
    share = Counter(hosts)
    return [peer.memory // share[host] for peer, host in zip(peers, hosts, strict=True)]


def weakest(peers: Sequence[Introduction]) -> Machine:
    """What every stage can be asked to compute with.

    Types and unpacking of weights must be the same on all stages, so one CPU among GPUs, or
    one slow BLAS, decides for all. The memory is as if all had as little as the poorest one.
    """
    memory = free_memory(peers)
    return Machine(
        device="cpu" if any(peer.device == "cpu" for peer in peers) else "gpu",
        fast_blas=all(peer.fast_blas for peer in peers),
        memory=min(memory) * len(memory) if all(memory) else None,
    )


def reported_limits(peers: Sequence[Introduction], ranks: int = 1) -> MemoryLimits:
    """What the peers of each stage say that they can hold; who does not say has no limit."""
    return _limits(free_memory(peers), ranks)


def declared_limits(topology: Topology) -> MemoryLimits | None:
    """What a hand-written topology says that its stages can hold; None if it says nothing."""
    sizes = [node.memory_bytes for node in topology.stages]
    ranks = topology.tensor_parallel_size
    return _limits([size or 0 for size in sizes], ranks) if any(sizes) else None


def _limits(sizes: Sequence[int], ranks: int) -> MemoryLimits:
    """All ranks of a stage hold as much as each other, so the smallest of them decides."""
    known = [size or LARGEST for size in sizes]
    stages = (min(known[first : first + ranks]) for first in range(0, len(known), ranks))
    return with_reserve(MemoryLimits(tuple(stages)), RESERVE_BYTES)


def with_reserve(limits: MemoryLimits, more: int) -> MemoryLimits:
    """``limits`` with ``more`` bytes in reserve.

    A peer with less memory than the reserve is to be named as too small, not the reserve as too
    large, so a byte is always left.
    """
    return attrs.evolve(limits, reserve=min(limits.reserve + more, min(limits.sizes) - 1))


def kv_budgets(
    model: Model, peers: Sequence[Introduction], topology: Topology, given: int | None = None
) -> list[int | None]:
    """The cache bytes of each peer: as ``given``, or what it has left after the weights.

    It has what it reports as free, and no more than a hand-written ``topology`` lets it use.
    """
    if given is not None:
        return [given] * len(peers)
    workers = [stage for stage in model.plan.stages for _ in range(model.tensor.size)]
    memories = [
        min((size for size in (free, node.memory_bytes) if size), default=0)
        for free, node in zip(free_memory(peers), topology.stages, strict=True)
    ]
    return [
        max(0, memory - stage.estimated_memory_bytes - RESERVE_BYTES) if memory else None
        for memory, stage in zip(memories, workers, strict=True)
    ]

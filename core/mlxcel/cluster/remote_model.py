"""A model planned for the peers of a cluster, and what each peer is offered of it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import attrs

from mlxcel.checkpoint.weights_mode import RESERVE_BYTES
from mlxcel.cluster.identity import identify
from mlxcel.cluster.introduce import used_plugins
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.links import links_of
from mlxcel.cluster.messages import Offer
from mlxcel.cluster.node_registry import NodeRegistry
from mlxcel.cluster.plan_digest import plan_digest
from mlxcel.cluster.plan_terms import CONTEXT, USUAL, PlanTerms
from mlxcel.cluster.resources import declared_limits, reported_limits, weakest, with_reserve
from mlxcel.cluster.router import PipelineTensorParallelRouter
from mlxcel.cluster.topology import Node, Topology
from mlxcel.cluster.topology_toml import emit_topology
from mlxcel.engine.model import Model, plan_model
from mlxcel.errors import MemoryBudgetError
from mlxcel.partition.assignment import StageAssignment
from mlxcel.partition.balance import BalanceBy
from mlxcel.partition.cache_bytes import Workload
from mlxcel.partition.memory import MemoryLimits
from mlxcel.partition.remedies import Wording
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import ALONE, TensorParallel

BY_FLAGS = Wording("--pp-auto {}", "--tp-size {}", "a smaller --ctx-size")
BY_TOML = Wording(
    "pipeline_parallel_size = {}", "tensor_parallel_size = {}", "a smaller --ctx-size"
)
"""How a plan for more nodes is asked for."""


@attrs.frozen
class Wishes:
    """What the operator wants of the plan; see the flags of ``mlxcel serve``.

    ``kv_budget`` are the cache bytes of every stage, ``context`` the tokens of one sequence that
    must fit where there is no such budget. Of ``tensor`` the size is the topology's.
    """

    dtype: str = "auto"
    weights: str = "auto"
    layers: str | None = None
    by: BalanceBy = "bytes"
    kv_budget: int | None = None
    context: int = CONTEXT
    chunk: int = 512
    mirrors: bool = False
    tensor: TensorParallel = ALONE

    @property
    def terms(self) -> PlanTerms:
        """What a peer on the manual path has to plan by."""
        return PlanTerms(self.by, self.kv_budget, self.context, self.chunk)


def plan_remotely(
    path: Path,
    plugins: Plugins,
    topology: Topology,
    peers: Sequence[Introduction],
    wishes: Wishes,
    *,
    probe: bool,
) -> Model:
    """Divide the model at ``path`` among ``peers``, which hold the places of ``topology``.

    Args:
        probe: Whether the memory that peers report limits their stages. Without it only what
            the topology declares does, so that every node comes to the same plan by itself.

    Raises:
        MemoryBudgetError: A peer has too little memory; the error names it.
        MlxcelError: See :func:`mlxcel.engine.model.plan_model`.
    """
    ranks = topology.tensor_parallel_size
    limits, workload = with_caches(
        reported_limits(peers, ranks) if probe else declared_limits(topology), wishes.terms
    )
    layers = wishes.layers or topology_layers(topology)
    registry = NodeRegistry(topology)
    stages = [registry.nodes_at_stage(n) for n in range(topology.pipeline_parallel_size)]
    try:
        model = plan_model(
            path,
            plugins,
            weakest(peers),
            dtype=wishes.dtype,
            weights=wishes.weights,
            size=len(stages),
            layers=layers,
            by=wishes.by,
            workload=workload,
            limits=limits,
            mirrors=wishes.mirrors,
            tensor=attrs.evolve(wishes.tensor, size=ranks),
            apart=True,
            wording=BY_FLAGS if probe else BY_TOML,
        )
    except MemoryBudgetError as error:
        budget = " Or give a smaller --kv-cache-budget." if wishes.kv_budget is not None else ""
        raise attrs.evolve(
            error,
            device=", ".join(f"{node.id} @ {node.address}" for node in stages[error.stage]),
            room=f"Free memory there ({RESERVE_BYTES} bytes of it stay in reserve).",
            way_out=f"{error.way_out}{budget}".lstrip(),
        ) from None
    assigned = tuple(
        attrs.evolve(stage, device_id=", ".join(node.id for node in nodes))
        for stage, nodes in zip(model.plan.stages, stages, strict=True)
    )
    return attrs.evolve(model, plan=attrs.evolve(model.plan, stages=assigned))


def with_caches(
    limits: MemoryLimits | None, terms: PlanTerms
) -> tuple[MemoryLimits | None, Workload | None]:
    """``limits`` with room left for caches: their budget if there is one, else a workload."""
    if limits is None:
        return None, None
    if terms.kv_budget is not None:
        return with_reserve(limits, terms.kv_budget), None
    return limits, Workload(terms.context, chunk=terms.chunk)


def topology_layers(topology: Topology) -> str | None:
    """The layers that a hand-written topology gives its stages, as ``--pp-layers`` writes them."""
    ranges = topology.layers
    if ranges is None:
        return None
    return ",".join(f"{layers.start}-{layers.stop - 1}" for layers in ranges)


def make_offers(
    model: Model,
    topology: Topology,
    ours: Introduction,
    *,
    credits: int,
    timeout: float,
    collectives: str = "transport",
    rank_timeout: float = 30.0,
    terms: PlanTerms = USUAL,
) -> tuple[Offer, ...]:
    """What each peer is to be, by place; all offers are of one new session.

    Args:
        ours: The coordinator's introduction.
        credits: Steps in flight at most.
        timeout: Seconds that any one wait of a stage may last.
        collectives, rank_timeout: See :class:`Offer`.
        terms: Those that ``model`` was planned by.
    """
    identity = identify(model.checkpoint.path)
    stages: tuple[StageAssignment, ...] = model.plan.stages
    session = secrets.token_hex(16)
    ranges = [stage.layer_range for stage in stages]
    digest = plan_digest(identity, model.family, ranges, model.tensor)
    text = emit_topology(topology)
    registry = NodeRegistry(topology)
    return tuple(
        Offer(
            session=session,
            node=node.id,
            family=model.family,
            stage=stage.stage_index,
            stages=len(stages),
            start=stage.layer_range.start,
            stop=stage.layer_range.stop,
            cast=model.dtype.cast,
            dequantize=model.weights.dequantize,
            identity=identity,
            topology=text,
            digest=digest,
            cluster=topology.name,
            versions=dict(ours.versions),
            plugins=dict(used_plugins(model.plugins, model.family, topology.transport_backend)),
            bytes=stage.estimated_memory_bytes,
            transport=topology.transport_backend,
            credits=credits,
            timeout=timeout,
            dials=_dials(registry, node),
            rank=node.rank or 0,
            tensor=model.tensor,
            collectives=collectives,
            rank_timeout=rank_timeout,
            terms=terms,
        )
        for stage in stages
        for node in registry.nodes_at_stage(stage.stage_index)
    )


def _dials(registry: NodeRegistry, node: Node) -> dict[str, str]:
    """Where the nodes are that ``node`` connects to, by the name of the link."""
    router = PipelineTensorParallelRouter(registry, node)
    topology = registry.topology
    sizes = topology.pipeline_parallel_size, topology.tensor_parallel_size
    links = links_of(node.stage or 0, node.rank or 0, *sizes)
    return {
        link.name: str(router.route(*link.to, link.traffic).address)
        for link in links
        if link.to is not None
    }

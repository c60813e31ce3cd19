"""The plan that a node on the manual path makes by itself, to see that all mean the same one."""

from __future__ import annotations

from pathlib import Path

import attrs

from mlxcel.checkpoint.dtype import DtypeChoice
from mlxcel.cluster.messages import Offer
from mlxcel.cluster.plan_digest import plan_digest
from mlxcel.cluster.remote_model import topology_layers, with_caches
from mlxcel.cluster.resources import declared_limits
from mlxcel.cluster.topology import Topology
from mlxcel.family.contract import Family
from mlxcel.partition.plan import make_plan
from mlxcel.plugins import Plugins


def own_digest(
    offer: Offer,
    folder: Path,
    plugins: Plugins,
    topology: Topology,
    *,
    layers: str | None = None,
    mirrors: bool = False,
) -> str:
    """The digest of the plan that this node comes to from its TOML and its flags.

    The types of the weights are the coordinator's choice, who knows all devices, and so is what
    only its flags can say: what the ranks of a stage share out, and the terms of the plan. They
    are taken from the offer.

    Args:
        folder: The checkpoint's.
        layers, mirrors: See :func:`mlxcel.engine.model.plan_model`.

    Raises:
        MlxcelError: There is no such plan.
    """
    family = plugins.load("family", offer.family)
    assert isinstance(family, Family)  # the loader has checked it
    limits, workload = with_caches(declared_limits(topology), offer.terms)
    tensor = attrs.evolve(offer.tensor, size=topology.tensor_parallel_size)
    plan = make_plan(
        family.open(folder),
        family,
        DtypeChoice(offer.cast, ""),
        plugins,
        dequantize=offer.dequantize,
        size=topology.pipeline_parallel_size,
        layers=layers or topology_layers(topology),
        by=offer.terms.by,
        workload=workload,
        limits=limits,
        mirrors=mirrors,
        tensor=tensor,
        apart=True,
    )
    ranges = [stage.layer_range for stage in plan.stages]
    return plan_digest(offer.identity, offer.family, ranges, tensor)

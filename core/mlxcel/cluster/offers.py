"""Whether a peer can be what it is offered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from mlxcel.cluster.agreement import disagreements
from mlxcel.cluster.identity import Checkpoints
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.messages import Offer, RefusalReason, Refused
from mlxcel.cluster.topology import Topology
from mlxcel.cluster.topology_toml import emit_topology, parse_topology
from mlxcel.errors import MlxcelError
from mlxcel.family.contract import Family
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import MOST_RANKS

Digest = Callable[[Offer, Path], str]
"""The digest of the plan that this peer makes by itself, with the checkpoint in a folder."""


@attrs.frozen
class OwnPlan:
    """What a peer knows of the cluster beforehand: it follows only who means the same.

    ``node`` is its name in ``topology``.
    """

    node: str
    topology: Topology
    digest: Digest


@attrs.frozen
class Standing:
    """What a peer has to show when it gets an offer.

    ``introduction`` is as of now. ``transport`` is the only one that the operator wants, None if
    any will do; ``own_plan`` is there on the manual path only.
    """

    introduction: Introduction
    plugins: Plugins
    checkpoints: Checkpoints
    transport: str | None = None
    own_plan: OwnPlan | None = None


_Objection = tuple[RefusalReason, str]


def judge_offer(offer: Offer, standing: Standing) -> Path | Refused:
    """The folder of the checkpoint if the peer can meet ``offer``, else why not.

    Reads the headers of checkpoints, if they have changed; imports the family's light module.
    """
    for objections in (_membership, _software, _memory, _place):
        for reason, text in objections(offer, standing):
            return Refused(offer.session, reason, text)
    try:
        folder = standing.checkpoints.find(offer.identity)
    except MlxcelError as error:
        return Refused(offer.session, "checkpoint", str(error))
    for reason, text in _plan(offer, standing, folder):
        return Refused(offer.session, reason, text)
    return folder


def _membership(offer: Offer, standing: Standing) -> Iterator[_Objection]:
    ours = standing.introduction.cluster
    if offer.cluster != ours:
        yield (
            "cluster",
            f"it belongs to the cluster {ours!r}, the offer is of {offer.cluster!r}. "
            f"Give all nodes one --cluster-name.",
        )


def _software(offer: Offer, standing: Standing) -> Iterator[_Objection]:
    plugins = standing.plugins
    if standing.transport not in (None, offer.transport):
        yield (
            "transport",
            f"it was started for the transport {standing.transport!r}, the offer is of "
            f"{offer.transport!r}. Give all nodes one --transport-backend.",
        )
    try:
        plugins.load("transport", offer.transport)
    except MlxcelError as error:
        yield "transport", str(error)
    for failure in disagreements(
        _coordinator(offer), [standing.introduction], [offer.node], offer.family, offer.plugins
    ):
        yield _reason(failure.reason), failure.text
    try:
        family = plugins.load("family", offer.family)
    except MlxcelError as error:
        yield "family", str(error)
    else:
        if isinstance(family, Family) and not family.runnable:
            yield (
                "family",
                f"the family {offer.family!r} can be planned but not run here. "
                f"Install the version that the coordinator has.",
            )


def _memory(offer: Offer, standing: Standing) -> Iterator[_Objection]:
    free = standing.introduction.memory
    if 0 < free < offer.bytes:
        yield (
            "memory",
            f"{'its rank of ' * (offer.tensor.size > 1)}the stage needs {offer.bytes} bytes, and "
            f"{free} are free. End what uses memory on this peer, use more stages or ranks, or "
            f"give it fewer layers: write the cluster's TOML by hand (--distributed-config), with "
            f"the layers of each stage.",
        )


def _place(offer: Offer, standing: Standing) -> Iterator[_Objection]:
    """Whether the offer agrees with itself, and with what a manual peer was told beforehand."""
    # config.json may count layers that do not run (for drafts), so a last stage may end earlier.
    if not (
        0 <= offer.stage < offer.stages
        and 0 <= offer.start < offer.stop <= offer.identity.layers
        and (offer.stage == 0) == (offer.start == 0)
        and 0 <= offer.rank < offer.tensor.size <= MOST_RANKS
        and set(offer.dials) == {link.name for link in offer.links if link.to is not None}
    ):
        yield (
            "plan",
            f"layers {offer.start} to {offer.stop - 1} of {offer.identity.layers} cannot be "
            f"{offer.long_title}. Install one version of mlxcel on all nodes.",
        )
    try:
        topology = parse_topology(offer.topology, "the offered TOML")
    except MlxcelError as error:
        yield "plan", f"{error} Install one version of mlxcel on all nodes."
        return
    node = topology.node(offer.node)
    sizes = (topology.pipeline_parallel_size, topology.tensor_parallel_size)
    if (
        node is None
        or (node.stage, node.rank or 0) != offer.place
        or sizes != (offer.stages, offer.tensor.size)
    ):
        yield (
            "plan",
            f"the offered TOML does not make {offer.node!r} {offer.long_title}. "
            f"Install one version of mlxcel on all nodes.",
        )
    if (own := standing.own_plan) is None:
        return
    if offer.node != own.node:
        yield (
            "plan",
            f"this node is {own.node!r} by its TOML, and is asked to be {offer.node!r}. "
            f"Use one TOML on all nodes, and give each its own --node-id.",
        )
    if difference := _first_difference(emit_topology(own.topology), offer.topology):
        yield (
            "plan",
            f"its TOML has {difference[0]!r} where the coordinator's has {difference[1]!r}. "
            f"Use one TOML on all nodes.",
        )


def _plan(offer: Offer, standing: Standing, folder: Path) -> Iterator[_Objection]:
    if standing.own_plan is None:
        return
    try:
        digest = standing.own_plan.digest(offer, folder)
    except MlxcelError as error:
        yield "plan", str(error)
        return
    if digest != offer.digest:
        yield (
            "plan",
            "by its own TOML and flags this node comes to other layers than the coordinator. "
            "Use one TOML, with the same layers and resources, and the same --pp-layers and "
            "--allow-mirrored-kv on all nodes.",
        )


def _coordinator(offer: Offer) -> Introduction:
    """What the offer says of the coordinator's software."""
    family = offer.family.partition(":")[0]
    return Introduction(
        "coordinator", "coordinator", offer.cluster, offer.versions, offer.plugins, (family,)
    )


def _reason(text: str) -> RefusalReason:
    return "family" if text == "family" else "version"


def _first_difference(ours: str, theirs: str) -> tuple[str, str] | None:
    """The first line that two texts do not share, as each has it."""
    mine, other = ours.splitlines(), theirs.splitlines()
    for index in range(max(len(mine), len(other))):
        pair = tuple("".join(lines[index : index + 1]) for lines in (mine, other))
        if pair[0] != pair[1]:
            return pair[0], pair[1]
    return None

"""Whether peers can form one pipeline with their coordinator, by what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mlxcel.cluster.introduction import Introduction
from mlxcel.errors import PeerFailure

MUST_AGREE = ("mlxcel", "mlx-lm")
MAY_DIFFER = ("mlx", "BLAS")
"""Stages with different ones of these work together, but their numbers differ in the last bits."""


def disagreements(
    ours: Introduction,
    peers: Sequence[Introduction],
    nodes: Sequence[str],
    family: str,
    plugins: Mapping[str, str],
) -> tuple[PeerFailure, ...]:
    """What speaks against a run with ``family``; nothing if the peers can take part.

    Args:
        ours: The coordinator's introduction.
        peers: Those of the peers, and ``nodes`` their names in the cluster.
        plugins: The plugins in use, by ``kind:name``, with their versions here.
    """
    return tuple(
        PeerFailure(node, peer.node, reason, text)
        for node, peer in zip(nodes, peers, strict=True)
        for reason, text in _disagreements(ours, peer, family, plugins)
    )


def differences(peers: Sequence[Introduction]) -> tuple[str, ...]:
    """One line each for what differs among the peers and may, but makes numbers differ too."""
    lines = []
    for name in (*MAY_DIFFER, "device"):
        found: dict[str, list[str]] = {}
        for peer in peers:
            value = peer.device if name == "device" else peer.versions.get(name, "unknown")
            found.setdefault(value, []).append(peer.node)
        if len(found) > 1:
            values = "; ".join(f"{value} on {', '.join(on)}" for value, on in found.items())
            lines.append(
                f"the peers differ in {name}: {values}. They work together, but tokens may "
                f"differ from those of one machine."
            )
    return tuple(lines)


def _disagreements(
    ours: Introduction, peer: Introduction, family: str, plugins: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    for name in MUST_AGREE:
        here, there = ours.versions.get(name), peer.versions.get(name)
        if here != there:
            yield (
                "version",
                f"it has {name} {there}, the coordinator {here}. "
                f"Install the same version on all nodes (pip install {name}=={here}).",
            )
    own = family.partition(":")[0]
    if own not in peer.families:
        yield (
            "family",
            f"pipeline capability mismatch: the model needs the family {own!r}; this peer has "
            f"[{', '.join(peer.families)}], the coordinator [{', '.join(ours.families)}]. "
            f"Install that family on the peer, too.",
        )
    for key, here in plugins.items():
        there = peer.plugins.get(key)
        if there == here or (there is None and key == f"family:{own}"):
            continue  # a family that is not there has been named
        has = "it lacks the plugin" if there is None else f"it has version {there} of the plugin"
        yield (
            "version",
            f"{has} {key}, the coordinator has version {here}. "
            f"Install the same version on all nodes.",
        )

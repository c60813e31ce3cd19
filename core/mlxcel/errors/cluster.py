"""What can go wrong between the nodes of a cluster."""

from __future__ import annotations

from typing import ClassVar

import attrs

from mlxcel.errors.base import MlxcelError, UsageError


@attrs.define(eq=False)
class DialError(MlxcelError):
    """A node that could not be reached or would not talk; ``address`` is where it was sought."""

    address: str
    problem: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.address}: {self.problem} {self.way_out}"


class Unreachable(DialError):
    """Nothing answers at the address."""


class NotANode(DialError):
    """Something listens at the address, but it does not speak the cluster's protocol."""


class SecretMismatch(DialError):
    """The other node's secret is not this one's."""


class PeerFull(DialError):
    """The other node knows this one, and has no room for another connection."""


class PeerRefused(DialError):
    """The other node knows this one and refuses it; ``problem`` holds its reason."""


@attrs.define(eq=False)
class VersionMismatch(DialError):
    """The other node speaks another version of the protocol, or the same with other fields."""

    ours: int
    theirs: int


@attrs.define(eq=False)
class ListenError(MlxcelError):
    """An address that this node cannot listen on for the other nodes."""

    address: str
    cause: str

    def __str__(self) -> str:
        return (
            f"this node cannot listen on {self.address}: {self.cause}. Choose another address "
            f"with --cluster-control-addr, or in the TOML file of --distributed-config on all "
            f"nodes alike; or stop what uses it."
        )


@attrs.define(eq=False)
class SecretError(MlxcelError):
    """There is no secret that the cluster could use.

    ``source`` is the flag, variable or key that names it, empty if none does.
    """

    exit_code: ClassVar[int] = 2

    source: str
    problem: str

    def __str__(self) -> str:
        return (
            f"The cluster's secret{f' of {self.source}' * bool(self.source)} cannot be used: "
            f"{self.problem} `mlxcel cluster secret PATH` makes one; copy the file to all nodes "
            f"and name it with --cluster-secret-file."
        )


@attrs.define(eq=False)
class TopologyError(UsageError):
    """A cluster that cannot be; ``source`` is its TOML file, or the flags that describe it."""

    source: str

    def __str__(self) -> str:
        return f"{self.source}: {self.problem} {self.way_out}"


@attrs.frozen
class PeerFailure:
    """What went wrong with one peer of a cluster; ``text`` says what to do about it."""

    node: str
    address: str
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.node} @ {self.address} ({self.reason}): {self.text}"


@attrs.define(eq=False)
class BringUpError(MlxcelError):
    """A cluster that did not come up; nothing was started on any of its peers.

    ``phase`` is what was being done: connect, check, offer, commit or activate.
    """

    phase: str
    failures: tuple[PeerFailure, ...]

    def __str__(self) -> str:
        said = "; ".join(str(failure).rstrip(" .") for failure in self.failures)
        said = said or "it was interrupted"
        return f"the cluster did not come up ({self.phase}), nothing was started. {said}."


@attrs.define(eq=False)
class PeerLost(MlxcelError):
    """A node of a running cluster is gone; what was running is lost and may be tried again.

    ``node`` is its name in the cluster, ``address`` where its peer was; ``what`` says how.
    """

    node: str
    address: str
    what: str

    def __str__(self) -> str:
        return (
            f"{self.node} @ {self.address} is lost: {self.what.rstrip('.')}. What was running is "
            f"lost with it; see to that node, then start the coordinator again."
        )


@attrs.define(eq=False)
class PeerLinkBroken(PeerLost):
    """Two nodes of a running cluster that live, and whose connection broke.

    ``node`` is one of them, ``other`` and ``other_address`` the second; ``what`` says how.
    """

    other: str
    other_address: str

    def __str__(self) -> str:
        return (
            f"the connection between {self.node} @ {self.address} and {self.other} @ "
            f"{self.other_address} broke, though both answer: {self.what.rstrip('.')}. What was "
            f"running is lost with it; look at the network between them (cables, firewalls, limits "
            f"for idle connections), then start the coordinator again."
        )


@attrs.define(eq=False)
class PortTaken(MlxcelError):
    """A port that the cluster needs and that something else has; ``where`` is which."""

    where: str
    cause: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.where} cannot be used: {self.cause}. {self.way_out}"


@attrs.define(eq=False)
class DiscoveryError(MlxcelError):
    """Too few peers announced themselves.

    ``found`` are the addresses of those that did; ``hints`` what else was heard.
    """

    wanted: int
    found: tuple[str, ...]
    seconds: float
    port: int
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        heard = f" ({', '.join(self.found)})" if self.found else ""
        hints = f"{'; '.join(self.hints)}. " if self.hints else ""
        return (
            f"{len(self.found)} of {self.wanted} peers{heard} announced themselves on UDP port "
            f"{self.port} within {self.seconds:g} s. {hints}Start the others with --pp-peer "
            f"--cluster-discovery mdns, this --cluster-name and this secret. Beacons stay within "
            f"their subnet, and firewalls must let this UDP port in: elsewhere give the peers "
            f"--cluster-discovery-target with this machine's address, or list them with "
            f"--cluster-peers."
        )


@attrs.define(eq=False)
class ClusterVersionError(MlxcelError):
    """Nodes that run another version; ``nodes`` are their addresses and versions."""

    nodes: tuple[tuple[str, str], ...]
    ours: str

    def __str__(self) -> str:
        theirs = "; ".join(f"{address} runs {version}" for address, version in self.nodes)
        return f"{theirs}; here it is {self.ours}. All nodes must be upgraded together."

"""What a coordinator and a peer say to each other over their control connection.

A bring-up is three questions, and no peer acts on one before all have answered the one before:
offer (can you?), commit (will you?), activate (do it). A session is one bring-up and the run that
follows; its name is random, and messages of another session are ignored.
"""

from __future__ import annotations

from typing import Literal

import attrs

from mlxcel.cluster.links import Link, links_of
from mlxcel.cluster.plan_terms import USUAL, PlanTerms
from mlxcel.pipeline.report import Beat, Ended, Failed, Loaded, Loading
from mlxcel.tensor.options import ALONE, TensorParallel

RefusalReason = Literal[
    "checkpoint",
    "version",
    "cluster",
    "family",
    "memory",
    "plan",
    "transport",
    "worker",
    "busy",
    "config",
]
"""What a peer cannot agree to; ``worker`` is that it has no worker process that could be the
stage, ``config`` that it cannot write its TOML."""


@attrs.frozen
class ModelIdentity:
    """What tells one checkpoint from another without reading its weights.

    ``config`` is the SHA-256 of config.json in hex; ``files`` are the weight files' names and
    sizes in bytes, sorted; ``layers`` the number of layers.
    """

    config: str
    files: tuple[tuple[str, int], ...]
    layers: int


@attrs.frozen
class Offer:
    """Coordinator to peer: the stage it is to be, or the rank of one.

    ``start`` and ``stop`` are its layers, half-open. ``topology`` is the text of the cluster's
    TOML; ``digest`` the SHA-256 of the plan. ``plugins`` are the versions of the plugins in use,
    ``bytes`` what the peer's share of the weights needs. ``dials`` are the addresses of the nodes
    that the peer connects to for data, by the name of the link (see :mod:`mlxcel.cluster.links`).

    ``tensor`` says how many ranks share each stage, ``rank`` which of them the peer is.
    ``collectives`` and ``rank_timeout`` are as in :class:`mlxcel.pipeline.control.Job`. ``terms``
    are for a peer that makes the plan by itself.
    """

    session: str
    node: str
    family: str
    stage: int
    stages: int
    start: int
    stop: int
    cast: str | None
    dequantize: bool
    identity: ModelIdentity
    topology: str
    digest: str
    cluster: str
    versions: dict[str, str]
    plugins: dict[str, str]
    bytes: int
    transport: str
    credits: int
    timeout: float
    dials: dict[str, str]
    rank: int = 0
    tensor: TensorParallel = ALONE
    collectives: str = "transport"
    rank_timeout: float = 30.0
    terms: PlanTerms = USUAL

    @property
    def place(self) -> tuple[int, int]:
        """Its stage and its rank."""
        return self.stage, self.rank

    @property
    def links(self) -> tuple[Link, ...]:
        """All connections for data of its place."""
        return links_of(self.stage, self.rank, self.stages, self.tensor.size)

    @property
    def title(self) -> str:
        """What the peer is to be, in words."""
        stage = f"stage {self.stage}"
        return stage if self.tensor.size == 1 else f"rank {self.rank} of {stage}"

    @property
    def long_title(self) -> str:
        """The same, and of how many."""
        stage = f"stage {self.stage} of {self.stages}"
        ranks = self.tensor.size
        return stage if ranks == 1 else f"rank {self.rank} of {ranks} of {stage}"


@attrs.frozen
class Commit:
    """Coordinator to peer: all have accepted; keep the place."""

    session: str


@attrs.frozen
class Activate:
    """Coordinator to peer: all have committed; write the TOML and start the stage.

    ``fabric`` are the addresses that the ranks of the peer's stage reach each other at, where
    their collectives do not go over the cluster's own connections.
    """

    session: str
    fabric: tuple[str, ...] = ()


@attrs.frozen
class Release:
    """Coordinator to peer: the session is over or abandoned; be ready for another."""

    session: str
    reason: str


@attrs.frozen
class Ping:
    """Coordinator to peer: are you there? ``number`` counts up."""

    number: int


@attrs.frozen
class Accepted:
    """Peer to coordinator: the offer can be met; ``fabric`` is its own, see :class:`Activate`."""

    session: str
    fabric: str = ""


@attrs.frozen
class Refused:
    """Peer to coordinator: it cannot, because; ``text`` says what to do."""

    session: str
    reason: RefusalReason
    text: str


@attrs.frozen
class Committed:
    """Peer to coordinator: the place is kept."""

    session: str


@attrs.frozen
class Activated:
    """Peer to coordinator: the TOML is written, the stage is starting."""

    session: str


@attrs.frozen
class Reported:
    """Peer to coordinator: what the stage's worker says."""

    session: str
    report: Loading | Loaded | Failed | Ended | Beat


@attrs.frozen
class Pong:
    """Peer to coordinator: the answer to the ping of this ``number``.

    ``clock`` is the peer's monotonic clock in seconds; ``silent`` the seconds since its worker
    last gave a sign of life, None while there is no worker that should.
    """

    number: int
    clock: float
    silent: float | None = None


ToPeer = Offer | Commit | Activate | Release | Ping
ToCoordinator = Accepted | Refused | Committed | Activated | Reported | Pong

"""What two nodes tell each other about themselves in the handshake."""

from __future__ import annotations

from typing import Literal

import attrs

PROTOCOL_VERSION = 5

Role = Literal["coordinator", "peer"]
Device = Literal["cpu", "gpu"]


@attrs.frozen
class Purpose:
    """What a connection is for.

    A ``control`` connection carries the messages of :mod:`mlxcel.cluster.messages`. A ``data``
    connection carries the frames of the link named ``link`` (such as ``0-1``, ``engine-0``,
    ``2-engine``) of the run named ``session``, in the class ``traffic``.
    """

    kind: Literal["control", "data"] = "control"
    session: str = ""
    link: str = ""
    traffic: Literal["", "pp_activation", "tp_collective"] = ""


@attrs.frozen
class Introduction:
    """One node: its name and role, what it runs with, what it has.

    ``node`` is ``coordinator`` or the address that a peer listens on. ``versions`` are those of
    mlxcel, MLX, mlx-lm and the BLAS; ``plugins`` the version of each installed plugin by
    ``kind:name``; ``families`` the wire names of the families that it can run. ``memory`` are
    the bytes that are free for a stage, 0 on a coordinator, and ``device`` what it computes on.
    """

    node: str
    role: Role
    cluster: str
    versions: dict[str, str]
    plugins: dict[str, str]
    families: tuple[str, ...]
    memory: int = 0
    device: Device = "cpu"
    fast_blas: bool = False
    purpose: Purpose = attrs.field(factory=Purpose)

"""Connect to another node and prove each other's knowledge of the secret."""

from __future__ import annotations

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.secret import ClusterSecret
from mlxcel.cluster.session import Session


async def dial(
    address: Address, secret: ClusterSecret, introduction: Introduction, timeout: float
) -> Session:
    """An authenticated connection to the node at ``address``, within ``timeout`` seconds.

    Args:
        introduction: What to say of this node; its ``purpose`` says what the connection is for.

    Raises:
        Unreachable: Nothing answers there, or the name is unknown.
        NotANode: Something else listens there.
        VersionMismatch: The node speaks another protocol version; both are in the error.
        SecretMismatch: It has another secret.
        PeerFull: It has no room for another connection.
        PeerRefused: It refuses this node; ``problem`` holds its reason.
        DeadlineError: It did not answer in time.
    """
    raise NotImplementedError

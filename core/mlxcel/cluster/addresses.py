"""Addresses of nodes: ``host:port``, the host a name or an IP address."""

from __future__ import annotations

import ipaddress
import re

import attrs

from mlxcel.errors import UsageError

HIGHEST_PORT = 65535

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # as a name's last part it makes an old form of IPv4
_FORM = "Write HOST:PORT, such as 192.168.1.11:19001, mac.local:19001 or [fd00::1]:19001."


@attrs.frozen(order=False)
class Address:
    """Where a node listens; ``host`` is in lower case, an IP address in its shortest form.

    Make one with :func:`parse_address`. Its text is what the cluster's TOML has, and what the
    order of peers goes by.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of the same machine reach it."""
        ip = _ip(self.host)
        return self.host == "localhost" if ip is None else ip.is_loopback

    @property
    def is_unspecified(self) -> bool:
        """Whether it stands for all addresses of a machine: one can listen there, not dial."""
        ip = _ip(self.host)
        return ip is not None and ip.is_unspecified


def parse_address(text: str, name: str) -> Address:
    """``text`` as an address; ``name`` is the flag or key it comes from.

    Port 0 and unspecified hosts are let through: whether they make sense depends on whose
    address it is.

    Raises:
        UsageError: It has another form, or no machine can have such an address.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or port.endswith("]"):
        raise UsageError(f"{name}: {text!r} has no port.", _FORM)
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > HIGHEST_PORT:
        raise UsageError(f"{name}: {text!r} has no port from 0 to {HIGHEST_PORT}.", _FORM)
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if bracketed != (":" in host):
        raise UsageError(f"{name}: {text!r} is no address.", _FORM)
    return Address(parse_host(host, name), int(port))


def parse_host(text: str, name: str, *, broadcast: bool = False) -> str:
    """``text``, an IP address or a host name, in the one form that it is compared in.

    Args:
        broadcast: Whether it may stand for several machines.

    Raises:
        UsageError: It is neither, or no machine's address.
    """
    host = text.strip().lower()
    if ip := _ip(host):
        if not broadcast and (ip.is_multicast or str(ip) == "255.255.255.255"):
            raise UsageError(f"{name}: {text!r} is no single machine's address.", _FORM)
        return str(ip)
    labels = host.removesuffix(".").split(".")
    if (
        len(host) > 253
        or not all(_LABEL.fullmatch(label) for label in labels)
        or _NUMBER.fullmatch(labels[-1])
    ):
        raise UsageError(f"{name}: {text!r} is neither an IP address nor a host name.", _FORM)
    return ".".join(labels)


def parse_addresses(text: str, name: str) -> tuple[Address, ...]:
    """The addresses of a comma-separated list, in its order.

    Raises:
        UsageError: One of them is none, or one stands there twice.
    """
    addresses = tuple(parse_address(part, name) for part in text.split(","))
    for index, address in enumerate(addresses):
        if address in addresses[:index]:
            raise UsageError(
                f"{name} has {address} twice.", "Every peer has an address of its own."
            )
    return addresses


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip

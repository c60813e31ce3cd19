"""Addresses as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.cluster.addresses import Address, parse_address, parse_addresses, parse_host
from mlxcel.errors import UsageError


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("192.168.1.11:19001", "192.168.1.11", 19001, "192.168.1.11:19001"),
        (" Mac-Studio.local:80 ", "mac-studio.local", 80, "mac-studio.local:80"),
        ("node_1.:1", "node_1", 1, "node_1:1"),
        ("[::1]:19000", "::1", 19000, "[::1]:19000"),
        ("[FD00:0:0::5]:9", "fd00::5", 9, "[fd00::5]:9"),
        ("[::ffff:10.0.0.1]:9", "10.0.0.1", 9, "10.0.0.1:9"),
        ("0.0.0.0:0", "0.0.0.0", 0, "0.0.0.0:0"),
    ],
)
def test_addresses(text: str, host: str, port: int, shown: str) -> None:
    """Names and IP addresses come out in one form, whatever way they were written."""
    address = parse_address(text, "--flag")
    assert (address.host, address.port, str(address)) == (host, port, shown)
    assert parse_address(shown, "--flag") == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":1",
        "host:",
        "host:port",
        "host:-1",
        "host:65536",
        "host:\uff11",
        "::1",
        "::1:19000",
        "[::1]",
        "[host]:1",
        "a b:1",
        "-a:1",
        "a..b:1",
        "x" * 64 + ":1",
        "192.168.1.300:1",
        "192.168.1:1",
        "0x7f000001:1",
        "127.000.0.1:1",
        "255.255.255.255:1",
        "224.0.0.1:1",
        "http://host:1",
    ],
)
def test_what_is_no_address(text: str) -> None:
    """It is refused with the flag's name and the form."""
    with pytest.raises(UsageError) as caught:
        parse_address(text, "--flag")
    assert str(caught.value).startswith("--flag: ")
    assert "HOST:PORT" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "loopback", "unspecified"),
    [
        ("127.0.0.1", True, False),
        ("127.9.9.9", True, False),
        ("localhost", True, False),
        ("::1", True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("10.0.0.1", False, False),
        ("mac.local", False, False),
    ],
)
def test_which_addresses_others_reach(host: str, loopback: bool, unspecified: bool) -> None:
    """Loopback and unspecified hosts are known as such."""
    address = Address(host, 1)
    assert (address.is_loopback, address.is_unspecified) == (loopback, unspecified)


def test_lists_keep_their_order() -> None:
    """A comma-separated list may have spaces."""
    assert list(map(str, parse_addresses("b:2, a:1", "--flag"))) == ["b:2", "a:1"]


@pytest.mark.parametrize("text", ["a:1,b:2,A:1", "[::1]:2,[0:0::1]:2"])
def test_lists_have_no_address_twice(text: str) -> None:
    """Two spellings of one address are one address."""
    with pytest.raises(UsageError, match="twice"):
        parse_addresses(text, "--flag")


def test_a_target_may_be_many() -> None:
    """Only where it says so may a host stand for a whole subnet."""
    assert parse_host("255.255.255.255", "--flag", broadcast=True) == "255.255.255.255"
    with pytest.raises(UsageError, match="no single machine"):
        parse_host("255.255.255.255", "--flag")


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    """Whatever is read comes back from its own text."""
    try:
        address = parse_address(text, "--flag")
    except UsageError:
        return
    assert parse_address(str(address), "--flag") == address

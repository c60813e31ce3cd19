"""Making a transport by its name."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel.errors import PluginError
from mlxcel.plugins import Plugins
from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.make import make_transport

HEADER = 'from mlxcel.hookspecs import hookimpl\n\napi_version = "1.0"\n\n'
MAKES = """
class Fake:
    name = {name!r}

@hookimpl
def mlxcel_make_transport(name, options):
    return Fake() if name == {name!r} else None
"""


def install(site: Any, name: str, source: str) -> None:
    site.module(f"fake_transport_{name}", HEADER + source)
    points = {"mlxcel.transports": {name: f"fake_transport_{name}"}}
    site.distribution(f"fake-transport-{name}", points)


def discover(site: Any) -> Plugins:
    return Plugins.discover(environ={}, entry_points=site.entry_points())


def make(plugins: Plugins, name: str) -> Any:
    return make_transport(plugins, name, TransportOptions())


def test_each_name_is_answered_by_its_plugin(site: Any) -> None:
    """Several transports may be loaded at once."""
    install(site, "one", MAKES.format(name="one"))
    install(site, "two", MAKES.format(name="two"))
    plugins = discover(site)
    assert [make(plugins, name).name for name in ("one", "two", "one")] == ["one", "two", "one"]


def test_an_unknown_name_lists_the_installed_ones(site: Any) -> None:
    """The error says what there is."""
    install(site, "one", MAKES.format(name="one"))
    with pytest.raises(PluginError, match=r"transport plugin 'two'.*\(installed: one\)"):
        make(discover(site), "two")


def test_a_transport_must_implement_the_hook(site: Any) -> None:
    """A module without it is a failed plugin."""
    install(site, "one", "@hookimpl\ndef mlxcel_observe(event):\n    pass\n")
    with pytest.raises(PluginError, match="it does not implement mlxcel_make_transport"):
        make(discover(site), "one")


@pytest.mark.parametrize("made", ["None", "Fake()"])
def test_a_transport_must_be_what_was_asked_for(site: Any, made: str) -> None:
    """Neither nothing nor another one is taken for it."""
    source = MAKES.format(name="other").replace("Fake() if name == 'other' else None", made)
    install(site, "one", source)
    with pytest.raises(PluginError, match="it makes no transport of this name"):
        make(discover(site), "one")


def test_a_plugin_may_take_over(site: Any) -> None:
    """Hook plugins are asked too, so a test's double can stand in for any transport."""
    install(site, "one", MAKES.format(name="one"))
    site.hooks("double", MAKES.format(name="one").replace("class Fake:", "class Fake:\n    it = 1"))
    assert make(discover(site), "one").it == 1

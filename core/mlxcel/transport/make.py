"""Make the transport of a name, which a plugin provides."""

from __future__ import annotations

from mlxcel.errors import PluginError
from mlxcel.plugins import Plugins
from mlxcel.transport.contract import Transport, TransportOptions


def make_transport(plugins: Plugins, name: str, options: TransportOptions) -> Transport:
    """The transport called ``name``; its plugin is imported now.

    Raises:
        PluginError: There is no such plugin, it cannot be used, or it makes no transport of
            this name; the text lists what is installed.
    """
    plugins.load("transport", name)
    transport: Transport | None = plugins.hook.mlxcel_make_transport(name=name, options=options)
    if transport is None or transport.name != name:
        distribution = plugins.distribution("transport", name)
        raise PluginError("transport", name, distribution, "it makes no transport of this name.")
    return transport

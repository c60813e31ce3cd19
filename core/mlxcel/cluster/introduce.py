"""What a node says of itself: the versions of what it runs with, and its plugins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from mlxcel.cluster.introduction import Device, Introduction, Role
from mlxcel.plugins import Plugins

PACKAGES = ("mlxcel", "mlx", "mlx-lm")


def introduce(
    plugins: Plugins,
    *,
    node: str,
    role: Role,
    cluster: str,
    memory: int = 0,
    device: Device = "cpu",
    fast_blas: bool = False,
    blas: str | None = None,
) -> Introduction:
    """This node's introduction; neither MLX nor a plugin is imported for it.

    Args:
        blas: The name of the BLAS that its stages multiply with; a coordinator has none.
        node, role, cluster, memory, device, fast_blas: See :class:`Introduction`.
    """
    versions = {name: version(name) for name in PACKAGES}
    if blas is not None:
        versions["BLAS"] = blas
    return Introduction(
        node=node,
        role=role,
        cluster=cluster,
        versions=versions,
        plugins=plugin_versions(plugins),
        families=plugins.names("family"),
        memory=memory,
        device=device,
        fast_blas=fast_blas,
    )


def plugin_versions(plugins: Plugins) -> dict[str, str]:
    """``kind:name`` to the version of the distribution of all enabled plugins."""
    return {
        key.replace(" ", ":", 1): owner.rpartition(" ")[2]
        for key, owner in plugins.versions().items()
    }


def used_plugins(plugins: Plugins, family: str, transport: str) -> Mapping[str, str]:
    """Of :func:`plugin_versions` those that a run with this family and transport uses."""
    used = (f"family:{family.partition(':')[0]}", f"transport:{transport}")
    versions = plugin_versions(plugins)
    return {key: versions[key] for key in used if key in versions}

"""Which installed family runs a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, cast

from mlxcel.errors import PluginError, UnsupportedError
from mlxcel.family.contract import VISION_SUFFIX, Family

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.plugins import Plugins


def choose_family(config: ModelConfig, plugins: Plugins) -> tuple[str, Family]:
    """The wire name and the family that serves ``config``.

    A family whose wire name is the ``model_type`` comes before one that lists it. A
    checkpoint with a vision tower takes the family's ``_vlm`` name, if that is installed.

    Raises:
        PluginError: The chosen family does not load, or several list the model_type.
        UnsupportedError: No installed family serves it; the text names a package that would.
    """
    names = plugins.names("family")
    text_names = tuple(name for name in names if not name.endswith(VISION_SUFFIX))
    if config.model_type in text_names:
        chosen = config.model_type
    else:
        chosen = _listed_by(config.model_type, text_names, plugins)
    if config.has_vision and chosen + VISION_SUFFIX in names:
        chosen += VISION_SUFFIX
    return chosen, _load(chosen, plugins)


def known_distributions() -> Mapping[str, str]:
    """``model_type`` to the distribution that serves it, installed or not."""
    text = resources.files("mlxcel.family").joinpath("known.json").read_text(encoding="utf-8")
    return cast(Mapping[str, str], json.loads(text))


def _load(name: str, plugins: Plugins) -> Family:
    return cast(Family, plugins.load("family", name))  # the loader has checked the type


def _listed_by(model_type: str, names: tuple[str, ...], plugins: Plugins) -> str:
    """The wire name of the one family whose ``model_types`` has ``model_type``."""
    claimants: dict[int, str] = {}  # one wire name per family object
    for name in names:
        try:
            family = _load(name, plugins)
        except PluginError:
            if plugins.strict:
                raise
            continue  # a broken family harms only those who ask for it by name
        if model_type in family.model_types:
            claimants.setdefault(id(family), name)
    match list(claimants.values()):
        case [name]:
            return name
        case []:
            raise _unsupported(model_type, plugins)
        case several:
            owners = [f"{name!r} of {plugins.distribution('family', name)}" for name in several]
            raise PluginError(
                "family",
                model_type,
                " and ".join(plugins.distribution("family", name) for name in several),
                f"model_type {model_type!r} is listed by {' and '.join(owners)}; "
                f"uninstall one or leave it out with --no-plugin NAME.",
            )


def _unsupported(model_type: str, plugins: Plugins) -> UnsupportedError:
    records = plugins.records("family")
    installed = ", ".join(r.name for r in records if r.state == "loaded") or "none"
    problem = f"no installed family serves model_type {model_type!r} (installed: {installed})."
    package = known_distributions().get(model_type)
    if unusable := [r for r in records if r.distribution == package and r.state != "loaded"]:
        reasons = "; ".join(f"{record.name}: {record.reason}" for record in unusable)
        return UnsupportedError(problem, f"{package} would, but cannot be used. {reasons}")
    if package:
        return UnsupportedError(problem, f"Install the package that does: pip install {package}")
    return UnsupportedError(
        problem, "Install a family plugin that does, or write one: see docs/plugin-api.md."
    )

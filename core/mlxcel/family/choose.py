"""Which installed family runs a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import TYPE_CHECKING, cast

from mlxcel.errors import PluginError, UnsupportedError
from mlxcel.family.contract import VISION_SUFFIX, Family

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig
    from mlxcel.plugins import Plugins


def choose_family(config: ModelConfig, plugins: Plugins) -> tuple[str, Family]:
    """The wire name and the family that serves ``config``.

    A family whose wire name is the ``model_type`` comes before one that lists it, and that
    before a fallback, whose name gets the ``model_type`` behind a colon. A ``model_type`` of a
    known package goes to no fallback. A checkpoint with a vision tower takes the family's
    ``_vlm`` name, if that is installed.

    Raises:
        PluginError: The chosen family does not load, or several of equal rank would serve.
        UnsupportedError: No installed family serves it; the text names a package that would.
    """
    names = plugins.names("family")
    text_names = tuple(name for name in names if not name.endswith(VISION_SUFFIX))
    if config.model_type in text_names:
        chosen = config.model_type
    elif listed := _the_one(_listing(config.model_type, text_names, plugins), config, plugins):
        chosen = listed
    elif config.model_type in known_distributions():
        raise _unsupported(config.model_type, plugins)
    elif fallback := _the_one(_fallbacks(text_names, plugins), config, plugins):
        return f"{fallback}:{config.model_type}", _load(fallback, plugins)
    else:
        raise _unsupported(config.model_type, plugins)
    if config.has_vision and chosen + VISION_SUFFIX in names:
        chosen += VISION_SUFFIX
    return chosen, _load(chosen, plugins)


def known_distributions() -> Mapping[str, str]:
    """``model_type`` to the distribution that serves it, installed or not."""
    text = resources.files("mlxcel.family").joinpath("known.json").read_text(encoding="utf-8")
    return cast(Mapping[str, str], json.loads(text))


def _load(name: str, plugins: Plugins) -> Family:
    return cast(Family, plugins.load("family", name))  # the loader has checked the type


def _listing(model_type: str, names: tuple[str, ...], plugins: Plugins) -> list[str]:
    return _one_name_each(
        (name, family)
        for name, family in _loadable(names, plugins)
        if model_type in family.model_types
    )


def _fallbacks(names: tuple[str, ...], plugins: Plugins) -> list[str]:
    return _one_name_each(
        (name, family) for name, family in _loadable(names, plugins) if family.fallback
    )


def _loadable(names: tuple[str, ...], plugins: Plugins) -> Iterator[tuple[str, Family]]:
    """The families of ``names``; a broken one harms only those who ask for it by name."""
    for name in names:
        try:
            yield name, _load(name, plugins)
        except PluginError:
            if plugins.strict:
                raise


def _one_name_each(found: Iterable[tuple[str, Family]]) -> list[str]:
    names: dict[int, str] = {}
    for name, family in found:
        names.setdefault(id(family), name)
    return list(names.values())


def _the_one(names: list[str], config: ModelConfig, plugins: Plugins) -> str | None:
    """The only one of ``names``, or None if there is none. Several of equal rank conflict."""
    if len(names) < 2:
        return names[0] if names else None
    distributions = [plugins.distribution("family", name) for name in names]
    owners = [f"{name!r} of {owner}" for name, owner in zip(names, distributions, strict=True)]
    raise PluginError(
        "family",
        config.model_type,
        " and ".join(distributions),
        f"model_type {config.model_type!r} is claimed by {' and '.join(owners)}; "
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

"""Whether what an entry point names is what it should be."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlxcel import API_VERSION
from mlxcel.family.contract import Family
from mlxcel.plugin_entries import Entry, State


class Refused(Exception):
    """A plugin that was imported and did not pass a check."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state: State = state
        self.reason = reason


def api_of(plugin: object) -> str:
    """The API version that ``plugin`` states; empty if it states none."""
    version = getattr(plugin, "api_version", "")
    return version if isinstance(version, str) else repr(version)


def check(entry: Entry, plugin: object) -> None:
    """Check that ``plugin`` is what its entry point says.

    Raises:
        Refused: It is not.
    """
    api = api_of(plugin)
    if not api:
        raise Refused("failed", 'it has no api_version; a plugin states one, such as "1.0".')
    if not re.fullmatch(r"\d+\.\d+", api):
        raise Refused("failed", f'its api_version is {api!r}; "major.minor" was expected.')
    theirs, ours = int(api.split(".")[0]), int(API_VERSION.split(".")[0])
    if theirs != ours:
        upgrade = "mlxcel" if theirs > ours else entry.distribution or entry.name
        raise Refused(
            "incompatible",
            f"it was written for plugin API {api}, this mlxcel has {API_VERSION}; "
            f"upgrade {upgrade}.",
        )
    if entry.kind == "family":
        _check_family(entry.name, plugin)


def _check_family(name: str, plugin: object) -> None:
    if not isinstance(plugin, Family):
        raise Refused("failed", "it is not an instance of a subclass of mlxcel.family.Family.")
    for attribute in ("wire_names", "model_types"):
        value = getattr(plugin, attribute)
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise Refused("failed", f"its {attribute} is {value!r}, not a tuple of strings.")
    if name not in plugin.wire_names:
        raise Refused(
            "failed",
            f"its entry point is called {name!r}, which is not among its wire_names "
            f"({', '.join(plugin.wire_names) or 'none'}).",
        )


def contested_model_types(entries: Sequence[Entry]) -> dict[tuple[str, str], str]:
    """Reason per family entry that lists a model_type which another family lists too.

    A model_type that is some family's own wire name is that family's: nobody contests it.
    """
    families = [e for e in entries if e.state == "loaded" and isinstance(e.plugin, Family)]
    wire_names = {e.name for e in entries if e.kind == "family" and e.state != "disabled"}
    claims: dict[str, list[Entry]] = {}
    for entry in families:
        assert isinstance(entry.plugin, Family)
        for model_type in sorted(set(entry.plugin.model_types) - wire_names):
            claims.setdefault(model_type, []).append(entry)
    reasons: dict[tuple[str, str], str] = {}
    for model_type, claimants in sorted(claims.items()):
        if len({id(entry.plugin) for entry in claimants}) > 1:
            owners = " and ".join(sorted({entry.distribution for entry in claimants}))
            for entry in claimants:
                reasons[entry.key] = (
                    f"model_type {model_type!r} is listed by families of {owners}; checkpoints of "
                    f"this type are refused until one is uninstalled or disabled."
                )
    return reasons

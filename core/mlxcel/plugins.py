"""How plugins are found, checked, listed and disabled.

Entry points say what exists; reading them imports nothing. A plugin is imported when it is
first used, under a guard: one that raises, or even exits, becomes a record with a reason and
harms only whoever asks for it by name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Literal

import attrs
import pluggy

from mlxcel import API_VERSION, hookspecs
from mlxcel.errors import PluginError
from mlxcel.family.contract import Family
from mlxcel.plugin_selection import Selection

if TYPE_CHECKING:
    from mlxcel.observe.events import Event

GROUPS: Mapping[str, str] = {
    "mlxcel.families": "family",
    "mlxcel.transports": "transport",
    "mlxcel.triggers": "trigger",
    "mlxcel.executors": "executor",
    "mlxcel.weight_transfer": "weight_transfer",
    "mlxcel.plugins": "hooks",
}
"""Entry-point group to the kind of plugin that it names."""

STRICT = "MLXCEL_PLUGINS_STRICT"

State = Literal["loaded", "failed", "disabled", "duplicate", "incompatible"]
BAD_STATES: frozenset[State] = frozenset({"failed", "duplicate", "incompatible"})

_log = logging.getLogger(__name__)


def is_strict(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the first bad plugin stops everything, with its traceback."""
    return environ.get(STRICT, "") not in ("", "0")


@attrs.frozen
class PluginRecord:
    """One line of ``mlxcel plugins``: what an entry point turned out to be."""

    name: str
    kind: str
    distribution: str
    version: str
    api: str
    state: State
    reason: str
    hooks: tuple[str, ...] = ()
    location: str = ""


@attrs.define(eq=False)
class _Entry:
    """One entry point; ``state`` is None until somebody asks for the plugin."""

    kind: str
    point: metadata.EntryPoint
    distribution: str
    version: str
    state: State | None = None
    reason: str = ""
    plugin: object = None
    cause: BaseException | None = None

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.name

    def error(self) -> PluginError:
        error = PluginError(self.kind, self.name, self.distribution, self.reason)
        error.__cause__ = self.cause
        return error


class _Refused(Exception):
    """A plugin that was imported and did not pass a check."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state: State = state
        self.reason = reason


class Plugins:
    """The plugins of this process. Make one with :meth:`discover`.

    Attributes:
        notices: Lines to show the user: names in the lists that match nothing.
        without: The names that were left out (``--no-plugin``).
        strict: Whether the first bad plugin raises instead of becoming a record.
    """

    def __init__(
        self,
        entries: Iterable[_Entry],
        *,
        notices: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        strict: bool = False,
    ) -> None:
        self.notices = notices
        self.without = without
        self.strict = strict
        self._entries = sorted(entries, key=lambda entry: (*entry.key, entry.distribution))
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._lock = threading.RLock()
        self._complained: set[str] = set()

    @classmethod
    def discover(
        cls,
        *,
        environ: Mapping[str, str] = os.environ,
        without: Iterable[str] = (),
        entry_points: Iterable[metadata.EntryPoint] | None = None,
    ) -> Plugins:
        """Read which plugins are installed, importing none of them.

        Args:
            environ: Where the allow-list, the deny-list and strict mode are read from.
            without: Names of plugins to leave out (``--no-plugin``).
            entry_points: Instead of those of the installed distributions.
        """
        entries = _read_entries(_installed() if entry_points is None else entry_points)
        without = tuple(without)
        selection = Selection.read(environ, without)
        owners: dict[tuple[str, str], list[str]] = {}
        for entry in entries:
            owners.setdefault(entry.key, []).append(entry.distribution)
        for entry in entries:
            if refusal := selection.refusal(*entry.key):
                entry.state, entry.reason = "disabled", refusal
            elif len(claims := sorted(owners[entry.key])) > 1:
                entry.state = "duplicate"
                entry.reason = f"it is provided by {' and '.join(claims)}; uninstall all but one."
        return cls(
            entries,
            notices=selection.unmatched(owners),
            without=tuple(without),
            strict=is_strict(environ),
        )

    def names(self, kind: str) -> tuple[str, ...]:
        """The names of ``kind`` that are installed and not disabled, sorted; loads nothing."""
        enabled = {e.name for e in self._entries if e.kind == kind and e.state != "disabled"}
        return tuple(sorted(enabled))

    def distribution(self, kind: str, name: str) -> str:
        """The distribution that provides a plugin; empty if none does."""
        return next((e.distribution for e in self._entries if e.key == (kind, name)), "")

    def versions(self) -> dict[str, str]:
        """``"kind name"`` to ``"distribution version"`` of all enabled plugins; loads nothing."""
        return {
            f"{entry.kind} {entry.name}": f"{entry.distribution} {entry.version}"
            for entry in self._entries
            if entry.state != "disabled"
        }

    def load(self, kind: str, name: str) -> object:
        """The plugin of this name, imported on first use.

        A fallback family's name may carry the ``model_type`` it serves behind a colon.

        Raises:
            PluginError: It is not installed, disabled, a duplicate, of another API version,
                or broken; the import's own exception is the cause.
        """
        own = name.partition(":")[0] if kind == "family" else name
        entry = next((e for e in self._entries if e.key == (kind, own)), None)
        if entry is None:
            installed = ", ".join(self.names(kind)) or "none"
            raise PluginError(kind, name, "", f"it is not installed (installed: {installed}).")
        if self._settle(entry) != "loaded":
            raise entry.error()
        return entry.plugin

    def records(self, kind: str | None = None) -> tuple[PluginRecord, ...]:
        """What every installed plugin (of ``kind``) turned out to be, by kind and name.

        Imports the light modules of all that are not disabled.

        Raises:
            PluginError: In strict mode, at the first bad one.
        """
        entries = [entry for entry in self._entries if kind in (None, entry.kind)]
        for entry in entries:
            self._settle_or_raise(entry)
        contested = _contested_model_types(self._entries)
        records = tuple(self._record(entry, contested.get(entry.key, "")) for entry in entries)
        if self.strict and (bad := next((r for r in records if r.state in BAD_STATES), None)):
            raise PluginError(bad.kind, bad.name, bad.distribution, bad.reason)
        return records

    @property
    def hook(self) -> pluggy.HookRelay:
        """Call a hook: ``plugins.hook.mlxcel_…(name=value)``. Loads the hook plugins first."""
        for entry in self._entries:
            if entry.kind == "hooks":
                self._settle_or_raise(entry)
        return self._manager.hook

    def register_default(self, implementation: object) -> None:
        """Add one of mlxcel's own implementations; mark it ``@hookimpl(trylast=True)``."""
        with self._lock:
            if not self._manager.is_registered(implementation):
                self._manager.register(implementation)

    def observe(self, event: Event) -> None:
        """Tell every observer, one by one; one that raises is logged once."""
        for observer in self.hook.mlxcel_observe.get_hookimpls():
            try:
                observer.function(*(event for name in observer.argnames if name == "event"))
            except KeyboardInterrupt:
                raise
            except BaseException:
                if observer.plugin_name not in self._complained:
                    self._complained.add(observer.plugin_name)
                    _log.exception("observer %s raised and is ignored", observer.plugin_name)

    def _settle(self, entry: _Entry) -> State:
        """Import, check and (a hook plugin) register ``entry``, once."""
        with self._lock:
            if entry.state is None:
                try:
                    plugin = entry.point.load()
                    _check(entry, plugin)
                    if entry.kind == "hooks":
                        self._register(entry, plugin)
                    entry.plugin, entry.state = plugin, "loaded"
                except KeyboardInterrupt:
                    raise
                except _Refused as refused:
                    entry.state, entry.reason = refused.state, refused.reason
                    entry.plugin = plugin
                except BaseException as error:
                    text = " ".join(traceback.format_exception_only(error)[-1].split())
                    entry.state, entry.cause = "failed", error
                    entry.reason = f"{text} ({STRICT}=1 shows the traceback.)"
            return entry.state

    def _settle_or_raise(self, entry: _Entry) -> None:
        if self._settle(entry) in BAD_STATES and self.strict:
            raise entry.error()

    def _register(self, entry: _Entry, plugin: object) -> None:
        """Register a hook plugin whole or not at all."""
        name = f"{entry.name} ({entry.distribution})"
        try:
            self._manager.register(plugin, name)
            implementations = [
                implementation
                for caller in self._manager.get_hookcallers(plugin) or ()
                for implementation in caller.get_hookimpls()
                if implementation.plugin is plugin
            ]
            known = {name for name in vars(hookspecs) if name.startswith("mlxcel_")}
            hooks = {i.opts["specname"] or i.function.__name__ for i in implementations}
            if not hooks:
                raise _Refused(
                    "failed",
                    "it implements no hook; mark functions with mlxcel.hookspecs.hookimpl.",
                )
            if unknown := sorted(hooks - known):
                raise _Refused(
                    "failed",
                    f"it implements {', '.join(unknown)}, which plugin API {API_VERSION} of this "
                    f"mlxcel does not have (the plugin states {_api(plugin)}).",
                )
            observers = self._manager.hook.mlxcel_observe.get_hookimpls()
            if any(o.plugin is plugin and (o.wrapper or o.hookwrapper) for o in observers):
                raise _Refused("failed", "mlxcel_observe cannot be a wrapper.")
        except BaseException:
            with contextlib.suppress(Exception):
                self._manager.unregister(name=name)
            raise

    def _record(self, entry: _Entry, contested: str) -> PluginRecord:
        assert entry.state is not None, "settled by the caller"
        hooks = self._manager.get_hookcallers(entry.plugin) if entry.plugin is not None else None
        return PluginRecord(
            name=entry.name,
            kind=entry.kind,
            distribution=entry.distribution,
            version=entry.version,
            api=_api(entry.plugin),
            state="duplicate" if contested else entry.state,
            reason=contested or entry.reason,
            hooks=tuple(sorted(caller.name for caller in hooks or ())),
            location=_location(entry.point.module),
        )


def _installed() -> Iterable[metadata.EntryPoint]:
    points = metadata.entry_points()  # of each distribution, only the first on the path
    return [point for group in GROUPS for point in points.select(group=group)]


def _read_entries(points: Iterable[metadata.EntryPoint]) -> list[_Entry]:
    """An entry per kind, name and distribution; the first wins, as an import would."""
    entries: dict[tuple[str, str, str], _Entry] = {}
    for point in points:
        if kind := GROUPS.get(point.group):
            distribution = point.dist.name if point.dist else ""
            version = point.dist.version if point.dist else ""
            normalized = re.sub(r"[-_.]+", "-", distribution).lower()
            entry = _Entry(kind, point, distribution, version)
            entries.setdefault((kind, point.name, normalized), entry)
    return list(entries.values())


def _api(plugin: object) -> str:
    version = getattr(plugin, "api_version", "")
    return version if isinstance(version, str) else repr(version)


def _check(entry: _Entry, plugin: object) -> None:
    """Whether ``plugin`` is what its entry point says. Raises _Refused."""
    api = _api(plugin)
    if not api:
        raise _Refused("failed", 'it has no api_version; a plugin states one, such as "1.0".')
    if not re.fullmatch(r"\d+\.\d+", api):
        raise _Refused("failed", f'its api_version is {api!r}; "major.minor" was expected.')
    theirs, ours = int(api.split(".")[0]), int(API_VERSION.split(".")[0])
    if theirs != ours:
        upgrade = "mlxcel" if theirs > ours else entry.distribution or entry.name
        raise _Refused(
            "incompatible",
            f"it was written for plugin API {api}, this mlxcel has {API_VERSION}; "
            f"upgrade {upgrade}.",
        )
    if entry.kind == "family":
        _check_family(entry.name, plugin)


def _check_family(name: str, plugin: object) -> None:
    if not isinstance(plugin, Family):
        raise _Refused("failed", "it is not an instance of a subclass of mlxcel.family.Family.")
    for attribute in ("wire_names", "model_types"):
        value = getattr(plugin, attribute)
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise _Refused("failed", f"its {attribute} is {value!r}, not a tuple of strings.")
    if name not in plugin.wire_names:
        raise _Refused(
            "failed",
            f"its entry point is called {name!r}, which is not among its wire_names "
            f"({', '.join(plugin.wire_names) or 'none'}).",
        )


def _contested_model_types(entries: Sequence[_Entry]) -> dict[tuple[str, str], str]:
    """Reason per family entry that lists a model_type which another family lists too.

    A model_type that is some family's own wire name is that family's: nobody contests it.
    """
    families = [e for e in entries if e.state == "loaded" and isinstance(e.plugin, Family)]
    wire_names = {e.name for e in entries if e.kind == "family" and e.state != "disabled"}
    claims: dict[str, list[_Entry]] = {}
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


def _location(module: str) -> str:
    """The file of ``module`` if it is imported, else where its top package would come from."""
    if imported := getattr(sys.modules.get(module), "__file__", None):
        return str(imported)
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module.partition(".")[0])
        return (spec.origin or "") if spec else ""
    return ""

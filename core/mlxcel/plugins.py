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
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

import attrs
import pluggy

from mlxcel import API_VERSION, hookspecs
from mlxcel.errors import PluginError
from mlxcel.plugin_checks import Refused, api_of, check, contested_model_types
from mlxcel.plugin_entries import BAD_STATES, Entry, State, installed, read_entries
from mlxcel.plugin_selection import Selection

if TYPE_CHECKING:
    from mlxcel.observe.events import Event

HOOKS: Mapping[str, str | None] = {"hooks": None, "transport": "mlxcel_make_transport"}
"""The kinds of plugins that are made of hooks, and which hook they must implement."""

STRICT = "MLXCEL_PLUGINS_STRICT"

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


class Plugins:
    """The plugins of this process. Make one with :meth:`discover`.

    Attributes:
        notices: Lines to show the user: names in the lists that match nothing.
        without: The names that were left out (``--no-plugin``).
        strict: Whether the first bad plugin raises instead of becoming a record.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
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
        entries = read_entries(installed() if entry_points is None else entry_points)
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
        contested = contested_model_types(self._entries)
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

    def _settle(self, entry: Entry) -> State:
        """Import, check and (one that is made of hooks) register ``entry``, once."""
        with self._lock:
            if entry.state is None:
                try:
                    plugin = entry.point.load()
                    check(entry, plugin)
                    if entry.kind in HOOKS:
                        self._register(entry, plugin)
                    entry.plugin, entry.state = plugin, "loaded"
                except KeyboardInterrupt:
                    raise
                except Refused as refused:
                    entry.state, entry.reason = refused.state, refused.reason
                    entry.plugin = plugin
                except BaseException as error:
                    text = " ".join(traceback.format_exception_only(error)[-1].split())
                    entry.state, entry.cause = "failed", error
                    entry.reason = f"{text} ({STRICT}=1 shows the traceback.)"
            return entry.state

    def _settle_or_raise(self, entry: Entry) -> None:
        if self._settle(entry) in BAD_STATES and self.strict:
            raise entry.error()

    def _register(self, entry: Entry, plugin: object) -> None:
        """Register a hook plugin whole or not at all."""
        if self._manager.is_registered(plugin):
            return  # under another name
        kind = "" if entry.kind == "hooks" else f"{entry.kind} "
        name = f"{kind}{entry.name} ({entry.distribution})"
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
                raise Refused(
                    "failed",
                    "it implements no hook; mark functions with mlxcel.hookspecs.hookimpl.",
                )
            if (required := HOOKS[entry.kind]) and required not in hooks:
                raise Refused("failed", f"it does not implement {required}.")
            if unknown := sorted(hooks - known):
                raise Refused(
                    "failed",
                    f"it implements {', '.join(unknown)}, which plugin API {API_VERSION} of this "
                    f"mlxcel does not have (the plugin states {api_of(plugin)}).",
                )
            observers = self._manager.hook.mlxcel_observe.get_hookimpls()
            if any(o.plugin is plugin and (o.wrapper or o.hookwrapper) for o in observers):
                raise Refused("failed", "mlxcel_observe cannot be a wrapper.")
        except BaseException:
            with contextlib.suppress(Exception):
                self._manager.unregister(name=name)
            raise

    def _record(self, entry: Entry, contested: str) -> PluginRecord:
        assert entry.state is not None, "settled by the caller"
        hooks = self._manager.get_hookcallers(entry.plugin) if entry.plugin is not None else None
        return PluginRecord(
            name=entry.name,
            kind=entry.kind,
            distribution=entry.distribution,
            version=entry.version,
            api=api_of(entry.plugin),
            state="duplicate" if contested else entry.state,
            reason=contested or entry.reason,
            hooks=tuple(sorted(caller.name for caller in hooks or ())),
            location=_location(entry.point.module),
        )


def _location(module: str) -> str:
    """The file of ``module`` if it is imported, else where its top package would come from."""
    if imported := getattr(sys.modules.get(module), "__file__", None):
        return str(imported)
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module.partition(".")[0])
        return (spec.origin or "") if spec else ""
    return ""

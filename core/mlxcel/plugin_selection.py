"""Which of the installed plugins the user wants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import attrs

ALLOW = "MLXCEL_PLUGINS"
DENY = "MLXCEL_DISABLE_PLUGINS"
WITHOUT = "--no-plugin"


@attrs.frozen
class Selection:
    """Which plugins the user wants: an allow-list, and two ways to say no.

    Names are entry-point names, or ``kind:name`` where two kinds share one. An empty
    allow-list allows all.
    """

    allowed: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    @classmethod
    def read(cls, environ: Mapping[str, str], without: Iterable[str]) -> Selection:
        """The lists of the environment, and the names given to ``--no-plugin``."""

        def names(variable: str) -> frozenset[str]:
            parts = environ.get(variable, "").split(",")
            return frozenset(part.strip() for part in parts if part.strip())

        return cls(names(ALLOW), names(DENY), frozenset(without))

    def refusal(self, kind: str, name: str) -> str:
        """Why this plugin is off; empty if it is on."""
        spellings = {name, f"{kind}:{name}"}
        if spellings & self.without:
            return f"it is disabled by {WITHOUT}."
        if spellings & self.denied:
            return f"it is disabled by {DENY}."
        if self.allowed and not spellings & self.allowed:
            return f"it is not in {ALLOW}."
        return ""

    def unmatched(self, installed: Collection[tuple[str, str]]) -> tuple[str, ...]:
        """One line per listed name that no installed (kind, name) answers to."""
        known = {name for _, name in installed} | {f"{kind}:{name}" for kind, name in installed}
        return tuple(
            f"{source} names {name!r}, which no installed plugin is called"
            for source, names in (
                (WITHOUT, self.without),
                (DENY, self.denied),
                (ALLOW, self.allowed),
            )
            for name in sorted(names - known)
        )

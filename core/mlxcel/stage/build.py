"""Core's own answer to the hook ``mlxcel_build_executor``."""

from __future__ import annotations

import attrs

from mlxcel.family.contract import Family
from mlxcel.hookspecs import hookimpl
from mlxcel.plugins import Plugins
from mlxcel.stage.contract import StageExecutor, StageSpec
from mlxcel.tensor.collectives import Collectives


def build_executor(
    plugins: Plugins, spec: StageSpec, collectives: Collectives | None = None
) -> StageExecutor:
    """The executor of ``spec``: a plugin's, or the family's own."""
    executor: StageExecutor = plugins.hook.mlxcel_build_executor(spec=spec, collectives=collectives)
    return executor


@attrs.frozen
class FamilyExecutors:
    """Runs a stage with its family, unless a plugin's executor comes first."""

    plugins: Plugins

    @hookimpl(trylast=True)
    def mlxcel_build_executor(
        self, spec: StageSpec, collectives: Collectives | None
    ) -> StageExecutor:
        from mlxcel.stage.executor import FamilyExecutor

        family = self.plugins.load("family", spec.family)
        assert isinstance(family, Family)  # the loader checks what an entry point names
        return FamilyExecutor(spec, family, collectives)

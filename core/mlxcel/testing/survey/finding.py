"""What the survey found out about one architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs

from mlxcel.checkpoint.config import ModelConfig
from mlxcel.family.choose import choose_family
from mlxcel.family.contract import Family
from mlxcel.plugins import Plugins

Outcome = Literal["own", "split", "refused", "differs", "none"]


@attrs.frozen
class Finding:
    """One line of the survey.

    Attributes:
        architecture: The name of mlx-lm's module.
        family: The wire name of the family that serves it.
        outcome: ``own``: a family of its own serves it, and its tests prove it. ``split``: cut
            at every layer it gives the same bits. ``refused``, ``differs``, ``none``: it is
            refused, gives other results, or there is no tiny model of it to try.
        detail: Why, or what else is to know.
    """

    architecture: str
    family: str
    outcome: Outcome
    detail: str = ""


def served_by(architecture: str, plugins: Plugins) -> tuple[str, Family]:
    """The wire name and the family that serves ``architecture``.

    Raises:
        UnsupportedError: None does; there is one for all others if it is installed.
    """
    config = ModelConfig(
        path=Path("config.json"), raw={}, text={}, model_type=architecture, num_layers=1
    )
    return choose_family(config, plugins)

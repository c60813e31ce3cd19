"""What the survey found out about one architecture."""

from __future__ import annotations

from typing import Literal

import attrs

Outcome = Literal["own", "split", "refused", "differs", "none"]


@attrs.frozen
class Finding:
    """One line of the survey.

    Attributes:
        architecture: The name of mlx-lm's module.
        family: The wire name of the family that serves it; empty if nobody knows.
        outcome: ``own``: a family of its own serves it, and its tests prove it. ``split``: cut
            at every layer it gives the same bits. ``refused``, ``differs``, ``none``: it is
            refused, gives other results, or there is no tiny model of it to try.
        detail: Why, or what else is to know.
    """

    architecture: str
    family: str
    outcome: Outcome
    detail: str = ""

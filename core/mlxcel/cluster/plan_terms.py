"""What a coordinator's flags say about the plan that every node on the manual path makes, too."""

from __future__ import annotations

import attrs
from attrs.validators import ge, optional

from mlxcel.partition.balance import BalanceBy

CONTEXT = 2048
"""Tokens of one sequence that every plan leaves room for, unless the operator says otherwise."""


@attrs.frozen
class PlanTerms:
    """By what the layers are divided, and what room is left for caches.

    ``kv_budget`` are the cache bytes of every stage, ``context`` the tokens of one sequence that
    must fit where there is no such budget, ``chunk`` the prompt tokens of one step at most.
    """

    by: BalanceBy = "bytes"
    kv_budget: int | None = attrs.field(default=None, validator=optional(ge(0)))
    context: int = attrs.field(default=CONTEXT, validator=ge(1))
    chunk: int = attrs.field(default=512, validator=ge(1))


USUAL = PlanTerms()
"""What no flag changes."""

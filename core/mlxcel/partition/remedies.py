"""What would help a plan that does not fit the memory."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from mlxcel.errors import MemoryBudgetError
from mlxcel.partition.balance import balance
from mlxcel.partition.memory import Budgets
from mlxcel.partition.profile import ModelProfile
from mlxcel.partition.ranges import legal_cuts


@attrs.frozen
class Wording:
    """How an operator asks for so many stages, so many ranks of each, and for fewer caches."""

    stages: str = "--pp-size {}"
    ranks: str = "--tp-size {}"
    caches: str = "fewer --sequences or a shorter --context"


FLAGS = Wording()


def remedies(
    profile: ModelProfile,
    budgets: Budgets,
    *,
    quantized: bool,
    ranks: int | None = None,
    wording: Wording = FLAGS,
) -> Iterator[str]:
    """One clause each, for an operator whose ``budgets`` do not hold ``profile``.

    Args:
        quantized: Whether the weights are counted as packed.
        ranks: How many ranks of each stage are enough, if more than there are can be.
    """
    stages = len(budgets)
    if fits(profile, budgets):
        yield "another division of the layers (leave --pp-layers out)"
    pieces = len(legal_cuts(len(profile.layers), profile.groups)) + 1
    if stages < pieces:
        yield _more_stages(profile, budgets, pieces, wording)
    if ranks is not None:
        yield f"{ranks} ranks a stage ({wording.ranks.format(ranks)})"
    if any(layer.kv_bytes for layer in profile.layers):
        without = profile.with_caches([0] * len(profile.layers))
        alone = "" if fits(without, budgets) else ", though not alone"
        yield f"{wording.caches}{alone}"
    if not quantized:
        yield "quantized weights"


def fits(profile: ModelProfile, budgets: Budgets) -> bool:
    """Whether there is a division into as many stages as there are budgets."""
    try:
        balance(profile, len(budgets), budgets=budgets)
    except MemoryBudgetError:
        return False
    return True


def _more_stages(profile: ModelProfile, budgets: Budgets, pieces: int, wording: Wording) -> str:
    """With stages of one size, the least number of them that is enough."""
    if len(set(budgets)) > 1:
        return "more stages"
    for stages in range(len(budgets) + 1, pieces + 1):
        if fits(profile, [budgets[0]] * stages):
            return f"{stages} stages of this size ({wording.stages.format(stages)})"
    return "stages with more memory, as more of this size are not enough"

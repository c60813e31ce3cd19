"""Layer ranges given by hand: ``--pp-layers 0-19,20-39``.

The text is inclusive, as people count; everything else uses half-open Python ranges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mlxcel.errors import PartitionError
from mlxcel.errors.words import named_layers, verb
from mlxcel.family.contract import LayerAdjacencyGroup

_RANGE = re.compile(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?")
_FORM = "The form is `--pp-layers 0-19,20-39`: one range per stage, both ends included."


def parse_ranges(text: str) -> tuple[range, ...]:
    """``"0-19,20"`` as ``(range(0, 20), range(20, 21))``, one range per stage.

    Raises:
        PartitionError: The text has not this form, or a range runs backwards.
    """
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise PartitionError(f"--pp-layers {text!r}: {part.strip()!r} is no range.", _FORM)
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise PartitionError(f"--pp-layers {text!r}: {part.strip()!r} runs backwards.", _FORM)
        ranges.append(range(first, last + 1))
    return tuple(ranges)


def format_ranges(ranges: Iterable[range]) -> str:
    """The inverse of :func:`parse_ranges`; no range may be empty."""
    return ",".join(f"{r.start}" if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in ranges)


def format_layers(layers: Iterable[int]) -> str:
    """Ascending layer numbers in the form of :func:`format_ranges`: ``0-2,7``."""
    runs: list[range] = []
    for layer in layers:
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return format_ranges(runs)


def legal_cuts(num_layers: int, groups: Sequence[LayerAdjacencyGroup]) -> tuple[int, ...]:
    """The layers, ascending, at which a stage after the first may begin."""
    return tuple(
        cut for cut in range(1, num_layers) if not any(group.cut_by(cut) for group in groups)
    )


def validate_ranges(
    ranges: Sequence[range], num_layers: int, groups: Sequence[LayerAdjacencyGroup] = ()
) -> None:
    """Check that ``ranges`` hold every layer exactly once, in order, and divide no group.

    Raises:
        PartitionError: They do not; the text names the layers, and for a divided group its
            source, its consumer, its reason and the nearest legal cuts.
    """
    way_out = (
        f"The model has {named_layers(format_ranges([range(num_layers)]))}: give each exactly "
        f"once, in order, one range per stage."
    )

    def refuse(problem: str) -> PartitionError:
        return PartitionError(
            f"--pp-layers {format_ranges(filter(len, ranges))}: {problem}", way_out
        )

    expected = 0
    for stage, layers in enumerate(ranges):
        if not layers:
            raise refuse(f"stage {stage} has no layer.")
        if layers.stop > num_layers:
            raise refuse(f"there is no layer {layers.stop - 1}.")
        if layers.start < expected:
            raise refuse(f"stage {stage} begins at layer {layers.start}, which comes earlier too.")
        if layers.start > expected:
            missing = format_ranges([range(expected, layers.start)])
            raise refuse(f"{_missing(missing)} before stage {stage}.")
        expected = layers.stop
    if expected < num_layers:
        raise refuse(f"{_missing(format_ranges([range(expected, num_layers)]))}.")
    for layers in ranges[1:]:
        _check_cut(layers.start, num_layers, groups)


def _missing(layers: str) -> str:
    return f"{named_layers(layers)} {verb(layers, 'is', 'are')} missing"


def _check_cut(cut: int, num_layers: int, groups: Sequence[LayerAdjacencyGroup]) -> None:
    group = next((group for group in groups if group.cut_by(cut)), None)
    if group is None:
        return
    legal = legal_cuts(num_layers, groups)
    nearest = [max((c for c in legal if c < cut), default=None)]
    nearest.append(min((c for c in legal if c > cut), default=None))
    starts = " or ".join(f"layer {c}" for c in nearest if c is not None)
    way_out = (
        f"The nearest legal cuts begin a stage at {starts}."
        if starts
        else "This model has no legal cut: run it on one stage."
    )
    if group.mirrorable:
        way_out += " With --allow-mirrored-kv any cut will do, for a copy of that layer's cache."
    raise PartitionError(
        f"--pp-layers: a stage that begins at layer {cut} divides layers "
        f"{format_ranges([range(group.start, group.end)])}: source layer {group.start} and "
        f"consumer layer {group.end - 1} must share a stage ({group.reason}).",
        way_out,
    )

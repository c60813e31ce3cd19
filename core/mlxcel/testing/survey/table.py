"""The survey as the second table of docs/families.md."""

from __future__ import annotations

from collections.abc import Iterable

from mlxcel.testing.survey.finding import Finding

HEAD = "| architecture | served by | split at every layer |\n|---|---|---|"

_BATCHES = {
    "padded": "rows of a batch of 17, 5 and 11 tokens equal single runs",
    "equal": "prompts share a pass if they are equally long; rows equal single runs",
    "single": "one sequence at a time",
}


def row(finding: Finding) -> str:
    """The line of one architecture."""
    return f"| {finding.architecture} | `{finding.family}` | {_result(finding)} |"


def table(found: Iterable[Finding]) -> str:
    """All lines, under their head."""
    return "\n".join([HEAD, *map(row, found)])


def _result(finding: Finding) -> str:
    match finding.outcome:
        case "own":
            return "family of its own"
        case "split":
            return f"bit-identical; {_BATCHES[finding.detail]}"
        case "refused":
            return f"refused: {finding.detail}"
        case "differs":
            return f"differs: {finding.detail}"
        case "none":
            return f"not tried: {finding.detail}"

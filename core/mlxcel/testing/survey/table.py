"""The survey as the second table of docs/families.md."""

from __future__ import annotations

from collections.abc import Iterable

from mlxcel.testing.survey.finding import Finding

HEAD = "| architecture | served by | split at every layer |\n|---|---|---|"


def row(finding: Finding) -> str:
    """The line of one architecture."""
    served = f"`{finding.family}`" if finding.family else "–"
    return f"| {finding.architecture} | {served} | {_result(finding)} |"


def table(found: Iterable[Finding]) -> str:
    """All lines, under their head."""
    return "\n".join([HEAD, *map(row, found)])


def _result(finding: Finding) -> str:
    match finding.outcome:
        case "own":
            return "family of its own"
        case "split" if not finding.detail:
            return "bit-identical; ragged batch 17/5/11 equals single runs"
        case "split":
            return "bit-identical; prompts of unequal length run one by one"
        case "refused":
            return f"refused: {finding.detail}"
        case "differs":
            return f"differs: {finding.detail}"
        case "none":
            return f"not tried: {finding.detail}"

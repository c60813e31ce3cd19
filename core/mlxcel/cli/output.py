"""How ``mlxcel generate`` prints: streaming text for people, JSON lines for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    from mlxcel.engine.pipeline_report import PipelineReport
    from mlxcel.engine.results import Result


class Output(Protocol):
    """Told what happens, in this order: texts, results, the end."""

    def text(self, index: int, text: str) -> None: ...

    def result(self, result: Result) -> None: ...

    def end(self, results: Sequence[Result], report: PipelineReport) -> None: ...


class InOrder:
    """Holds back what comes for later prompts until the earlier ones are finished."""

    def __init__(self) -> None:
        self.current = 0
        self._held: dict[int, list[str]] = {}
        self._finished: set[int] = set()

    def text(self, index: int, text: str) -> str:
        """What can be printed now of ``text`` for prompt ``index``."""
        if index == self.current:
            return text
        self._held.setdefault(index, []).append(text)
        return ""

    def finish(self, index: int) -> list[str]:
        """Prompt ``index`` is done; returns the texts of the prompts whose turn has come."""
        self._finished.add(index)
        turns = []
        while self.current in self._finished:
            self.current += 1
            turns.append("".join(self._held.pop(self.current, [])))
        return turns


class TextOutput:
    """The text as it comes; several prompts one after the other, each under a heading."""

    def __init__(self, prompts: int) -> None:
        self._order = InOrder()
        self._prompts = prompts
        if prompts > 1:
            self._heading(0)

    def text(self, index: int, text: str) -> None:
        sys.stdout.write(self._order.text(index, text))
        sys.stdout.flush()

    def result(self, result: Result) -> None:
        before = self._order.current
        for offset, held in enumerate(self._order.finish(result.index), start=1):
            sys.stdout.write("\n")
            if before + offset < self._prompts:
                self._heading(before + offset)
                sys.stdout.write(held)
        sys.stdout.flush()

    def end(self, results: Sequence[Result], report: PipelineReport) -> None:
        prompt, prompt_tps = _sums(results, "prompt")
        made, made_tps = _sums(results, "generation")
        print(
            f"prompt: {prompt} tokens, {prompt_tps:.1f} tok/s; "
            f"generation: {made} tokens, {made_tps:.1f} tok/s; "
            f"bubble: {report.mean_bubble:.1%} measured, {report.expected_bubble:.1%} expected"
        )

    def _heading(self, index: int) -> None:
        sys.stdout.write(f"==> prompt {index} <==\n")


class JsonOutput:
    """One object a line per prompt, in the order of the prompts, then one for the stages."""

    def text(self, index: int, text: str) -> None:
        """Nothing: a line holds a whole result."""

    def result(self, result: Result) -> None:
        """Nothing: results come in the order of the prompts at the end."""

    def end(self, results: Sequence[Result], report: PipelineReport) -> None:
        for result in results:
            print(json.dumps(attrs.asdict(result), ensure_ascii=False))
        stages = [attrs.asdict(stage) for stage in report.stages]
        print(json.dumps({"stages": stages, "expected_bubble": report.expected_bubble}))


def _sums(results: Sequence[Result], kind: str) -> tuple[int, float]:
    """Tokens and tokens per second over all prompts, which run side by side."""
    tokens = sum(getattr(result, f"{kind}_tokens") for result in results)
    return tokens, sum(getattr(result, f"{kind}_tps") for result in results)

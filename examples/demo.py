"""The main job on a real model: one process, then two stages, and the same tokens.

    python examples/demo.py [FOLDER]

Gets SmolLM2-135M-Instruct into FOLDER (default ``.demo/smollm2``) unless it is there, answers
a few questions with the whole model in one worker process and again with its layers split over
two, and prints what each stage did. The exit code is 0 only if all tokens are identical.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table

from mlxcel.cli.main import run as mlxcel
from mlxcel.engine.generation import Generation
from mlxcel.engine.local import open_model, running
from mlxcel.engine.pipeline_report import PipelineReport, pipeline_report
from mlxcel.engine.results import Result, collect
from mlxcel.engine.slot import Request, credits_for
from mlxcel.plugins import Plugins
from mlxcel.stage.blas import choose_blas

QUESTIONS = (
    "What is the capital of France? Answer briefly.",
    "Name three primary colours.",
    "What do bees make?",
    "Write a sentence about the sea.",
)
TOKENS = 24


@attrs.frozen
class Run:
    """What one run made, and what its stages did."""

    results: list[Result]
    report: PipelineReport
    seconds: float

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [result.tokens for result in self.results]

    @property
    def speed(self) -> float:
        """Generated tokens per second, prefill included."""
        return sum(result.generation_tokens for result in self.results) / self.seconds


def answer(folder: Path, stages: int) -> Run:
    """Answer the questions with ``stages`` worker processes; the first answer streams.

    Both runs put one question into each micro-batch, so that every step has the same shape.
    """
    blas = choose_blas("auto", workers="process")
    model = open_model(folder, Plugins.discover(), size=stages, by="time", fast_blas=blas.fast)
    requests = [
        Request(i, tuple(model.tokenizer.encode_chat([{"role": "user", "content": text}])), TOKENS)
        for i, text in enumerate(QUESTIONS)
    ]
    credits = credits_for(len(requests), stages, rows=1)
    with running(
        model, credits=credits, timeout=600, workers="process", environment=blas.environment
    ) as pipeline:
        generation = Generation(
            pipeline, requests, end_tokens=model.tokenizer.eos_ids, rows=1, chunk=512
        )
        print(f"\n{stages} stage{'s' if stages > 1 else ''}; {blas.notice}\n> {QUESTIONS[0]}")
        began = time.perf_counter()
        results = collect(generation, requests, model.tokenizer, stream_first)
        seconds = time.perf_counter() - began
        print()
        report = pipeline_report(model.plan, pipeline.stop(), len(generation.slots))
        return Run(results, report, seconds)


def stream_first(index: int, text: str) -> None:
    """Show the text of the first question as it comes."""
    if index == 0:
        print(text, end="", flush=True)


def show(one: Run, two: Run, identical: bool) -> None:
    """A table with a row per stage of both runs, and whether the tokens are identical."""
    table = Table("stages", "stage", "layers", "bytes", "busy", "bubble", "tok/s")
    for name, run in (("1", one), ("2", two)):
        for stage in run.report.stages:
            table.add_row(
                name,
                str(stage.stage),
                stage.layers,
                f"{stage.bytes / 1e6:.1f} MB",
                f"{stage.busy:.0%}",
                f"{stage.bubble:.0%}",
                f"{run.speed:.1f}" if stage.stage == 0 else "",
            )
    Console().print(table)
    print(f"tokens identical: {'yes' if identical else 'no'}")


def main(folder: Path) -> int:
    if code := mlxcel(["fetch-demo-model", str(folder)]):
        return code
    one, two = answer(folder, 1), answer(folder, 2)
    identical = one.tokens == two.tokens
    show(one, two, identical)
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo/smollm2")))

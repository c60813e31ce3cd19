"""mlx-lm as its users run it, in a process of its own: ``python -m mlxcel.bench.reference DIR``.

Reads one task a line from standard input and writes one answer a line: the timing of each
request. It uses mlx-lm's public functions and nothing of mlxcel's runtime.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import load_model

from mlxcel.bench.timing import Timing


@attrs.frozen
class Task:
    """Prompts (token ids), tokens to make for each, and whether to run them as one batch."""

    prompts: list[list[int]]
    tokens: int
    batch: bool


def run(model: nn.Module, task: Task) -> list[Timing]:
    """The timing of every request of ``task``."""
    return _batch(model, task) if task.batch else [_single(model, p, task) for p in task.prompts]


def _single(model: nn.Module, prompt: list[int], task: Task) -> Timing:
    started = time.perf_counter()
    tokens = generate_step(mx.array(prompt), model, max_tokens=task.tokens)
    return Timing(started, tuple(time.perf_counter() for _ in tokens))


def _batch(model: nn.Module, task: Task) -> list[Timing]:
    started = time.perf_counter()
    generator = BatchGenerator(model, max_tokens=task.tokens, stop_tokens=[])
    times: dict[int, list[float]] = {uid: [] for uid in generator.insert(task.prompts)}
    while responses := generator.next_generated():
        now = time.perf_counter()
        for response in responses:
            times[response.uid].append(now)
    generator.close()
    return [Timing(started, tuple(arrived)) for arrived in times.values()]


def main(argv: list[str]) -> int:
    model, _ = load_model(Path(argv[0]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        fields: dict[str, Any] = json.loads(line)
        answer = [attrs.asdict(timing) for timing in run(model, Task(**fields))]
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

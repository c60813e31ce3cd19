"""The stage executor mlxcel uses unless a plugin brings another: a family's own stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from mlxcel.errors import SamplingFailed
from mlxcel.family.contract import Family
from mlxcel.family.transformer import TransformerStage
from mlxcel.pipeline.operations import New
from mlxcel.pipeline.step import Step, Tokens
from mlxcel.stage.arrays import from_wire
from mlxcel.stage.batch import Batch, BatchTable
from mlxcel.stage.contract import Progress, StageSpec
from mlxcel.stage.grammar import Grammars
from mlxcel.stage.load import load_stage
from mlxcel.stage.logprobs import logprobs
from mlxcel.stage.sampler import sample
from mlxcel.stage.scratch import give_back_scratch
from mlxcel.tensor.collectives import Collectives
from mlxcel.wire.tensor import WireTensor


class FamilyExecutor:
    """Runs one stage with the class that its family names.

    Everything it makes belongs to the MLX stream of its own thread; only evaluated arrays
    leave :meth:`run`.
    """

    def __init__(
        self, spec: StageSpec, family: Family, collectives: Collectives | None = None
    ) -> None:
        self.spec = spec
        self.family = family
        self.collectives = collectives
        self.stream = mx.new_stream(mx.default_device())
        self._stage: TransformerStage | None = None
        self._table: BatchTable | None = None

    def load(self, progress: Progress) -> int:
        """Read the stage from its checkpoint; returns the bytes of its parameters."""
        spec = self.spec
        with mx.stream(self.stream):
            stage = load_stage(
                self.family.open(spec.checkpoint),
                self.family,
                spec.start,
                spec.stop,
                spec.cast,
                progress,
                spec.dequantize,
                tensor=spec.tensor,
                ranks=spec.ranks,
                collectives=self.collectives,
            )
        draws = spec.last and spec.leads
        grammars = Grammars(spec.checkpoint / "tokenizer.json") if draws else None
        self._stage = stage
        self._table = BatchTable(stage.make_caches, grammars.matcher if grammars else None)
        return stage.nbytes()

    def run(self, step: Step) -> Step | Tokens:
        """One step of this stage; see :class:`mlxcel.stage.contract.StageExecutor`.

        Raises:
            SamplingFailed: The other ranks have run it, but no tokens could be drawn.
        """
        assert self._stage is not None, "load() comes first"
        assert self._table is not None
        watched = nullcontext() if self.collectives is None else self.collectives.watched()
        with watched, mx.stream(self.stream):
            for operation in step.operations:
                self._table.apply(operation)
            if step.tensors:
                return self._forward(step, self._stage, self._table[step.slot])
        if self.spec.last:
            return Tokens(step.seq, step.slot)
        return step

    def requests(self, step: Step) -> tuple[int, ...]:
        """The requests of the step's slot, those that the step itself brings included."""
        held = self._table.requests(step.slot) if self._table is not None else ()
        new = (op.request for op in step.operations if isinstance(op, New))
        return tuple(dict.fromkeys((*held, *new)))

    def memory(self) -> int:
        """The bytes that MLX holds now, for all stages of this process."""
        return mx.get_active_memory()

    def close(self) -> None:
        """Drop the stage and the thread's streams; without that the process aborts at exit."""
        if self.collectives is not None:
            self.collectives.close()
        self._stage = self._table = None
        mx.clear_streams()

    def _forward(self, step: Step, stage: TransformerStage, batch: Batch) -> Step | Tokens:
        payload = stage(_arrays(step.tensors), batch.caches)
        h = payload["h"]
        batch.advance(h.shape[1])
        states = [cache.state for cache in batch.caches if cache is not None]
        if not self.spec.last:
            mx.eval(payload, states)
            _forget_scratch(h)
            return Step(step.seq, step.slot, step.operations, payload, step.sample)
        if not step.sample:  # a chunk of a prompt: only its caches are wanted, no logits
            mx.eval(states)
            _forget_scratch(h)
            return Tokens(step.seq, step.slot)
        h = h[:, -1:, :]
        if not self.spec.leads:  # what all ranks compute together this one must compute too
            shared = self.spec.tensor.head == "vocab_parallel"
            mx.eval(stage.logits(h) if shared else h, states)
            return Tokens(step.seq, step.slot)
        logits = stage.logits(h)[:, -1, :]
        if self.collectives is None:
            return _draw(step, logits, batch, states)
        mx.eval(logits, states)  # all that ranks do together; from here this one is alone
        try:
            return _draw(step, logits, batch, states)
        except Exception as error:
            raise SamplingFailed(f"{type(error).__name__}: {error}") from error


def _draw(step: Step, logits: mx.array, batch: Batch, states: Sequence[Any]) -> Tokens:
    """The answer to ``step``: a token for each row, and what was asked for beside it."""
    tokens = sample(logits, batch.rows)
    likely = logprobs(logits, batch.rows, tokens)
    problems = (row.matcher.problem for row in batch.rows if row.matcher is not None)
    causes = tuple(problem for problem in problems if problem is not None)
    batch.note(tokens)
    mx.eval(states)
    return Tokens(step.seq, step.slot, tuple(tokens), likely, causes)


def _arrays(tensors: Mapping[str, Any]) -> dict[str, mx.array]:
    """What a link delivered as MLX arrays: bytes become arrays, arrays stay."""
    return {
        name: from_wire(value) if isinstance(value, WireTensor) else value
        for name, value in tensors.items()
    }


def _forget_scratch(h: mx.array) -> None:
    """After a long chunk, give the buffers back that only a long chunk needs."""
    if h.shape[1] > 1:
        give_back_scratch()

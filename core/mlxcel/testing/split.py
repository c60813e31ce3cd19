"""Split equals whole: the property every family must have, as a check.

:class:`Chain` runs a checkpoint cut into stages, in one process, with nothing but bytes
between them; :class:`Whole` runs mlx-lm's own model on the same batches. Every logit of
both must be the same to the last bit. As bits compose, a chain that is cut at *every* legal
boundary proves each of them at once.

Where mlx-lm's model cannot run a batch, or not rightly, :func:`one_stage` is what a split is
compared with, and :func:`unlike_alone` shows that its rows are those of single runs.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxcel import compat
from mlxcel.engine.slot import Request, Work, prompt_work, token_tensor
from mlxcel.errors import PartitionError
from mlxcel.family.contract import Family
from mlxcel.family.transformer import flat_parameters
from mlxcel.partition.ranges import legal_cuts, validate_ranges
from mlxcel.pipeline.operations import Extend, Filter, Merge, Operation
from mlxcel.stage.arrays import from_wire, to_wire
from mlxcel.stage.batch import BatchTable
from mlxcel.stage.load import load_stage
from mlxcel.tensor.collectives import Collectives
from mlxcel.tensor.options import ALONE, TensorParallel

HANDLE = 0


class Model(Protocol):
    """Something that runs the steps of batches and shows all logits."""

    def run(self, handle: int, work: Work) -> mx.array:
        """Logits [rows, length, vocab] of one step of the batch ``handle``."""
        ...


class Reference(Protocol):
    """Makes what a split is compared with: :class:`Whole`, or :func:`one_stage`."""

    def __call__(
        self, path: Path, family: Family, dtype: str | None = None, *, dequantize: bool = False
    ) -> Model: ...


class Chain:
    """A checkpoint in stages; between two of them the payload becomes bytes and back.

    With ``tensor``, every stage is all the ranks that share it, or one of them; then
    ``collectives`` reach the others.
    """

    def __init__(
        self,
        path: Path,
        family: Family,
        ranges: Iterable[range],
        dtype: str | None = None,
        *,
        dequantize: bool = False,
        tensor: TensorParallel = ALONE,
        collectives: Collectives | None = None,
    ) -> None:
        ranks = range(tensor.size)
        if collectives is not None:
            ranks = ranks[collectives.rank : collectives.rank + 1]
        checkpoint = family.open(path)
        self.stages = [
            load_stage(
                checkpoint,
                family,
                r.start,
                r.stop,
                dtype,
                dequantize=dequantize,
                tensor=tensor,
                ranks=ranks,
                collectives=collectives,
            )
            for r in ranges
        ]
        self.tables = [BatchTable(stage.make_caches) for stage in self.stages]

    def run(self, handle: int, work: Work) -> mx.array:
        payload = {"tokens": token_tensor(work.tokens)}
        for stage, table in zip(self.stages, self.tables, strict=True):
            for operation in work.operations:
                table.apply(operation)
            arrays = {name: from_wire(tensor) for name, tensor in payload.items()}
            out = stage(arrays, table[handle].caches)
            payload = {name: to_wire(value) for name, value in out.items()}
        return stage.logits(out["h"])


def one_stage(
    path: Path, family: Family, dtype: str | None = None, *, dequantize: bool = False
) -> Chain:
    """The whole checkpoint as the only stage of a chain."""
    layers = range(family.open(path).config.num_layers)
    return Chain(path, family, [layers], dtype, dequantize=dequantize)


class Whole:
    """mlx-lm's own model in one piece; ``dtype``, ``dequantize`` as :class:`Chain` takes them."""

    def __init__(
        self, path: Path, family: Family, dtype: str | None = None, *, dequantize: bool = False
    ) -> None:
        self.model, config = load_model(path)
        if dtype is not None:
            _cast(self.model, getattr(mx, dtype))
        if dequantize:
            self.model = _dequantized(self.model, compat.empty_model(config))
        self.table = BatchTable(lambda: list(make_prompt_cache(self.model)))

    def run(self, handle: int, work: Work) -> mx.array:
        for operation in work.operations:
            self.table.apply(operation)
        tokens = mx.array([list(row) for row in work.tokens])
        return cast(mx.array, self.model(tokens, cache=self.table[handle].caches))


@attrs.frozen
class Scene:
    """A batch to run: prompt lengths, the chunk size of the prefill, decode steps."""

    lengths: tuple[int, ...]
    chunk: int = 512
    steps: int = 8

    def prompts(self) -> list[Request]:
        """Prompts of byte tokens that repeat nothing obvious."""
        return [
            Request(row, tuple((17 * row + 31 * i + i * i) % 251 for i in range(length)), 1)
            for row, length in enumerate(self.lengths)
        ]


SCENES = (
    Scene((17,)),  # one sequence, the prompt in one piece
    Scene((17,), chunk=8),
    Scene((17, 5, 11)),  # ragged: right-padded prefill, left-padded decode
    Scene((17, 5, 11), chunk=4),
)


def every_cut(path: Path, family: Family, *, mirrors: bool = False) -> tuple[range, ...]:
    """The stages of a chain that is cut at every legal boundary.

    Args:
        mirrors: Whether groups may be divided where mirrors make up for it.
    """
    config = family.open(path).config
    groups = [g for g in family.adjacency(config) if not (mirrors and g.mirrorable)]
    bounds = [0, *legal_cuts(config.num_layers, groups), config.num_layers]
    return tuple(range(a, b) for a, b in itertools.pairwise(bounds))


def drawn_cut(path: Path, family: Family, stages: int, seed: int) -> tuple[range, ...]:
    """``stages`` stages whose legal boundaries are drawn, the same ones for the same ``seed``."""
    pieces = every_cut(path, family)
    starts = [piece.start for piece in pieces[1:]]
    cuts = sorted(random.Random(seed).sample(starts, stages - 1))
    bounds = [0, *cuts, pieces[-1].stop]
    return tuple(range(a, b) for a, b in itertools.pairwise(bounds))


def check_illegal_cuts(path: Path, family: Family) -> list[str]:
    """The boundaries that divide a group and are not refused with its source and consumer."""
    config = family.open(path).config
    groups, layers = family.adjacency(config), config.num_layers
    wrong = []
    for cut in set(range(1, layers)) - set(legal_cuts(layers, groups)):
        try:
            validate_ranges((range(cut), range(cut, layers)), layers, groups)
        except PartitionError as error:
            named = [f"source layer {g.start} and consumer layer {g.end - 1}" for g in groups]
            if not any(name in str(error) for name in named):
                wrong.append(f"cut at layer {cut}: {error}")
        else:
            wrong.append(f"cut at layer {cut}: accepted")
    return wrong


def differences(whole: Model, split: Model, scene: Scene, tolerance: float = 0.0) -> Iterator[str]:
    """Run ``scene`` through both, batch operations included; yields what is not identical.

    Args:
        tolerance: How far logits may be apart, if greedy tokens are equal; by default not at
            all.
    """
    for step in _play(whole, scene):
        again = split.run(step.handle, step.work)
        yield from _compare(step.name, step.logits, again, tolerance)


def unlike_alone(batch: Model, alone: Model, scene: Scene, tolerance: float) -> Iterator[str]:
    """Each sequence of ``scene`` in ``batch`` against the same one ``alone``; yields what differs.

    Alone, a prompt is prefilled in one piece. A product of several rows may add in another
    order than that of one, so logits are compared within ``tolerance``, greedy tokens exactly.
    """
    sequences: dict[Request, list[mx.array]] = defaultdict(list)
    for step in _play(batch, scene):
        if step.work.sample:
            for row, request in enumerate(step.requests):
                sequences[request].append(step.logits[row : row + 1])
    for request, seen in sequences.items():
        ran = [(work, alone.run(HANDLE, work)) for work in _alone(request, seen)]
        expected = [logits for work, logits in ran if work.sample]
        for number, (one, here) in enumerate(zip(expected, seen, strict=True)):
            yield from _compare(f"sequence {request.index}, token {number}", one, here, tolerance)


def check_split(
    path: Path,
    family: Family,
    ranges: Sequence[range] | None = None,
    *,
    dtype: str | None = None,
    dequantize: bool = False,
    scenes: Sequence[Scene] = SCENES,
    reference: Reference = Whole,
) -> list[str]:
    """All differences between a split and the whole; empty when the two are identical.

    Args:
        ranges: The stages; None cuts at every legal boundary.
        dtype: What both sides cast their floating parameters to.
        dequantize: Whether both sides make packed weights plain float32 ones.
        reference: What the split is compared with.
    """
    stages = every_cut(path, family) if ranges is None else ranges
    return [
        f"{scene}: {difference}"
        for scene in scenes
        for difference in differences(
            reference(path, family, dtype, dequantize=dequantize),
            Chain(path, family, stages, dtype, dequantize=dequantize),
            scene,
        )
    ]


@attrs.frozen
class _Step:
    """One step of a scene as a model ran it; ``requests`` are the rows of its batch."""

    name: str
    handle: int
    work: Work
    requests: list[Request]
    logits: mx.array


def _play(model: Model, scene: Scene) -> Iterator[_Step]:
    """The steps of ``scene``, greedy.

    After the prefill and half of the decode steps, the second row leaves and a new sequence
    joins, as they do in a running server.
    """
    handles = itertools.count(HANDLE + 1)
    requests = scene.prompts()
    for number, work in enumerate(prompt_work(HANDLE, requests, scene.chunk, handles)):
        logits = model.run(HANDLE, work)
        yield _Step(f"prefill step {number}", HANDLE, work, requests, logits)
    tokens = _greedy(logits)
    for number in range(scene.steps):
        operations: tuple[Operation, ...] = ()
        if number == scene.steps // 2 and len(requests) > 1:
            newcomer, single = next(handles), next(handles)
            joining = Request(len(requests), (72, 101, 121), 1)
            for work in prompt_work(single, [joining], scene.chunk, handles):
                logits = model.run(single, work)
                yield _Step("newcomer", single, work, [joining], logits)
            staying = (0, *range(2, len(requests)))
            operations = (
                Filter(HANDLE, staying),
                Merge(newcomer, (single,)),
                Extend(HANDLE, newcomer),
            )
            requests = [*(requests[row] for row in staying), joining]
            tokens = [*(tokens[row] for row in staying), *_greedy(logits)]
        work = Work(operations, [[token] for token in tokens], sample=True)
        logits = model.run(HANDLE, work)
        yield _Step(f"decode step {number}", HANDLE, work, requests, logits)
        tokens = _greedy(logits)


def _alone(request: Request, seen: Sequence[mx.array]) -> Iterator[Work]:
    """The steps that ask a single row for what was ``seen`` in a batch, its tokens included."""
    yield from prompt_work(HANDLE, [request], len(request.prompt), itertools.count(HANDLE + 1))
    for logits in seen[:-1]:
        yield Work((), [_greedy(logits)], sample=True)


def _compare(where: str, whole: mx.array, split: mx.array, tolerance: float = 0.0) -> Iterator[str]:
    if whole.shape != split.shape or whole.dtype != split.dtype:
        yield f"{where}: {whole.dtype} {whole.shape} against {split.dtype} {split.shape}"
    elif not mx.array_equal(whole, split).item():
        worst = cast(float, mx.max(mx.abs(whole - split)).item())
        if not worst <= tolerance:
            yield f"{where}: logits differ by up to {worst:g}"
        elif _greedy(whole) != _greedy(split):
            yield f"{where}: greedy tokens differ"


def _greedy(logits: mx.array) -> list[int]:
    return cast(list[int], mx.argmax(logits[:, -1, :], axis=-1).tolist())


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    model.update(
        tree_map(
            lambda value: value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value,
            model.parameters(),
        )
    )
    mx.eval(flat_parameters(model))


def _dequantized(model: nn.Module, plain: nn.Module) -> nn.Module:
    """``plain``, an empty model of the same kind, with what the packed weights of ``model`` say."""
    weights = flat_parameters(model)
    for path, module in model.named_modules():
        if "scales" in module:
            for leaf in ("scales", "biases"):
                weights.pop(f"{path}.{leaf}", None)
            weights[f"{path}.weight"] = mx.dequantize(
                module.weight,
                module.scales,
                module.get("biases"),
                group_size=module.group_size,
                bits=module.bits,
                mode=module.mode,
                dtype=mx.float32,
            )
    plain.load_weights(list(weights.items()))
    plain.eval()
    mx.eval(flat_parameters(plain))
    return plain

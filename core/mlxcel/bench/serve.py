"""``mlxcel bench serve``: a load on any server that speaks OpenAI's API, or on two in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import attrs

from mlxcel.bench.load import PATHS, Load, arrivals, bodies, make_body, run_load
from mlxcel.bench.pairs import Spread
from mlxcel.bench.prompts import Prompts
from mlxcel.bench.summary import FIGURES, Summary, summarize
from mlxcel.client.api import Api, Waits, connect
from mlxcel.engine.tokenizer import Tokenizer

OnAnswer = Callable[[], None]


@attrs.frozen
class Server:
    """Whom to ask: base URL, and the model's name there; None takes the first it lists."""

    url: str
    model: str | None = None
    key: str | None = attrs.field(default=None, repr=False)


@attrs.frozen
class Settings:
    """How to ask.

    Attributes:
        load: What each run asks.
        seed: The same seed asks the same; a server that has answered it before may remember it.
        prefix: Tokens that all prompts begin with; each server has seen them before it is timed.
        timeout: Seconds that one answer may take.
        tokenizer: Of the model that is served, where it is known.
    """

    load: Load
    seed: int
    prefix: int = 0
    timeout: float = 600.0
    tokenizer: Tokenizer | None = None

    def prompts(self, series: object) -> Prompts:
        """The prompts of one run."""
        return Prompts(f"{self.seed} {series}", self.tokenizer, self.start)

    @property
    def start(self) -> str:
        """The text that all prompts begin with."""
        prompts = Prompts(f"{self.seed} prefix", self.tokenizer)
        return prompts.draw(self.prefix) if self.prefix else ""


@attrs.frozen
class Row:
    """One figure of two servers, and the pairs' ratios, ours over the reference's."""

    name: str
    unit: str
    reference: Spread
    ours: Spread
    ratio: Spread


@attrs.frozen
class Comparison:
    """Two servers under the same loads; ``pairs`` are the runs, the reference's first."""

    rows: tuple[Row, ...]
    pairs: tuple[tuple[Summary, Summary], ...]


def prepare(server: Server, settings: Settings) -> Server:
    """The server with its model's name, once it has answered a request like those to come.

    Raises:
        MlxcelError: It does not answer, so that there is nothing to measure.
    """
    return asyncio.run(_prepare(server, settings))


def measure(server: Server, settings: Settings, on_answer: OnAnswer = lambda: None) -> Summary:
    """One run on a prepared server."""
    return asyncio.run(_run(server, settings, 1, on_answer))


def compare(
    reference: Server,
    ours: Server,
    settings: Settings,
    pairs: int,
    on_pair: Callable[[Summary, Summary], None] = lambda theirs, own: None,
) -> Comparison:
    """Run both in turn, A B A B …, after one uncounted run of each; see :mod:`mlxcel.bench.pairs`.

    Every pair has its own prompts, and both servers, which are prepared, get the same.
    """
    runs = []
    for number in range(pairs + 1):
        theirs, own = (asyncio.run(_run(s, settings, number)) for s in (reference, ours))
        if number:
            runs.append((theirs, own))
            on_pair(theirs, own)
    return Comparison(rows(runs), tuple(runs))


def rows(pairs: Sequence[tuple[Summary, Summary]]) -> tuple[Row, ...]:
    """The figures that both servers have in every pair."""
    found = []
    for name, unit, read in FIGURES:
        readings = [(read(theirs), read(own)) for theirs, own in pairs]
        known = [(a, b) for a, b in readings if a and b]
        if len(known) == len(pairs):
            reference, ours = (Spread.of(values) for values in zip(*known, strict=True))
            ratio = Spread.of(b / a for a, b in known)
            found.append(Row(name, unit, reference, ours, ratio))
    return tuple(found)


async def _prepare(server: Server, settings: Settings) -> Server:
    load, start = settings.load, settings.start
    async with _connected(server, settings) as api:
        if server.model is None:
            server = attrs.evolve(server, model=next(iter(await api.models()), None))
        text = start or settings.prompts("first").draw(load.prompt[0])
        body = make_body(load, text, load.output[0], server.model)
        async for _ in api.stream(PATHS[load.endpoint], body):
            pass
    return server


async def _run(
    server: Server, settings: Settings, number: int, on_answer: OnAnswer = lambda: None
) -> Summary:
    load, seed = settings.load, f"{settings.seed} {number}"
    requests = bodies(load, settings.prompts(number), server.model, seed)
    async with _connected(server, settings) as api:
        times = arrivals(load, seed)
        run = await run_load(
            api, load, requests, times, tokenizer=settings.tokenizer, on_answer=on_answer
        )
    return summarize(run)


def _connected(server: Server, settings: Settings) -> AbstractAsyncContextManager[Api]:
    return connect(server.url, server.key, Waits(total=settings.timeout))

"""``mlxcel chat``: talk with a model in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.cli.chat_input import open_input
from mlxcel.cli.chat_screen import Screen
from mlxcel.cli.chat_session import Message, Session
from mlxcel.cli.generate import add_model_flags, micro_batch
from mlxcel.cli.given_flags import given, record_given
from mlxcel.cli.model_flags import LONGEST_WAIT, check_bounds
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.client.api import Waits
    from mlxcel.server.backend import MakeBackend

Tell = Callable[[str], None]

OF_A_SERVER = frozenset({"--url", "--served-model-name", "--api-key"})
OF_BOTH = frozenset({"--timeout", "--system", "--max-tokens", "--temperature", "--top-p", "--seed"})
"""Every other flag is about a model that is loaded here."""


@attrs.frozen
class Model:
    """Whom to talk with: base URL, key, name of the model there, and how it shall answer."""

    url: str
    key: str | None = attrs.field(repr=False)
    name: str | None
    settings: Mapping[str, Any]
    waits: Waits


def add_parser(subparsers: Any) -> None:
    """The flags of ``mlxcel chat``."""
    parser = subparsers.add_parser("chat", help="talk with a model, local or behind a URL")
    record_given(parser)
    server = parser.add_argument_group("a server")
    server.add_argument("--url", help="base URL of a server that speaks OpenAI's API")
    server.add_argument("--served-model-name", metavar="NAME", help="the model there (the first)")
    server.add_argument("--api-key", metavar="KEY", help="key (the variable OPENAI_API_KEY)")
    server.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest silence before and amid an answer (600)",
    )
    answers = parser.add_argument_group("answers")
    answers.add_argument("--system", metavar="TEXT", help="the system message")
    answers.add_argument("-n", "--max-tokens", type=int, metavar="N", help="of an answer")
    answers.add_argument(
        "--temp", "--temperature", type=float, metavar="T", dest="temperature", help="0 is greedy"
    )
    answers.add_argument("--top-p", type=float, metavar="P")
    answers.add_argument("--seed", type=int, help="same seed, same answers")
    add_model_flags(parser, workers="process", required=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until there is nothing more to say; returns 0, or raises what went wrong."""
    _check(args)
    interactive = sys.stdin.isatty()
    with _model(args) as model:
        screen = Screen()
        session = Session(
            partial(answer, model),
            open_input(),
            screen,
            system=args.system,
            interactive=interactive,
        )
        if interactive:
            screen.note(
                f"{model.name or 'The model'} at {model.url}. /help says what else there is."
            )
        session.run()
        if interactive:
            screen.note("")
    return 0


def answer(
    model: Model, messages: Sequence[Message], on_text: Tell, on_thought: Tell
) -> str | None:
    """Ask the model; tells its answer as it comes, and returns the finish reason.

    Raises:
        MlxcelError: See :class:`mlxcel.client.api.Api`.
        KeyboardInterrupt: Ctrl-C; the server is told to stop by closing the connection.
    """
    return asyncio.run(_answer(model, messages, on_text, on_thought))


async def _answer(
    model: Model, messages: Sequence[Message], on_text: Tell, on_thought: Tell
) -> str | None:
    from mlxcel.client.api import connect

    named = {} if model.name is None else {"model": model.name}
    body = {**named, "messages": list(messages), "stream": True, **model.settings}
    reason = None
    async with connect(model.url, model.key, model.waits) as api:
        async for chunk in api.stream("/chat/completions", body):
            match chunk.get("choices"):
                case [{"delta": dict() as delta, **rest}, *_]:
                    _tell(delta, "reasoning_content", on_thought)
                    _tell(delta, "content", on_text)
                    reason = rest.get("finish_reason") or reason
    return reason if isinstance(reason, str) else None


def _tell(delta: Mapping[str, Any], field: str, tell: Tell) -> None:
    text = delta.get(field)
    if isinstance(text, str) and text:
        tell(text)


@contextmanager
def _model(args: argparse.Namespace) -> Iterator[Model]:
    """The model at --url, which answers; or that of -m, loaded and served here."""
    from mlxcel.cli.local_server import local_server
    from mlxcel.client.api import Waits, base_url

    waits = Waits(silence=args.timeout)
    if args.url is not None:
        key = args.api_key or os.environ.get("OPENAI_API_KEY") or None
        model = Model(
            base_url(args.url, "--url"), key, args.served_model_name, _wishes(args), waits
        )
        yield asyncio.run(_with_name(model))
        return
    name = args.model.resolve().name
    with local_server(_backend(args), name) as (url, key):
        yield Model(base_url(url, "--model"), key, name, _wishes(args), waits)


async def _with_name(model: Model) -> Model:
    from mlxcel.client.api import connect

    async with connect(model.url, model.key, model.waits) as api:
        names = await api.models()
    return attrs.evolve(model, name=next(iter(names), None)) if model.name is None else model


def _backend(args: argparse.Namespace) -> MakeBackend:
    """A service of one conversation, which remembers how its prompts began."""
    from mlxcel.cli.local_model import open_local_model, run_local_model
    from mlxcel.engine.engine import Settings
    from mlxcel.engine.limits import Limits
    from mlxcel.engine.local import kv_budgets
    from mlxcel.engine.service import Service
    from mlxcel.stage.blas import choose_blas

    limits = Limits(1, 1, micro_batch(args.pp_micro_batch_size), args.prefill_chunk_size)
    blas = choose_blas(args.blas, workers=args.pp_workers)
    model = open_local_model(args, blas)
    if not model.tokenizer.has_chat_template:
        raise UsageError(
            f"{args.model} has no chat template.",
            "Choose a model that was made to talk, or use `mlxcel generate`.",
        )
    for notice in (*model.notices, blas.notice):
        print(notice, file=sys.stderr)
    run_model = run_local_model(args, model, blas)
    return partial(Service, model, run_model, Settings(limits), kv_budgets(model))


def _wishes(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for; the rest is the server's business."""
    wishes = {name: getattr(args, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    return {name: value for name, value in wishes.items() if value is not None}


def _check_side(flags: frozenset[str], *, behind_url: bool) -> None:
    """Refuse flags that say nothing to where the model is."""
    if behind_url and (wrong := flags - OF_A_SERVER - OF_BOTH):
        raise UsageError(
            f"{min(wrong)} does not go with --url: the model runs there, as its server was told.",
            "Leave it out, or give it to that server.",
        )
    if not behind_url and (wrong := flags & OF_A_SERVER):
        raise UsageError(
            f"{min(wrong)} does not go with -m: the model is loaded here, for this command alone.",
            "Leave it out, or talk with a server by --url.",
        )


def _check(args: argparse.Namespace) -> None:
    if (args.url is None) == (args.model is None):
        raise UsageError("mlxcel chat needs one model.", "Give either --url or -m.")
    _check_side(given(args), behind_url=args.url is not None)
    seconds, n, t, p = args.timeout, args.max_tokens, args.temperature, args.top_p
    chunk = args.prefill_chunk_size
    check_bounds(
        [
            ("-n/--max-tokens", n, n is None or n >= 1, "1 or more"),
            ("--temp", t, t is None or 0 <= t <= 2, "0 to 2"),
            ("--top-p", p, p is None or 0 < p <= 1, "a value above 0 and up to 1"),
            ("--timeout", seconds, 0 < seconds <= LONGEST_WAIT, "seconds, up to a million"),
            ("--pp-timeout", args.pp_timeout, 0 < args.pp_timeout <= LONGEST_WAIT, "seconds"),
            ("--prefill-chunk-size", chunk, chunk >= 1, "1 or more"),
        ]
    )

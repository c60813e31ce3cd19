"""``mlxcel bench serve``: the flags, and which servers are asked."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.cli.model_flags import LONGEST_WAIT, check_bounds
from mlxcel.cli.progress import CountingBar
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.bench.serve import Server, Settings
    from mlxcel.bench.summary import Summary
    from mlxcel.engine.tokenizer import Tokenizer

DEFAULT_CLIENTS = 8
MOST_TOKENS = 1 << 20


def add_parser(kinds: Any) -> None:
    """The flags of ``mlxcel bench serve``."""
    parser = kinds.add_parser(
        "serve", help="a load on any server that speaks OpenAI's API, or on two in turn"
    )
    add_server_flags(parser.add_argument_group("servers"))
    add_load_flags(parser.add_argument_group("load"))
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run_kind=run)


def add_server_flags(group: argparse._ActionsContainer) -> None:
    """What says who is asked, and against whom."""
    group.add_argument("--url", help="the server's base URL; without it, -m is served")
    group.add_argument(
        "-m",
        "--model",
        type=Path,
        metavar="DIR",
        help="the model's folder: for its tokenizer, and to serve it where there is no --url",
    )
    group.add_argument("--served-model-name", metavar="NAME", help="its name there (the first)")
    group.add_argument(
        "--api-key", metavar="KEY", help="key for --url (the variable OPENAI_API_KEY)"
    )
    group.add_argument("--compare", metavar="URL", help="a second server, asked in turn")
    group.add_argument("--compare-model-name", metavar="NAME", help="the model's name there")
    group.add_argument("--compare-api-key", metavar="KEY", help="key for --compare")
    group.add_argument(
        "--against", choices=["mlx-lm"], help="start mlx-lm's server with -m as the second one"
    )
    group.add_argument("--pairs", type=int, default=5, help="runs of each of two servers (5)")
    group.add_argument(
        "serve_flags",
        nargs="*",
        metavar="-- FLAGS",
        help="flags of the mlxcel serve that is started where there is no --url",
    )


def add_load_flags(group: argparse._ActionsContainer) -> None:
    """What says what is asked, and when."""
    group.add_argument("--requests", type=int, default=32, metavar="N", help="in each run (32)")
    group.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help=f"requests at once at most ({DEFAULT_CLIENTS}; with --rate no limit)",
    )
    group.add_argument(
        "--rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests a second as they come from many people; inf is all at once (inf)",
    )
    group.add_argument(
        "--prompt-length", default="64", metavar="N|A-B", help="tokens of a prompt (64)"
    )
    group.add_argument(
        "--output-length", default="16", metavar="N|A-B", help="tokens of an answer (16)"
    )
    group.add_argument(
        "--endpoint",
        default="completions",
        choices=["completions", "chat"],
        help="what is asked (completions)",
    )
    group.add_argument(
        "--warm-prefix",
        type=int,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with and the server has seen (0)",
    )
    group.add_argument(
        "--keep-end", action="store_true", help="let answers end where the model ends them"
    )
    group.add_argument("--seed", type=int, help="same seed, same requests (drawn)")
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for one answer (600)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure one server, or compare two; 1 if nothing was answered."""
    from mlxcel.bench import serve, serve_table

    settings = _settings(args)
    with _servers(args) as (ours, reference):
        ours = serve.prepare(ours, settings)
        asked = [ours]
        if reference is None:
            with CountingBar("answers", settings.load.requests) as bar:
                summary = serve.measure(ours, settings, bar.advance)
            good = summary.good
            result, table = attrs.asdict(summary), serve_table.markdown(summary)
        else:
            reference = serve.prepare(reference, settings)
            asked.append(reference)
            comparison = serve.compare(reference, ours, settings, args.pairs, _tell)
            good = sum(own.good for _, own in comparison.pairs)
            result, table = attrs.asdict(comparison), serve_table.comparison_markdown(comparison)
    if args.json:
        print(json.dumps({**_asked(asked, settings), **result}))
    else:
        print(f"{serve_table.heading(asked, settings)}\n\n{table}")
    return 0 if good else 1


def _tell(theirs: Summary, own: Summary) -> None:
    print(
        f"{theirs.tokens_per_second:.1f} against {own.tokens_per_second:.1f} tok/s",
        file=sys.stderr,
    )


def _asked(servers: Sequence[Server], settings: Settings) -> dict[str, Any]:
    """Who was asked what, without keys."""
    load = attrs.asdict(settings.load)
    load["rate"] = None if math.isinf(settings.load.rate) else settings.load.rate
    names = [{"url": server.url, "model": server.model} for server in servers]
    return {"servers": names, "seed": settings.seed, "prefix": settings.prefix, "load": load}


@contextmanager
def _servers(args: argparse.Namespace) -> Iterator[tuple[Server, Server | None]]:
    """Whom to ask and whom to compare it with, both started if that is our business."""
    from mlxcel.bench.serve import Server
    from mlxcel.bench.servers import mlx_lm, mlxcel, started
    from mlxcel.client.api import base_url

    key = args.api_key or os.environ.get("OPENAI_API_KEY") or None
    reference = None
    with ExitStack() as stack:
        if args.against is not None:
            url = stack.enter_context(started(mlx_lm(args.model)))
            reference = Server(base_url(url, "--against"), str(args.model))
        elif args.compare is not None:
            url = base_url(args.compare, "--compare")
            reference = Server(url, args.compare_model_name, args.compare_api_key)
        if args.url is not None:
            ours = Server(base_url(args.url, "--url"), args.served_model_name, key)
        else:
            url = stack.enter_context(started(mlxcel(args.model, args.serve_flags)))
            ours = Server(base_url(url, "--model"), args.served_model_name)
        yield ours, reference


def _settings(args: argparse.Namespace) -> Settings:
    from mlxcel.bench.load import Load
    from mlxcel.bench.serve import Settings

    _check(args)
    tokenizer = _tokenizer(args.model)
    clients = args.clients
    if clients is None and math.isinf(args.rate):
        clients = DEFAULT_CLIENTS
    load = Load(
        requests=args.requests,
        clients=clients,
        rate=args.rate,
        prompt=parse_lengths("--prompt-length", args.prompt_length),
        output=parse_lengths("--output-length", args.output_length),
        endpoint=args.endpoint,
        ignore_end=not args.keep_end,
        end_tokens=tuple(sorted(tokenizer.eos_ids)) if tokenizer is not None else (),
    )
    least = load.prompt[0]
    prefix = ("--warm-prefix", args.warm_prefix, 0 <= args.warm_prefix < least)
    check_bounds([(*prefix, f"0 to {least - 1}, less than the shortest prompt")])
    seed = secrets.randbits(32) if args.seed is None else args.seed
    return Settings(load, seed, args.warm_prefix, args.timeout, tokenizer)


def _check(args: argparse.Namespace) -> None:
    if args.url is None and args.model is None:
        raise UsageError("There is no server to ask.", "Give --url, or -m to start one.")
    if args.against is not None and args.model is None:
        raise UsageError(f"--against {args.against} needs a model.", "Give its folder with -m.")
    if args.against is not None and args.compare is not None:
        raise UsageError("--against and --compare exclude each other.", "Give one of them.")
    if args.url is not None and args.serve_flags:
        flags = " ".join(args.serve_flags)
        raise UsageError(f"{flags}: --url is not started here.", "Leave the flags out, or --url.")
    counts = {"--requests": args.requests, "--clients": args.clients, "--pairs": args.pairs}
    check_bounds(
        [
            *((flag, n, n is None or n >= 1, "1 or more") for flag, n in counts.items()),
            ("--rate", args.rate, args.rate > 0, "requests a second, or inf"),
            ("--timeout", args.timeout, 0 < args.timeout <= LONGEST_WAIT, "seconds"),
        ]
    )


def parse_lengths(flag: str, text: str) -> tuple[int, int]:
    """The least and the most tokens: ``"64"`` or ``"32-64"``.

    Raises:
        UsageError: ``text``, which was given to ``flag``, is neither.
    """
    match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= MOST_TOKENS:
        raise UsageError(f"{flag} {text} is no length.", "Give tokens, such as 64 or 32-64.")
    return low, high


def _tokenizer(folder: Path | None) -> Tokenizer | None:
    from mlxcel.checkpoint.config import read_config
    from mlxcel.engine.tokenizer import load_tokenizer

    return None if folder is None else load_tokenizer(folder, read_config(folder))

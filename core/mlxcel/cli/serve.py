"""``mlxcel serve``, also ``mlxcel-server``: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxcel.cli.cluster_flags import add_cluster_flags, add_discovery_flags
from mlxcel.cli.cluster_options import cluster_options
from mlxcel.cli.generate import add_model_flags, micro_batch
from mlxcel.cli.given_flags import record_given
from mlxcel.cli.model_flags import LONGEST_WAIT, check_bounds
from mlxcel.cli.quality import telling_quality
from mlxcel.cli.size import parse_size
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.engine.engine import Settings
    from mlxcel.engine.model import Model
    from mlxcel.server.options import Options

HIGHEST_PORT = 65535
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@,\sA-Z]+")


def add_parser(subparsers: Any) -> None:
    """The flags of ``mlxcel serve``."""
    parser = subparsers.add_parser("serve", help="serve a model to OpenAI clients over HTTP")
    record_given(parser)
    add_model_flags(parser, workers="process", model_action=_Models)
    add_http_flags(parser.add_argument_group("HTTP"))
    add_engine_flags(parser.add_argument_group("requests and memory"))
    add_cluster_flags(parser.add_argument_group("cluster"))
    add_discovery_flags(parser.add_argument_group("discovery of peers"))
    parser.add_argument(
        "--verbose", action="store_true", help="print how the layers were divided and loaded"
    )
    parser.set_defaults(run=run)


class _Models(argparse.Action):
    """``-m``: ``args.models`` are all that were given, ``args.model`` is the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.models = (*getattr(namespace, "models", ()), values)
        namespace.model = namespace.models[0]


def add_http_flags(group: argparse._ActionsContainer) -> None:
    """What says where and to whom the server answers."""
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    group.add_argument(
        "--port", type=int, default=8080, metavar="N", help="port; 0 takes a free one (8080)"
    )
    group.add_argument("--alias", metavar="NAME", help="the model's name (its folder's)")
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that requests must bring (repeatable; others can see it in the process list)",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="a file with one key a line"
    )
    group.add_argument(
        "--allowed-origins",
        metavar="A,B",
        help="whose web pages may use the server, such as https://chat.example; * is everybody's",
    )
    group.add_argument("--metrics", action="store_true", help="serve /metrics for Prometheus")
    group.add_argument(
        "--max-body-size", default="16MiB", metavar="SIZE", help="longest request (16MiB)"
    )


def add_engine_flags(group: argparse._ActionsContainer) -> None:
    """What says how many requests run, and how long others wait."""
    group.add_argument("--no-warmup", action="store_true", help="be ready without a first token")
    group.add_argument(
        "--parallel", type=int, default=32, metavar="N", help="sequences at once (32)"
    )
    group.add_argument(
        "--max-batch-size", type=int, default=32, metavar="N", help="sequences in a step (32)"
    )
    group.add_argument(
        "--max-queue-depth", type=int, default=256, metavar="N", help="requests that wait (256)"
    )
    group.add_argument(
        "--ctx-size",
        type=int,
        metavar="N",
        help="tokens of a prompt and its answer together (the model's)",
    )
    group.add_argument(
        "--kv-cache-budget",
        metavar="SIZE",
        help="cache memory of each worker, such as 2GB or 2GiB (what is free)",
    )
    group.add_argument(
        "--prefix-cache",
        type=int,
        default=64,
        metavar="N",
        help="prompts that are remembered for others that begin alike; 0 is off (64)",
    )
    group.add_argument(
        "--queue-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="longest wait for a place (60)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="what running requests get at the end (30)",
    )


def run_server() -> int:
    """The command ``mlxcel-server``: ``mlxcel serve`` under its own name."""
    from mlxcel.cli.main import run as run_command

    return run_command(["serve", *sys.argv[1:]])


def run(args: argparse.Namespace) -> int:
    """Serve, or be a part of a cluster, until a signal; returns 0, or raises what went wrong."""
    _check(args)
    options = cluster_options(args)
    for notice in options.notices:
        print(f"mlxcel: warning: {notice}", file=sys.stderr)
    if options.dry_run:
        from mlxcel.cli.dry_run import run_dry

        return run_dry(args, options)
    from mlxcel.server.open_files import allow_open_files

    allow_open_files()
    if options.is_peer:
        from mlxcel.cli.peer import run_peer

        return run_peer(args, options)
    if options.is_coordinator:
        from mlxcel.cli.coordinate import run_coordinator

        return run_coordinator(args, options)
    return run_local(args)


def run_local(args: argparse.Namespace) -> int:
    """Serve a model on this machine until a signal."""
    from mlxcel.cli.local_model import open_local_model, run_local_model
    from mlxcel.engine.local import kv_budgets
    from mlxcel.engine.service import Service
    from mlxcel.server.app import create_app
    from mlxcel.server.run import bind, serve
    from mlxcel.server.site import url_of
    from mlxcel.stage.blas import choose_blas

    settings, options, budget = engine_settings(args), server_options(args), kv_budget(args)
    with bind(args.host, args.port) as sock:  # before anything that takes long
        blas = choose_blas(args.blas, workers=args.pp_workers)
        model = open_local_model(args, blas)
        for notice in (*model.notices, *context_notices(args, model), blas.notice):
            print(notice, file=sys.stderr)
        run = run_local_model(args, model, blas)
        make = partial(
            Service,
            model,
            partial(telling_quality, run, model) if args.verbose else run,
            settings,
            kv_budgets(model, budget),
            warm_up=not args.no_warmup,
        )
        line = f"listening on {url_of(sock)}"
        asyncio.run(
            serve(
                create_app(make, options),
                sock,
                lambda: print(line, file=sys.stderr, flush=True),
            )
        )
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse values that mean nothing, naming the flag."""
    seconds = "seconds, up to a million"
    counts = {
        "--parallel": args.parallel,
        "--max-batch-size": args.max_batch_size,
        "--max-queue-depth": args.max_queue_depth,
        "--ctx-size": args.ctx_size,
        "--prefill-chunk-size": args.prefill_chunk_size,
        "--pp-size": args.pp_size,
    }
    waits = {
        "--pp-timeout": args.pp_timeout,
        "--queue-timeout": args.queue_timeout,
    }
    check_bounds(
        [
            ("--prefix-cache", args.prefix_cache, args.prefix_cache >= 0, "0 (off) or more"),
            ("--port", args.port, 0 <= args.port <= HIGHEST_PORT, f"0 to {HIGHEST_PORT}"),
            *((flag, n, n is None or n >= 1, "1 or more") for flag, n in counts.items()),
            *((flag, s, 0 < s <= LONGEST_WAIT, seconds) for flag, s in waits.items()),
            (
                "--drain-timeout",
                args.drain_timeout,
                0 <= args.drain_timeout <= LONGEST_WAIT,
                f"0 or {seconds}",
            ),
        ]
    )


def engine_settings(args: argparse.Namespace) -> Settings:
    """What the flags say about the engine."""
    from mlxcel.engine.engine import Settings
    from mlxcel.engine.limits import Limits

    rows = micro_batch(args.pp_micro_batch_size)
    if rows is not None:
        flag, wanted = "--pp-micro-batch-size", "1 or more, or auto"
        check_bounds([(flag, rows, rows >= 1, wanted)])
    limits = Limits(args.parallel, args.max_batch_size, rows, args.prefill_chunk_size)
    return Settings(limits, args.max_queue_depth, args.queue_timeout, args.prefix_cache)


def context_notices(args: argparse.Namespace, model: Model) -> tuple[str, ...]:
    """A line if ``--ctx-size`` allows longer sequences than the model was made for."""
    known, given = model.context_size, args.ctx_size
    if known is None or given is None or given <= known:
        return ()
    return (
        f"mlxcel: warning: --ctx-size {given} is more than the {known} tokens that the model was "
        f"made for: what it writes beyond them may make no sense",
    )


def kv_budget(args: argparse.Namespace) -> int | None:
    """The cache bytes of every worker, if the operator says."""
    flag, text = "--kv-cache-budget", args.kv_cache_budget
    return parse_size(text, flag) if text else None


def server_options(args: argparse.Namespace) -> Options:
    """What the flags say about the HTTP server."""
    from mlxcel.server.options import Options

    path = args.model
    folder = path.resolve().name
    names = dict.fromkeys((args.alias or folder, folder, str(path), str(path.resolve())))
    name, *others = names
    return Options(
        model_id=name,
        other_names=tuple(others),
        context_size=args.ctx_size,
        api_keys=_api_keys(args),
        allowed_origins=_allowed_origins(args),
        metrics=args.metrics,
        max_body_size=_max_body_size(args),
        drain_timeout=args.drain_timeout,
    )


def _allowed_origins(args: argparse.Namespace) -> tuple[str, ...]:
    if args.allowed_origins is None:
        return ()
    origins = tuple(origin.strip() for origin in args.allowed_origins.split(","))
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--allowed-origins: {origin or 'nothing'} is no origin.",
                "Give scheme, host and port as a browser does, such as https://chat.example or "
                "http://localhost:3000, or * for every page.",
            )
    return origins


def _max_body_size(args: argparse.Namespace) -> int:
    flag = "--max-body-size"
    size = parse_size(args.max_body_size, flag)
    check_bounds([(flag, size, size >= 1, "1 or more bytes")])  # 0 would be no limit to aiohttp
    return size


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    keys = [key.strip() for key in args.api_key]
    if not all(keys):
        raise UsageError("--api-key is empty.", "Give a key, or leave the flag out.")
    if args.api_key_file is not None:
        file = args.api_key_file
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--api-key-file {file} cannot be read ({error}).", "Give a text file."
            ) from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise UsageError(f"--api-key-file {file} holds no key.", "Write one key a line.")
        keys += found
    return tuple(keys)

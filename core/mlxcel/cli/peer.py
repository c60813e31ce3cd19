"""A peer: ``mlxcel serve --pp-peer``, or a stage of a TOML file that lists the nodes.

It keeps a worker ready, waits for a coordinator, is a stage of its cluster for as long as that
runs, and waits for the next.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from functools import partial

from mlxcel.cli.plugins import discover
from mlxcel.cluster.identity import Checkpoints
from mlxcel.cluster.offers import OwnPlan
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.own_plan import own_digest
from mlxcel.cluster.peer import Peer
from mlxcel.plugins import Plugins
from mlxcel.server.peer_app import create_peer_app
from mlxcel.server.run import bind, ending_signals, make_runner
from mlxcel.server.site import Site, url_of
from mlxcel.stage.blas import choose_blas

MOST_CONNECTIONS = 64
"""Of HTTP, where anybody may connect: the cluster's connections need their share of open files."""


def run_peer(args: argparse.Namespace, options: ClusterOptions) -> int:
    """Be a peer until a signal; returns 0, or raises what went wrong."""
    plugins = discover(args)
    checkpoints = Checkpoints(options.models)
    blas = choose_blas(args.blas, workers="process")
    _say(blas.notice)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(bind(args.host, args.port)) if options.http else None
        make = partial(
            Peer,
            options,
            checkpoints,
            plugins,
            environment=blas.environment,
            own_plan=_own_plan(args, options, plugins),
            say=_say,
        )
        asyncio.run(_run(make, sock))
    return 0


def _own_plan(
    args: argparse.Namespace, options: ClusterOptions, plugins: Plugins
) -> OwnPlan | None:
    if options.topology is None:
        return None
    digest = partial(
        own_digest,
        plugins=plugins,
        topology=options.topology,
        layers=args.pp_layers,
        mirrors=args.allow_mirrored_kv,
    )
    return OwnPlan(options.node, options.topology, digest)


async def _run(make: partial[Peer], sock: socket.socket | None) -> None:
    peer = make()
    async with contextlib.AsyncExitStack() as stack:
        if sock is not None:
            await stack.enter_async_context(_http(peer, sock))
        running = asyncio.ensure_future(peer.run())
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, running.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await running


@contextlib.asynccontextmanager
async def _http(peer: Peer, sock: socket.socket) -> AsyncIterator[None]:
    runner = make_runner(create_peer_app(peer))
    await runner.setup()
    try:
        await Site(runner, sock, MOST_CONNECTIONS).start()
        _say(f"health and metrics on {url_of(sock)}")
        yield
    finally:
        await runner.cleanup()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

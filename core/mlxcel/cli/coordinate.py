"""A coordinator: ``mlxcel serve --pp-auto N``, or with a TOML file that lists the nodes.

It finds the peers, divides the model among them, brings them up, and serves HTTP. Neither MLX
nor mlx-lm is imported here.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn

from mlxcel.checkpoint.config import read_config
from mlxcel.cli.plugins import discover
from mlxcel.cli.progress import LoadingBars
from mlxcel.cli.quality import telling_quality
from mlxcel.cli.serve import context_notices, engine_settings, kv_budget, server_options
from mlxcel.cli.tensor_flags import tensor_options
from mlxcel.cluster.agreement import differences, disagreements
from mlxcel.cluster.assign import Assignment, assign
from mlxcel.cluster.coordinator import Coordinator
from mlxcel.cluster.discovery import find_peers
from mlxcel.cluster.introduce import introduce, used_plugins
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.plan_terms import CONTEXT
from mlxcel.cluster.remote_model import Wishes, make_offers, plan_remotely
from mlxcel.cluster.remote_pipeline import running_remotely
from mlxcel.cluster.resources import free_memory, kv_budgets
from mlxcel.cluster.topology import COORDINATOR, Node, Topology
from mlxcel.cluster.topology_toml import check_writable, emit_topology, write_topology
from mlxcel.engine.model import Model
from mlxcel.engine.service import RunModel, Service, credits_of
from mlxcel.errors import BringUpError
from mlxcel.family.choose import choose_family
from mlxcel.partition.ranges import format_ranges
from mlxcel.partition.report import PartitionQualityReport
from mlxcel.pipeline.pipeline import OnProgress
from mlxcel.pipeline.workers import WorkerPipeline
from mlxcel.plugins import Plugins
from mlxcel.server.app import create_app
from mlxcel.server.run import bind, ending_signals, serve
from mlxcel.server.site import url_of
from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.make import make_transport
from mlxcel.transport.spin import spin_for

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
"""How long a peer may take to be connected to, and to answer each question of the bring-up."""


def run_coordinator(args: argparse.Namespace, options: ClusterOptions) -> int:
    """Serve until a signal; returns 0, or raises what went wrong."""
    settings, http = engine_settings(args), server_options(args)
    plugins = discover(args)
    ours = introduce(
        plugins, node=options.node or COORDINATOR, role="coordinator", cluster=options.name
    )
    family, _ = choose_family(read_config(args.model), plugins)
    assert options.secret is not None, "a coordinator has a secret"
    with bind(args.host, args.port, listen=False) as sock, _interruptible():
        path = options.config_path(COORDINATOR)
        if options.topology is None:
            check_writable(path)  # it is written when all have agreed, too late to fail
        assignment = _assignment(options)
        topology = assignment.topology
        transport = make_transport(
            plugins, topology.transport_backend, TransportOptions(spin=spin_for(1))
        )
        grace = options.heartbeat_grace
        with Coordinator(options.secret, ours, grace=grace) as coordinator:
            phases = Phases()
            _show_nodes(assignment)
            with phases.timed("connect"):
                peers = coordinator.connect(
                    [(node.id, node.address) for node in topology.stages],
                    CONNECT_SECONDS,
                    patience=options.discovery_timeout,
                    on_waiting=lambda address: _say(f"waiting for the peer at {address}"),
                )
            _check_agreement(ours, peers, family, plugins, topology)
            with phases.timed("plan"):
                wishes, probe = plan_wishes(args), options.mode == "coordinator-auto"
                model = plan_remotely(args.model, plugins, topology, peers, wishes, probe=probe)
            _show_plan(model, topology, peers, warn=not args.verbose)  # else with the report
            for notice in context_notices(args, model):
                _say(notice)
            credits = credits_of(model, settings)
            offers = make_offers(
                model,
                topology,
                ours,
                credits=credits,
                timeout=args.pp_timeout,
                collectives=args.tp_collectives,
                rank_timeout=args.tp_timeout,
                terms=wishes.terms,
            )
            phases.seconds.update(coordinator.bring_up(offers, ANSWER_SECONDS))
            if probe:
                write_topology(path, emit_topology(topology))
                _say(f"cluster: {path}")
            run = partial(running_remotely, model, coordinator, transport, grace, args.pp_timeout)
            shown: RunModel = partial(_run, topology.stages, run)
            make = partial(
                Service,
                model,
                partial(telling_quality, shown, model) if args.verbose else shown,
                settings,
                kv_budgets(model, peers, topology, kv_budget(args)),
                places=[stage.device_id for stage in model.plan.stages],
                warm_up=not args.no_warmup,
                on_ready=phases.show,
            )
            line = f"listening on {url_of(sock)}"
            asyncio.run(serve(create_app(make, http), sock, lambda: _say(line)))
    return 0


class Phases:
    """How long each part of the bring-up took, in seconds, in the order of their ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time what happens within."""
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def show(self, loading: float, warm_up: float) -> None:
        """Say all of them, when the model is loaded and warm."""
        rest = sum(self.seconds.values()) + warm_up
        parts = {**self.seconds, "load": loading, "warm-up": warm_up}
        text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items())
        _say(f"ready: {text}; {rest:.2f} s without the load")


def _assignment(options: ClusterOptions) -> Assignment:
    if options.topology is not None:
        return Assignment(options.topology)
    return assign(options, find_peers(options, _say).peers)


def _check_agreement(
    ours: Introduction,
    peers: Sequence[Introduction],
    family: str,
    plugins: Plugins,
    topology: Topology,
) -> None:
    """Refuse peers that cannot form one pipeline, and warn of those that are not quite alike.

    Raises:
        BringUpError: Some cannot; it lists all of them.
    """
    used = used_plugins(plugins, family, topology.transport_backend)
    nodes = [node.id for node in topology.stages]
    if failures := disagreements(ours, peers, nodes, family, used):
        raise BringUpError("check", failures)
    for line in differences(peers):
        _say(f"mlxcel: warning: {line}")


def plan_wishes(args: argparse.Namespace) -> Wishes:
    """What the flags say about the plan."""
    return Wishes(
        dtype=args.dtype,
        weights=args.weights,
        layers=args.pp_layers,
        by=args.pp_balance,
        kv_budget=kv_budget(args),
        context=args.ctx_size or CONTEXT,
        chunk=args.prefill_chunk_size,
        mirrors=args.allow_mirrored_kv,
        tensor=tensor_options(args),
    )


@contextmanager
def _run(
    nodes: Sequence[Node], run: RunModel, *, credits: int, on_progress: OnProgress
) -> Iterator[WorkerPipeline]:
    """Run the stages, and show on standard error how their loading goes."""
    bars = LoadingBars()

    def progress(stage: int, done: int, total: int) -> None:
        bars(stage, done, total)
        on_progress(stage, done, total)

    with ExitStack() as stack:
        stack.callback(bars.close)
        pipeline = stack.enter_context(run(credits=credits, on_progress=progress))
        bars.close()
        for node, done in zip(nodes, pipeline.loaded_ranks, strict=True):
            _say(f"{node.id}: loaded {done.bytes / 1e6:.1f} MB in {done.seconds:.2f} s")
        yield pipeline


def _show_nodes(assignment: Assignment) -> None:
    _say(assignment.topology.describe())
    for address in assignment.spares:
        _say(f"not used, a spare: {address}")


def _show_plan(
    model: Model, topology: Topology, peers: Sequence[Introduction], *, warn: bool
) -> None:
    for notice in model.notices:
        _say(notice)
    for node, memory in zip(topology.stages, free_memory(peers), strict=True):
        stage = model.plan.stages[node.stage or 0]
        room = f"of {memory / 1e9:.1f} GB free" if memory else "of unknown memory"
        _say(
            f"{node.id} @ {node.address}: layers {format_ranges([stage.layer_range])}, "
            f"{stage.estimated_memory_bytes / 1e6:.1f} MB {room}"
        )
    report = PartitionQualityReport(model.plan.stages, model.plan.profile.groups)
    if warn and (warning := report.warning()):
        _say(warning)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Every signal does what Ctrl-C does, until the server has handlers of its own."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

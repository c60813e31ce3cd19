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
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn

import attrs

from mlxcel.cli.plugins import discover
from mlxcel.cli.progress import LoadingBars
from mlxcel.cli.serve import engine_settings, kv_budget, server_options
from mlxcel.cluster.agreement import differences, disagreements
from mlxcel.cluster.assign import Assignment, assign
from mlxcel.cluster.coordinator import Coordinator
from mlxcel.cluster.discovery import find_peers
from mlxcel.cluster.introduce import introduce, used_plugins
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.remote_model import CONTEXT, Wishes, make_offers, plan_remotely
from mlxcel.cluster.remote_pipeline import RemotePipeline, running_remotely
from mlxcel.cluster.resources import kv_budgets
from mlxcel.cluster.topology import COORDINATOR, Topology
from mlxcel.cluster.topology_toml import emit_topology, write_topology
from mlxcel.engine.model import Model
from mlxcel.engine.scheduler import credits_for
from mlxcel.engine.service import Service
from mlxcel.errors import BringUpError
from mlxcel.partition.ranges import format_ranges
from mlxcel.partition.report import PartitionQualityReport
from mlxcel.pipeline.pipeline import OnProgress
from mlxcel.server.app import create_app
from mlxcel.server.run import bind, serve, url_of
from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.make import make_transport

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
    assert options.secret is not None, "a coordinator has a secret"
    with bind(args.host, args.port, listen=False) as sock, _interruptible():
        assignment = _assignment(options)
        topology = assignment.topology
        transport = make_transport(plugins, topology.transport_backend, TransportOptions())
        grace = options.heartbeat_grace
        with Coordinator(options.secret, ours, grace=grace) as coordinator:
            phases = Phases()
            _show_nodes(assignment)
            with phases.timed("connect"):
                addresses = [node.address for node in topology.stages]
                peers = coordinator.connect(addresses, CONNECT_SECONDS)
            with phases.timed("plan"):
                probe = options.mode == "coordinator-auto"
                model = plan_remotely(
                    args.model, plugins, topology, peers, _wishes(args), probe=probe
                )
                _check_agreement(ours, peers, model, topology)
            _show_plan(model, topology, peers)
            credits = credits_for(len(peers), settings.limits)
            offers = make_offers(
                model, topology, ours, credits=credits, timeout=args.pp_timeout
            )
            phases.seconds.update(coordinator.bring_up(offers, ANSWER_SECONDS))
            if probe:
                path = options.config_path(COORDINATOR)
                write_topology(path, emit_topology(topology))
                _say(f"cluster: {path}")
            run = partial(
                _run,
                partial(
                    running_remotely,
                    model,
                    coordinator,
                    transport,
                    grace=grace,
                    timeout=args.pp_timeout,
                ),
                model,
            )
            make = partial(
                Service,
                model,
                run,
                settings,
                kv_budgets(model, peers, kv_budget(args)),
                warm_up=not args.no_warmup,
                on_ready=phases.show,
            )
            line = f"listening on {url_of(sock)}"
            asyncio.run(serve(create_app(make, http), sock, lambda: _say(line)))
    return 0

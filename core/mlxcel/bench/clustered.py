"""A cluster on this machine as a subject: peers as their own processes, their coordinator here."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mlxcel.bench.subjects import TIMEOUT, Staged
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.coordinator import Coordinator
from mlxcel.cluster.introduce import introduce
from mlxcel.cluster.remote_model import Wishes, make_offers, plan_remotely
from mlxcel.cluster.remote_pipeline import running_remotely
from mlxcel.cluster.secret import SECRET, SECRET_FILE, ClusterSecret
from mlxcel.cluster.topology import COORDINATOR, DEFAULT_NAME, Node, Topology
from mlxcel.engine.slot import credits_for
from mlxcel.plugins import Plugins
from mlxcel.transport.contract import TransportOptions
from mlxcel.transport.make import make_transport
from mlxcel.transport.spin import spin_for

GRACE = 30.0
START_SECONDS = 60.0


@contextmanager
def clustered(
    folder: Path,
    *,
    size: int = 2,
    blas: str = "wheel",
    weights: str = "quantized",
    rows: int | None = None,
    chunk: int = 512,
    sequences: int = 8,
) -> Iterator[Staged]:
    """A loaded pipeline over ``size`` peers, planned as :func:`mlxcel.bench.subjects.staged` does.

    Args:
        sequences: The largest number of prompts that it will be given.
    """
    plugins = Plugins.discover()
    secret = ClusterSecret(secrets.token_hex(32).encode())
    topology = _topology(size)
    ours = introduce(plugins, node=COORDINATOR, role="coordinator", cluster=DEFAULT_NAME)
    with ExitStack() as stack:
        for node in topology.stages:
            stack.enter_context(_peer(folder, node.address, secret, blas))
        coordinator = stack.enter_context(Coordinator(secret, ours, grace=GRACE))
        nodes = [(node.id, node.address) for node in topology.stages]
        peers = coordinator.connect(nodes, START_SECONDS, patience=START_SECONDS)
        wishes = Wishes(weights=weights, by="time", chunk=chunk)
        model = plan_remotely(folder, plugins, topology, peers, wishes, probe=True)
        credits = credits_for(sequences, size, rows or 1)
        offers = make_offers(model, topology, ours, credits=credits, timeout=TIMEOUT)
        coordinator.bring_up(offers, START_SECONDS)
        transport = make_transport(
            plugins, topology.transport_backend, TransportOptions(spin=spin_for(size))
        )
        pipeline = stack.enter_context(
            running_remotely(model, coordinator, transport, GRACE, TIMEOUT, credits=credits)
        )
        yield Staged(pipeline, size, rows, chunk)


def _topology(size: int) -> Topology:
    """Peers at free ports, and a coordinator that nobody dials: any port will do for it."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(size)]
        ports = [sock.getsockname()[1] for sock in taken]
    stages = [
        Node(f"stage-{stage}", Address("127.0.0.1", port), "pipeline_stage", stage)
        for stage, port in enumerate(ports)
    ]
    coordinator = Node(COORDINATOR, Address("127.0.0.1", 1), "hybrid")
    return Topology((coordinator, *stages), pipeline_parallel_size=size)


@contextmanager
def _peer(folder: Path, address: Address, secret: ClusterSecret, blas: str) -> Iterator[None]:
    flags = ["--cluster-control-addr", str(address), "--blas", blas]
    environment = {**os.environ, SECRET: secret.value.decode()}
    environment.pop(SECRET_FILE, None)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "mlxcel", "serve", "--pp-peer", "-m", str(folder), *flags],
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()

"""What the flags of ``mlxcel serve`` say about the cluster, checked as a whole."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping

import attrs

from mlxcel.cli.cluster_flags import CONTROL_PORT
from mlxcel.cli.flag_rules import check_rules
from mlxcel.cli.given_flags import given
from mlxcel.cli.model_flags import LONGEST_WAIT, check_bounds
from mlxcel.cli.tensor_flags import check_shared, tensor_options
from mlxcel.cluster.addresses import (
    HIGHEST_PORT,
    Address,
    parse_address,
    parse_addresses,
    parse_host,
)
from mlxcel.cluster.options import ClusterOptions, Mode
from mlxcel.cluster.secret import find_secret
from mlxcel.cluster.topology import (
    LARGEST,
    Node,
    Topology,
    check_name,
    parse_role,
)
from mlxcel.cluster.topology_checks import check_transport
from mlxcel.cluster.topology_toml import read_topology
from mlxcel.errors import UsageError
from mlxcel.plugins import Plugins


def cluster_options(
    args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> ClusterOptions:
    """What ``args`` say about the cluster.

    Raises:
        UsageError: Flags that exclude each other, are missing, or mean nothing.
        TopologyError: The TOML file describes no cluster that can be.
        UnsupportedError: It wants what this version does not have.
        SecretError: There is no secret.
    """
    _check_bounds(args)
    topology = _topology(args)
    mode = _mode(args, topology)
    check_rules(given(args), mode)
    options = ClusterOptions(
        mode=mode,
        models=tuple(args.models),
        layers=args.pp_layers,
        http=not mode.startswith("peer") or "--port" in given(args),
        heartbeat_grace=args.cluster_heartbeat_grace,
        dry_run=args.dry_run,
    )
    if len(options.models) > 1 and not options.is_peer:
        raise UsageError(
            "-m is given more than once.",
            "Only a peer (--pp-peer) takes several, to have what a coordinator offers.",
        )
    if mode == "local":
        return options
    transports = Plugins.discover(environ=environ, without=args.no_plugin).names("transport")
    if topology is None:
        options = _auto(args, options, transports)
    else:
        options = _manual(args, options, topology, transports)
    _check_http(args, options)
    if not (options.dry_run and options.discovery == "static"):
        file = args.cluster_secret_file
        secret = find_secret(file, environ, topology.secret_file if topology else None)
        notices = (*options.notices, *filter(None, [secret.warning]))
        options = attrs.evolve(options, secret=secret, notices=notices)
    return options


def _check_bounds(args: argparse.Namespace) -> None:
    tensor_options(args)  # of how many ranks there are depends how few stages there may be
    n, wait, grace = args.pp_auto, args.cluster_discovery_timeout, args.cluster_heartbeat_grace
    port, seconds = args.cluster_discovery_port, "seconds, up to a million"
    check_bounds(
        [
            ("--cluster-discovery-timeout", wait, 0 < wait <= LONGEST_WAIT, seconds),
            ("--cluster-heartbeat-grace", grace, 0 < grace <= LONGEST_WAIT, seconds),
            ("--cluster-discovery-port", port, 1 <= port <= HIGHEST_PORT, f"1 to {HIGHEST_PORT}"),
            (
                "--pp-auto",
                n,
                n is None or (1 if args.tp_size > 1 else 2) <= n <= LARGEST,
                f"2 to {LARGEST} stages, or 1 with --tp-size 2 or more; a model that fits one "
                f"machine needs no cluster: serve it there without --pp-auto",
            ),
        ]
    )
    check_name(args.cluster_name, "--cluster-name")
    parse_host(args.cluster_discovery_target, "--cluster-discovery-target", broadcast=True)


def _topology(args: argparse.Namespace) -> Topology | None:
    """The TOML file, when the flags that go with it are right."""
    file, node = args.distributed_config, args.node_id
    if args.pp_auto is not None and args.pp_peer:
        raise UsageError(
            "--pp-auto does not go with --pp-peer: the coordinator holds no stage.",
            "Start the coordinator with one and each peer with the other, also on one machine.",
        )
    if args.pp_auto is not None and file is not None:
        raise UsageError(
            "--pp-auto does not go with --distributed-config: the one finds the nodes itself, for "
            "the other a file lists them.",
            "Leave one out; a coordinator with a file takes --node-id instead of --pp-auto.",
        )
    if file is None:
        if args.pp_peer and node is not None:
            raise UsageError(
                "--pp-peer with --node-id lacks --distributed-config.",
                "Give the file that says what this node is; or leave --node-id out to wait for a "
                "coordinator's offer.",
            )
        return None
    if node is None:
        raise UsageError(
            "--distributed-config lacks --node-id.",
            "Say which node of the file this is"
            + ("; or leave the file out to wait for a coordinator's offer." * args.pp_peer or "."),
        )
    return read_topology(file)


def _mode(args: argparse.Namespace, topology: Topology | None) -> Mode:
    if topology is not None:
        node = _node(args, topology)
        if node is not None and node.role != "hybrid":
            return "peer-manual"
        if args.pp_peer:
            raise UsageError(
                f"--pp-peer does not go with --node-id {args.node_id}: it is the coordinator, "
                f"which holds no stage.",
                "Leave --pp-peer out, or name a node that has a stage.",
            )
        return "coordinator-manual"
    if args.pp_peer:
        return "peer-auto"
    return "local" if args.pp_auto is None else "coordinator-auto"


def _node(args: argparse.Namespace, topology: Topology) -> Node | None:
    """This node; None for a coordinator that the file does not list."""
    role = args.node_role and parse_role(args.node_role, "--node-role")
    node = topology.node(args.node_id)
    if node is None and topology.coordinator is None and role == "hybrid":
        check_name(args.node_id, "--node-id")
        return None
    if node is None:
        unlisted = (
            ""
            if topology.coordinator
            else " A coordinator that is not in the file needs "
            "--node-role hybrid and --cluster-control-addr."
        )
        raise UsageError(
            f"--node-id {args.node_id}: {args.distributed_config} has no such node.",
            f"It has {', '.join(node.id for node in topology.nodes)}.{unlisted}",
        )
    if role not in (None, node.role):
        raise UsageError(
            f"--node-role {args.node_role}: {args.distributed_config} gives {node.id!r} the role "
            f"{node.role!r}.",
            "Correct one of them, or leave the flag out.",
        )
    return node


def _auto(
    args: argparse.Namespace, options: ClusterOptions, transports: Collection[str]
) -> ClusterOptions:
    """The options where peers are found, not listed in a file."""
    mdns = args.cluster_discovery == "mdns"
    for flag in ("port", "target"):
        if not mdns and f"--cluster-discovery-{flag}" in given(args):
            raise UsageError(
                f"--cluster-discovery-{flag} does not go with static discovery, which sends and "
                f"hears no beacons.",
                "Add --cluster-discovery mdns, or leave it out.",
            )
    offered = options.is_peer and "--transport-backend" not in given(args)
    if not offered:
        check_transport(args.transport_backend, transports, "--transport-backend")
    options = attrs.evolve(
        options,
        name=args.cluster_name,
        stages=args.pp_auto or 0,
        tensor=tensor_options(args),
        transport=None if offered else args.transport_backend,
        control=_control(args, options, mdns),
        config_out=args.cluster_config_out,
        discovery=args.cluster_discovery,
        discovery_timeout=args.cluster_discovery_timeout,
        discovery_port=args.cluster_discovery_port,
        discovery_target=args.cluster_discovery_target,
    )
    if options.is_peer:
        return options
    check_shared(args, options.tensor.size)
    return attrs.evolve(options, peers=_peers(args, options, mdns))


def _peers(args: argparse.Namespace, options: ClusterOptions, mdns: bool) -> tuple[Address, ...]:
    flag, text = "--cluster-peers", args.cluster_peers
    if mdns and text is not None:
        raise UsageError(
            f"{flag} does not go with --cluster-discovery mdns: beacons say where the peers are.",
            "Leave one of them out.",
        )
    if mdns:
        return ()
    if text is None:
        raise UsageError(
            f"--pp-auto {args.pp_auto} does not know its peers.",
            f"Give {flag} A,B with the HOST:PORT of each, or --cluster-discovery mdns.",
        )
    peers = parse_addresses(text, flag)
    if len(peers) < options.places:
        shared = options.tensor.size > 1
        wanted = f"--pp-auto {args.pp_auto}" + f" --tp-size {options.tensor.size}" * shared
        each = "rank of a stage" if shared else "stage"
        raise UsageError(
            f"{flag} lists {len(peers)} of the {options.places} peers that {wanted} needs.",
            f"Every {each} has a peer of its own: list more peers, or ask for fewer stages"
            f"{' or ranks' * shared}.",
        )
    return peers


def _control(args: argparse.Namespace, options: ClusterOptions, mdns: bool) -> Address:
    """Where a peer listens; what a coordinator is called."""
    flag, text = "--cluster-control-addr", args.cluster_control_addr
    if options.is_coordinator:
        return parse_address(text, flag) if text else Address(_host(args), CONTROL_PORT)
    if mdns:
        address = parse_address(text or "0.0.0.0:0", flag)
        _ipv4(flag, address.host)
        _ipv4("--cluster-discovery-target", args.cluster_discovery_target)
        return address
    if text is None:
        raise UsageError(
            "--pp-peer with static discovery does not know where to listen.",
            f"Give {flag} HOST:PORT as the coordinator's --cluster-peers has it, or "
            f"--cluster-discovery mdns.",
        )
    address = parse_address(text, flag)
    if address.is_unspecified or address.port == 0:
        raise UsageError(
            f"{flag} {address}: nobody can dial it, and no beacon tells the others more.",
            "Give an address of this machine and a port, or --cluster-discovery mdns.",
        )
    return address


def _ipv4(flag: str, host: str) -> None:
    if ":" in host:
        raise UsageError(
            f"{flag}: {host} is an IPv6 address, and beacons are IPv4 only.",
            "Give an IPv4 address, or list the peers with --cluster-peers.",
        )


def _host(args: argparse.Namespace) -> str:
    return parse_host(args.host, "--host")


def _manual(
    args: argparse.Namespace,
    options: ClusterOptions,
    topology: Topology,
    transports: Collection[str],
) -> ClusterOptions:
    """The options of the node that the file or the flags say."""
    source = str(args.distributed_config)
    check_transport(topology.transport_backend, transports, f"{source}: transport_backend")
    ranks = topology.tensor_parallel_size
    if topology.pipeline_parallel_size * ranks < 2:
        raise UsageError(
            f"{source}: pipeline_parallel_size and tensor_parallel_size are 1, and a cluster needs "
            f"2 stages or more, or stages of 2 ranks or more.",
            "Serve a model that fits one machine there, without --distributed-config.",
        )
    _must_agree(args, "--tp-size", args.tp_size, ranks, source)
    tensor = attrs.evolve(tensor_options(args), size=ranks)
    if options.is_coordinator:
        check_shared(args, ranks)
    _must_agree(
        args, "--transport-backend", args.transport_backend, topology.transport_backend, source
    )
    node = topology.node(args.node_id)
    flag, text = "--cluster-control-addr", args.cluster_control_addr
    if node is None and text is None:
        raise UsageError(
            f"{source} does not list the coordinator {args.node_id!r}.",
            f"Give {flag} HOST:PORT, or add the node to the file.",
        )
    control = node.address if node else parse_address(text, flag)
    if text is not None:
        _must_agree(args, flag, parse_address(text, flag), control, source)
    _check_listed(args, topology, source)
    if options.layers is not None and topology.layers is not None:
        raise UsageError(
            f"--pp-layers does not go with the layers that {source} gives its nodes.",
            "Leave one of them out, on all nodes alike.",
        )
    return attrs.evolve(
        options,
        name=topology.name,
        node=args.node_id,
        stages=topology.pipeline_parallel_size,
        tensor=tensor,
        control=control,
        topology=topology,
        discovery_timeout=args.cluster_discovery_timeout,
        peers=tuple(node.address for node in topology.stages),
        transport=topology.transport_backend,
    )


def _must_agree(
    args: argparse.Namespace, flag: str, value: object, listed: object, source: str
) -> None:
    if flag in given(args) and value != listed:
        raise UsageError(
            f"{flag} {value}: {source} has {listed}.",
            "Correct one of them, or leave the flag out.",
        )


def _check_listed(args: argparse.Namespace, topology: Topology, source: str) -> None:
    """Whether ``--peers`` names the file's nodes; the coordinator and this one may be left out."""
    if args.peers is None:
        return
    peers = set(parse_addresses(args.peers, "--peers"))
    unknown = peers - {node.address for node in topology.nodes}
    others = {node.address for node in topology.stages if node.id != args.node_id}
    if wrong := sorted(map(str, unknown | (others - peers))):
        raise UsageError(
            f"--peers and {source} do not agree about {', '.join(wrong)}.",
            "Correct one of them, or leave the flag out.",
        )


def _check_http(args: argparse.Namespace, options: ClusterOptions) -> None:
    """Refuse one address for HTTP and for the cluster, and HTTP flags where there is no HTTP."""
    for flag in ("--host", "--metrics"):
        if not options.http and flag in given(args):
            raise UsageError(
                f"{flag} without --port: a peer serves /health and /metrics only where --port "
                f"says so.",
                "Add --port, or leave it out.",
            )
    control = options.control
    if options.http and control is not None and args.port == control.port != 0:
        http = Address(_host(args), args.port)
        if http.host == control.host or http.is_unspecified or control.is_unspecified:
            raise UsageError(
                f"--port {args.port} is the port of the cluster's address {control} too.",
                "Give another --port or --cluster-control-addr.",
            )

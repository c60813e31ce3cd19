"""What the flags of a cluster mean together, and which exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxcel.cli.cluster_options import cluster_options
from mlxcel.cli.main import build_parser
from mlxcel.cluster.addresses import Address
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.topology_toml import parse_topology
from mlxcel.errors import MlxcelError, SecretError, UsageError
from mlxcel.tensor.options import TensorParallel

SECRET = "a secret of the cluster"
ENVIRON = {"MLXCEL_CLUSTER_SECRET": SECRET}

TOML = """
[cluster]
name = "by-hand"
pipeline_parallel_size = 2
[[nodes]]
id = "head"
address = "10.0.0.1:19000"
role = "hybrid"
[[nodes]]
id = "stage-0"
address = "10.0.0.2:19001"
role = "pipeline_stage"
stage = 0
[[nodes]]
id = "stage-1"
address = "10.0.0.3:19001"
role = "pipeline_stage"
stage = 1
"""
HEADLESS = TOML.replace(TOML.split("[[nodes]]")[1], "", 1).replace("[[nodes]][[", "[[", 1)

AUTO = "--pp-auto 2 --cluster-peers 10.0.0.2:19001,10.0.0.3:19001"
MDNS = "--pp-auto 2 --cluster-discovery mdns"
PEER = "--pp-peer --cluster-control-addr 10.0.0.2:19001"
MDNS_PEER = "--pp-peer --cluster-discovery mdns"
HEAD = "--distributed-config {toml} --node-id head"
STAGE = "--distributed-config {toml} --node-id stage-0"


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., ClusterOptions]:
    """The options of a command line; ``{toml}`` in it stands for a file."""

    def parse(flags: str, environ: dict[str, str] = ENVIRON, toml: str = TOML) -> ClusterOptions:
        file = tmp_path / "by-hand.toml"
        file.write_text(toml)
        words = flags.format(toml=file).split()
        args = build_parser().parse_args(["serve", "-m", "model", *words])
        return cluster_options(args, environ)

    return parse


Options = Callable[..., ClusterOptions]


def test_no_cluster(options: Options) -> None:
    """Without flags of a cluster nothing is one, and no secret is looked for."""
    found = options("--pp-size 2 --pp-workers thread", environ={})
    assert (found.mode, found.is_peer, found.is_coordinator) == ("local", False, False)
    assert (found.secret, found.control, found.models) == (None, None, (Path("model"),))


def test_a_coordinator_with_listed_peers(options: Options) -> None:
    """Name, size, peers and the defaults of all else."""
    found = options(f"{AUTO} --cluster-name demo --host 10.0.0.1")
    assert found.mode == "coordinator-auto" and found.is_coordinator
    assert (found.name, found.stages, found.discovery) == ("demo", 2, "static")
    assert found.peers == (Address("10.0.0.2", 19001), Address("10.0.0.3", 19001))
    assert found.control == Address("10.0.0.1", 19000)
    assert found.secret is not None and found.secret.value == SECRET.encode()
    assert (found.transport, found.http, found.heartbeat_grace) == ("tcp", True, 5.0)
    assert found.config_path("coordinator") == Path.cwd() / ".mlxcel" / "cluster.toml"


def test_a_coordinator_that_hears_beacons(options: Options) -> None:
    """No peers are listed; time and port are those of the flags."""
    more = "--cluster-discovery-timeout 7 --cluster-discovery-port 5000"
    found = options(f"{MDNS} {more} --cluster-control-addr [::1]:1 --cluster-config-out out.toml")
    assert (found.peers, found.discovery) == ((), "mdns")
    assert (found.discovery_timeout, found.discovery_port) == (7.0, 5000)
    assert found.control == Address("::1", 1)
    assert found.config_path("coordinator") == Path.cwd() / "out.toml"
    defaults = options(MDNS)
    assert (defaults.discovery_timeout, defaults.discovery_port) == (60.0, 49555)


def test_a_peer_at_a_known_address(options: Options) -> None:
    """It listens where it says; name, transport and place come with the offer."""
    found = options(f"{PEER} -m other -m third")
    assert found.mode == "peer-auto" and found.is_peer
    assert found.control == Address("10.0.0.2", 19001)
    assert found.models == (Path("model"), Path("other"), Path("third"))
    assert (found.stages, found.transport, found.http) == (0, None, False)
    assert found.config_path("stage-3") == Path.cwd() / ".mlxcel" / "cluster-stage-3.toml"


def test_a_peer_that_sends_beacons(options: Options) -> None:
    """It listens anywhere, unless told otherwise."""
    found = options(MDNS_PEER)
    assert (found.control, found.discovery) == (Address("0.0.0.0", 0), "mdns")
    assert (found.discovery_target, found.discovery_port) == ("255.255.255.255", 49555)
    told = options(
        f"{MDNS_PEER} --cluster-control-addr 10.0.0.2:0 --cluster-discovery-target 10.0.0.255"
    )
    assert (told.control, told.discovery_target) == (Address("10.0.0.2", 0), "10.0.0.255")


def test_a_peer_may_insist_on_a_transport(options: Options) -> None:
    """Only a transport that was named is demanded of the offer."""
    assert options(f"{PEER} --transport-backend tcp").transport == "tcp"


def test_a_peer_serves_http_where_it_is_told(options: Options) -> None:
    """--port, even with the port it would have anyway, is what starts it."""
    assert options(f"{PEER} --port 8080").http
    assert options(f"{PEER} --port 0 --host 0.0.0.0 --metrics").http


@pytest.mark.parametrize("flags", [STAGE, f"{STAGE} --pp-peer"])
def test_a_stage_by_hand(options: Options, flags: str) -> None:
    """The file says all; --pp-peer beside it changes nothing."""
    found = options(flags)
    assert (found.mode, found.node, found.name) == ("peer-manual", "stage-0", "by-hand")
    assert (found.stages, found.transport) == (2, "tcp")
    assert found.control == Address("10.0.0.2", 19001)
    assert found.peers == (Address("10.0.0.2", 19001), Address("10.0.0.3", 19001))
    assert found.topology == parse_topology(TOML, "")


def test_a_coordinator_by_hand(options: Options) -> None:
    """Its layers may be given, too."""
    found = options(f"{HEAD} --pp-layers 0-3,4-5")
    assert (found.mode, found.node, found.layers) == ("coordinator-manual", "head", "0-3,4-5")
    assert found.control == Address("10.0.0.1", 19000)


@pytest.mark.parametrize(
    "flags",
    [
        "--node-role pipeline_stage",
        "--peers 10.0.0.3:19001",
        "--peers 10.0.0.3:19001,10.0.0.2:19001",
        "--peers 10.0.0.1:19000,10.0.0.2:19001,10.0.0.3:19001",
        "--cluster-control-addr 10.0.0.2:19001",
        "--transport-backend tcp",
    ],
)
def test_what_agrees_with_the_file(options: Options, flags: str) -> None:
    """What the file says may be said again."""
    assert options(f"{STAGE} {flags}").node == "stage-0"


def test_a_coordinator_that_the_file_does_not_list(options: Options) -> None:
    """It says its role and its address itself."""
    flags = "--distributed-config {toml} --node-id coordinator --node-role hybrid"
    found = options(f"{flags} --cluster-control-addr 10.0.0.9:1", toml=HEADLESS)
    assert (found.mode, found.control) == ("coordinator-manual", Address("10.0.0.9", 1))
    with pytest.raises(UsageError, match="--cluster-control-addr HOST:PORT"):
        options(flags, toml=HEADLESS)
    with pytest.raises(UsageError, match="--node-role hybrid and --cluster-control-addr"):
        options("--distributed-config {toml} --node-id coordinator", toml=HEADLESS)


def test_the_secret_of_the_toml_file(options: Options, tmp_path: Path) -> None:
    """It counts where no flag and no variable names another; it stands beside the file."""
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "key").chmod(0o644)
    toml = TOML.replace("[cluster]", '[cluster]\nsecret_file = "key"')
    found = options(STAGE, environ={}, toml=toml)
    assert found.secret is not None
    assert found.secret.source == f"secret_file {tmp_path / 'key'}"
    assert found.notices == (found.secret.warning,) != ("",)


@pytest.mark.parametrize("flags", [AUTO, MDNS, PEER, MDNS_PEER, HEAD, STAGE, f"{MDNS} --dry-run"])
def test_every_node_needs_the_secret(options: Options, flags: str) -> None:
    """Only a dry run that hears no beacons does without."""
    with pytest.raises(SecretError, match="mlxcel cluster secret PATH"):
        options(flags, environ={})


def test_a_static_dry_run_needs_no_secret(options: Options) -> None:
    """It talks to nobody."""
    found = options(f"{AUTO} --dry-run", environ={})
    assert (found.dry_run, found.secret) == (True, None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # what excludes what
        (f"{AUTO} --pp-peer", "--pp-auto does not go with --pp-peer"),
        (f"{AUTO} --distributed-config x", "--pp-auto does not go with --distributed-config"),
        (f"{AUTO} --pp-layers 0-1,2-3", "--pp-layers does not go with --pp-auto: the coordinator"),
        (f"{AUTO} --pp-size 2", "--pp-size does not go with --pp-auto"),
        (f"{AUTO} --pp-workers thread", "--pp-workers does not go with --pp-auto"),
        (f"{AUTO} --blas wheel", "--blas does not go with --pp-auto: a coordinator computes"),
        (f"{AUTO} --node-id a", "--node-id does not go with --pp-auto"),
        (f"{AUTO} --node-role hybrid", "--node-role does not go with --pp-auto"),
        (f"{AUTO} --peers a:1", "--peers does not go with --pp-auto"),
        (f"{AUTO} --cluster-discovery mdns", "--cluster-peers does not go with --cluster-disc"),
        (f"{AUTO} --cluster-discovery-port 9", "does not go with static discovery"),
        (f"{MDNS} --cluster-discovery-target a", "--cluster-discovery-target does not go with"),
        (f"{PEER} --pp-layers 0-1", "--pp-layers does not go with --pp-peer"),
        (f"{PEER} --cluster-peers a:1", "--cluster-peers does not go with --pp-peer"),
        (f"{PEER} --cluster-discovery-timeout 9", "does not go with --pp-peer"),
        (f"{PEER} --cluster-discovery-target a", "does not go with static discovery"),
        (f"{PEER} --dtype float32", "--dtype does not go with --pp-peer: the coordinator decides"),
        (f"{PEER} --weights quantized", "--weights does not go with --pp-peer"),
        (f"{PEER} --kv-cache-budget 1GB", "--kv-cache-budget does not go with --pp-peer"),
        (f"{PEER} --parallel 4", "--parallel does not go with --pp-peer: requests are the"),
        (f"{PEER} --verbose", "--verbose does not go with --pp-peer: the coordinator tells how"),
        (f"{PEER} --allowed-origins *", "--allowed-origins does not go with --pp-peer"),
        (f"{PEER} --alias x", "--alias does not go with --pp-peer: a peer serves nothing but"),
        (f"{PEER} --api-key x", "--api-key does not go with --pp-peer"),
        (f"{PEER} --metrics", "--metrics without --port"),
        (f"{PEER} --host 10.0.0.2", "--host without --port"),
        (f"{PEER} --dry-run", "--dry-run does not go with --pp-peer"),
        (f"{PEER} --distributed-config x", "--distributed-config lacks --node-id"),
        (f"{PEER} --node-id stage-0", "--pp-peer with --node-id lacks --distributed-config"),
        (f"{STAGE} --cluster-peers a:1", "--cluster-peers does not go with a stage with"),
        (f"{STAGE} --cluster-name x", "--cluster-name does not go with a stage with"),
        (f"{STAGE} --cluster-discovery mdns", "--cluster-discovery does not go with a stage"),
        (f"{STAGE} --cluster-config-out x", "--cluster-config-out does not go with a stage"),
        (f"{STAGE} --dry-run", "`mlxcel cluster check FILE`"),
        (f"{STAGE} --dtype float32", "--dtype does not go with a stage with"),
        (f"{HEAD} --pp-peer", "--pp-peer does not go with --node-id head: it is the coordinator"),
        (f"{HEAD} --pp-size 2", "--pp-size does not go with a coordinator with"),
        (f"{HEAD} --dry-run", "`mlxcel cluster check FILE`"),
        (f"{HEAD} -m second", "-m is given more than once"),
        (f"{AUTO} -m second", "-m is given more than once"),
        ("-m second", "-m is given more than once"),
        ("--dry-run", "--dry-run does not go with a server without a cluster"),
        ("--node-id a", "--node-id does not go with a server without a cluster"),
        ("--cluster-peers a:1", "--cluster-peers does not go with a server without a cluster"),
        ("--cluster-secret-file x", "Start a cluster with --pp-auto N"),
        ("--cluster-name mlxcel-cluster", "--cluster-name does not go with a server without"),
        ("--transport-backend tcp", "--transport-backend does not go with a server without"),
        ("--cluster-heartbeat-grace 0", "--cluster-heartbeat-grace 0.0 is out of range"),
        # what is missing
        ("--pp-auto 2", "--pp-auto 2 does not know its peers"),
        ("--pp-auto 2 --cluster-peers a:1", "lists 1 of the 2 peers"),
        ("--pp-peer", "Give --cluster-control-addr HOST:PORT"),
        ("--distributed-config {toml}", "--distributed-config lacks --node-id"),
        # what does not agree with the file
        ("--distributed-config {toml} --node-id x", "It has head, stage-0, stage-1."),
        (f"{STAGE} --node-role hybrid", "gives 'stage-0' the role 'pipeline_stage'"),
        (f"{STAGE} --node-role decode", "--node-role: 'decode' is a role of disaggregated"),
        (f"{STAGE} --peers 10.0.0.2:19001", "do not agree about 10.0.0.3:19001"),
        (f"{STAGE} --peers 10.0.0.3:19001,a:1", "do not agree about a:1"),
        (f"{STAGE} --cluster-control-addr a:1", "--cluster-control-addr a:1: "),
        (f"{STAGE} --transport-backend rdma", "--transport-backend rdma: "),
        # ranks
        (f"{AUTO} --tp-size 2", "lists 2 of the 4 peers that --pp-auto 2 --tp-size 2 needs"),
        (f"{AUTO} --tp-size 0", "--tp-size 0 is out of range"),
        ("--pp-auto 1 --tp-size 0", "--tp-size 0 is out of range"),
        (f"{AUTO} --tp-moe-mode within_expert", "--tp-moe-mode has no effect"),
        (f"{AUTO} --tp-timeout 9", "--tp-timeout has no effect"),
        (f"{AUTO} --tp-workers process", "--tp-workers does not go with --pp-auto: every rank"),
        (f"{PEER} --tp-size 2", "--tp-size does not go with --pp-peer: a peer learns from the"),
        (f"{PEER} --tp-lm-head-mode replicated", "--tp-lm-head-mode does not go with --pp-peer"),
        (f"{PEER} --tp-collectives ring", "--tp-collectives does not go with --pp-peer"),
        (f"{STAGE} --tp-size 1", "--tp-size does not go with a stage with"),
        (f"{HEAD} --tp-size 2", "--tp-size 2: "),
        (f"{HEAD} --tp-embedding-mode replicated", "--tp-embedding-mode has no effect"),
        # what means nothing
        ("--pp-auto 1", "--pp-auto 1 is out of range"),
        ("--pp-auto 2000", "--pp-auto 2000 is out of range"),
        ("--pp-auto 2 --cluster-peers a:1,b", "--cluster-peers: 'b' has no port"),
        ("--pp-auto 2 --cluster-peers a:1,a:1", "--cluster-peers has a:1 twice"),
        (f"{AUTO} --transport-backend rdma", "no transport 'rdma' is installed"),
        (f"{PEER} --transport-backend rdma", "no transport 'rdma' is installed"),
        (f"{AUTO} --cluster-name a/b", "--cluster-name: 'a/b' is no name"),
        (f"{AUTO} --cluster-heartbeat-grace 0", "--cluster-heartbeat-grace 0.0 is out of range"),
        (f"{MDNS} --cluster-discovery-timeout nan", "--cluster-discovery-timeout nan is out"),
        (f"{MDNS} --cluster-discovery-port 0", "--cluster-discovery-port 0 is out of range"),
        (f"{MDNS_PEER} --cluster-discovery-target ?", "--cluster-discovery-target: '?'"),
        (f"{MDNS_PEER} --cluster-discovery-target fd00::1", "beacons are IPv4 only"),
        (f"{MDNS_PEER} --cluster-control-addr [::]:0", "--cluster-control-addr: :: is an IPv6"),
        ("--pp-peer --cluster-control-addr 0.0.0.0:9", "0.0.0.0:9: nobody can dial it"),
        ("--pp-peer --cluster-control-addr a:0", "--cluster-control-addr a:0: nobody can dial"),
        (f"{AUTO} --port 19000", "--port 19000 is the port of the cluster's address 127.0.0.1"),
        (f"{AUTO} --host 0.0.0.0 --cluster-control-addr 10.0.0.1:8080", "--port 8080 is the"),
        (f"{PEER} --port 19001 --host 0.0.0.0", "--port 19001 is the port of"),
    ],
)
def test_flags_that_are_refused(options: Options, flags: str, words: str) -> None:
    """Whatever does not go together is refused with the reason and a way out, exit 2."""
    with pytest.raises(MlxcelError) as caught:
        options(flags)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("pipeline_parallel_size = 2", "pipeline_parallel_size = 3", "2 nodes hold a stage"),
        ('name = "by-hand"', 'transport_backend = "rdma"', "no transport 'rdma' is installed"),
    ],
)
def test_files_that_are_refused(options: Options, old: str, new: str, words: str) -> None:
    """A file is checked before anything starts."""
    with pytest.raises(MlxcelError, match=words) as caught:
        options(STAGE, toml=TOML.replace(old, new))
    assert caught.value.exit_code == 2


def test_one_stage_is_no_pipeline(options: Options) -> None:
    """A file with a single stage is refused with the way to serve it."""
    toml = TOML.replace("size = 2", "size = 1").partition('[[nodes]]\nid = "stage-1"')[0]
    with pytest.raises(UsageError, match="needs 2 stages or more"):
        options(STAGE, toml=toml)


MESH = "".join(
    f"""
[[nodes]]
id = "s{stage}-r{rank}"
address = "10.0.{stage}.{rank}:19001"
role = "2d"
stage = {stage}
rank = {rank}
"""
    for stage in range(2)
    for rank in range(2)
)
MESH = "[cluster]\npipeline_parallel_size = 2\ntensor_parallel_size = 2\n" + MESH
SHARED = "--tp-moe-mode within_expert --tp-timeout 9 --tp-collectives ring"


def test_a_coordinator_of_a_mesh(options: Options) -> None:
    """So many stages of so many ranks need their product of peers; one stage may be enough."""
    peers = ",".join(f"10.0.0.{number}:1" for number in range(4))
    found = options(f"--pp-auto 2 --tp-size 2 --cluster-peers {peers} {SHARED}")
    assert found.tensor == TensorParallel(2, "within_expert")
    assert (found.stages, found.places) == (2, 4)
    found = options(f"--pp-auto 1 --tp-size 4 --cluster-peers {peers}")
    assert (found.stages, found.places) == (1, 4)


def test_a_mesh_by_hand(options: Options) -> None:
    """The file says how many ranks there are; the coordinator's flags what they share out."""
    head = "--distributed-config {toml} --node-id head --node-role hybrid"
    head += " --cluster-control-addr 10.0.9.9:19000"
    found = options(f"{head} {SHARED} --tp-size 2", toml=MESH)
    assert (found.stages, found.tensor) == (2, TensorParallel(2, "within_expert"))
    assert options(head, toml=MESH).tensor == TensorParallel(2)
    rank = options("--distributed-config {toml} --node-id s1-r0", toml=MESH)
    assert (rank.mode, rank.node, rank.control) == (
        "peer-manual",
        "s1-r0",
        Address("10.0.1.0", 19001),
    )
    with pytest.raises(UsageError, match=r"--tp-size 4: .* has 2"):
        options(f"{head} --tp-size 4", toml=MESH)


def test_layers_are_given_once(options: Options) -> None:
    """--pp-layers beside layers in the file is refused."""
    toml = TOML.replace("stage = 0\n", 'stage = 0\nlayers = "0-3"\n')
    toml = toml.replace("stage = 1\n", 'stage = 1\nlayers = "4-5"\n')
    assert options(HEAD, toml=toml).topology.layers == (range(4), range(4, 6))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="--pp-layers does not go with the layers"):
        options(f"{HEAD} --pp-layers 0-3,4-5", toml=toml)


def test_a_transport_that_is_left_out_is_not_there(options: Options) -> None:
    """--no-plugin counts for transports, too."""
    with pytest.raises(MlxcelError, match=r"\(installed: none\)"):
        options(f"{AUTO} --no-plugin transport:tcp")


def test_the_secret_does_not_show(options: Options) -> None:
    """Options can be logged."""
    found: Any = options(AUTO)
    assert SECRET not in repr(found)

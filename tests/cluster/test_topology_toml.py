"""The cluster's TOML file."""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.assign import assign
from mlxcel.cluster.options import ClusterOptions
from mlxcel.cluster.topology import Node, Topology
from mlxcel.cluster.topology_toml import (
    HEADER,
    LARGEST_FILE,
    check_writable,
    emit_topology,
    parse_topology,
    read_topology,
    write_topology,
)
from mlxcel.errors import FileError, MlxcelError, TopologyError
from mlxcel.tensor.options import TensorParallel

EMITTED = """\
# The nodes of a cluster, as mlxcel writes them: the same nodes always give the same file.
[cluster]
name = "mlxcel-cluster"
pipeline_parallel_size = 2
tensor_parallel_size = 1
transport_backend = "tcp"

[[nodes]]
id = "coordinator"
address = "127.0.0.1:19000"
role = "hybrid"

[[nodes]]
id = "stage-0"
address = "192.168.1.11:19001"
role = "pipeline_stage"
stage = 0

[[nodes]]
id = "stage-1"
address = "192.168.1.12:19001"
role = "pipeline_stage"
stage = 1
"""

MESH = """
[[nodes]]
id = "s1-r1"
address = "192.168.1.13:8080"
role = "2d"
stage = 1
rank = 1
resources.memory_bytes = 64_000_000_000
layers = "20-39"
[[nodes]]
id = "s1-r0"
address = "mac.local:8080"
role = "pp_tp"
rank = 0
stage = 1
layers = "20-39"
[[nodes]]
id = "s0-r0"
address = "192.168.1.10:8080"
role = "pipeline_tensor_parallel"
stage = 0
rank = 0
layers = "0-19"
[[nodes]]
id = "s0-r1"
address = "192.168.1.11:8080"
role = "pipeline_tensor_parallel"
stage = 0
rank = 1
layers = "0-19"
[cluster]
name = "llama-70b-2x2"
pipeline_parallel_size = 2
tensor_parallel_size = 2
transport_backend = "rdma"
secret_file = "secret"
"""


def topologies() -> st.SearchStrategy[Topology]:
    """Clusters of any size, in one or two dimensions, with or without a coordinator."""

    def build(sizes: tuple[int, int], hosts: list[str], head: bool, name: str) -> Topology:
        stages, ranks = sizes
        nodes = [Node("coordinator", Address("127.0.0.1", 19000), "hybrid")] * head
        for index, host in enumerate(hosts[: stages * ranks]):
            stage, rank = divmod(index, ranks)
            address = Address(host, 1 + index)
            nodes.append(
                Node(f"stage-{stage}", address, "pipeline_stage", stage)
                if ranks == 1
                else Node(f"s{stage}-r{rank}", address, "pipeline_tensor_parallel", stage, rank)
            )
        return Topology(tuple(nodes), name, stages, ranks)

    hosts = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z]\.local", fullmatch=True)
    return st.builds(
        build,
        st.tuples(st.integers(1, 4), st.integers(1, 3)),
        st.lists(hosts, min_size=12, max_size=12),
        st.booleans(),
        st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,63}", fullmatch=True),
    )


@given(topologies())
def test_what_is_written_can_be_read(topology: Topology) -> None:
    """Reading what was written gives the same cluster, and writing that the same bytes."""
    text = emit_topology(topology)
    assert parse_topology(text, "a file") == topology
    assert emit_topology(parse_topology(text, "a file")) == text


@given(st.permutations([f"10.0.0.{n}:{m}" for n in (2, 10) for m in (9, 19001)]))
def test_the_order_of_the_peers_does_not_matter(order: list[str]) -> None:
    """The same peers give the same bytes, whatever order they were listed or heard in."""
    options = ClusterOptions("coordinator-auto", stages=3, control=Address("127.0.0.1", 19000))
    peers = [Address(*(part[0], int(part[1]))) for part in (text.split(":") for text in order)]
    first, last = assign(options, sorted(peers, key=str)), assign(options, peers)
    assert emit_topology(last.topology) == emit_topology(first.topology)
    assert last.spares == (Address("10.0.0.2", 9),)


@given(st.permutations(range(5)))
def test_the_order_of_the_nodes_does_not_matter(order: list[int]) -> None:
    """A file whose nodes stand in another order is the same cluster."""
    head, *nodes = parse_topology(MESH, "").nodes
    tables = ["[[nodes]]" + part for part in MESH.split("[[nodes]]")[1:-1]]
    last, _, cluster = MESH.split("[[nodes]]")[-1].partition("[cluster]")
    parts = [*tables, "[[nodes]]" + last, "[cluster]" + cluster]
    assert parse_topology("".join(parts[i] for i in order), "").nodes == (head, *nodes)


def test_peers_fill_a_mesh_stage_by_stage() -> None:
    """Sorted as text, so many to each stage; the rest are spares."""
    control = Address("127.0.0.1", 19000)
    options = ClusterOptions(stages=2, tensor=TensorParallel(2), control=control)
    peers = [Address("10.0.0.1", port) for port in (5, 4, 3, 2, 1)]
    found = assign(options, peers)
    assert [(n.id, n.stage, n.rank, n.address.port) for n in found.topology.stages] == [
        ("s0-r0", 0, 0, 1),
        ("s0-r1", 0, 1, 2),
        ("s1-r0", 1, 0, 3),
        ("s1-r1", 1, 1, 4),
    ]
    assert found.spares == (Address("10.0.0.1", 5),)
    assert found.topology.describe().splitlines()[1] == "TP size: 2, PP size: 2"
    with pytest.raises(TopologyError, match="3 peers are too few for 2 stages with 2 ranks each"):
        assign(options, peers[:3])


def test_the_file_byte_by_byte() -> None:
    """Keys have their order, the coordinator comes first, and nothing else is in it."""
    options = ClusterOptions("coordinator-auto", stages=2, control=Address("127.0.0.1", 19000))
    peers = [Address("192.168.1.12", 19001), Address("192.168.1.11", 19001)]
    assert emit_topology(assign(options, peers).topology) == EMITTED
    assert emit_topology(parse_topology(EMITTED, "a file")) == EMITTED


def test_the_file_of_the_documents() -> None:
    """What docs/cluster.md shows is what is written."""
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    pipeline, mesh = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert f"{HEADER}\n{pipeline}" == EMITTED
    peers = [Address(f"192.168.1.{11 + number}", 19001) for number in range(4)]
    control = Address("127.0.0.1", 19000)
    options = ClusterOptions(stages=2, tensor=TensorParallel(2), control=control)
    assert f"{HEADER}\n{mesh}" == emit_topology(assign(options, peers).topology)


def test_what_only_people_write(tmp_path: Path) -> None:
    """Aliases, memory, layers and the secret's file are read, and never written."""
    file = tmp_path / "mesh.toml"
    file.write_text(MESH)
    topology = read_topology(file)
    assert [node.id for node in topology.nodes] == ["s0-r0", "s0-r1", "s1-r0", "s1-r1"]
    assert {node.role for node in topology.nodes} == {"pipeline_tensor_parallel"}
    assert topology.layers == (range(20), range(20, 40))
    assert [node.memory_bytes for node in topology.nodes] == [None, None, None, 64_000_000_000]
    assert topology.secret_file == tmp_path / "secret"
    assert topology.transport_backend == "rdma"
    document = tomllib.loads(emit_topology(topology))
    assert set(document["cluster"]) == {
        "name",
        "pipeline_parallel_size",
        "tensor_parallel_size",
        "transport_backend",
    }
    assert all(
        list(node) == ["id", "address", "role", "stage", "rank"] for node in document["nodes"]
    )


def test_defaults() -> None:
    """A file may leave out all that has a default."""
    topology = parse_topology(
        '[[nodes]]\nid="a"\naddress="a:1"\nrole="pipeline_stage"\nstage=0', "a file"
    )
    assert topology == Topology((Node("a", Address("a", 1), "pipeline_stage", 0),))
    assert (topology.name, topology.transport_backend) == ("mlxcel-cluster", "tcp")


def test_an_absolute_secret_file_stays() -> None:
    """Only a relative path is sought beside the TOML."""
    text = EMITTED.replace("[cluster]", '[cluster]\nsecret_file = "/etc/secret"')
    assert parse_topology(text, "/some/cluster.toml").secret_file == Path("/etc/secret")


def swap(old: str, new: str) -> str:
    assert old in EMITTED
    return EMITTED.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cluster", ["it is no TOML"]),
        ("a = " + "[" * 5000, ["it is no TOML"]),
        ("a = " + "9" * 5000, ["it is no TOML"]),
        (swap("stage = 0", "stage = 0\nstage = 0"), ["it is no TOML"]),
        ("#" * (LARGEST_FILE + 1), ["more than 1048576 bytes"]),
        (swap("[cluster]", "name = 'x'\n[cluster]"), ["'name'", "Move it under [cluster]"]),
        (swap("[cluster]", "node = 1\n[cluster]"), ["'node'", "nearest known one is 'nodes'"]),
        (swap("transport_", "transport"), ["[cluster]", "'transport_backend'"]),
        (swap("address", "adress"), ["node 'coordinator'", "'adress'", "'address'"]),
        (swap("stage = 1", "stage = 1\nresources.memory = 1"), ["'memory'", "'memory_bytes'"]),
        (swap("= 2\n", "= true\n"), ["[cluster]", "'pipeline_parallel_size' is True", "integer"]),
        (swap("stage = 1", 'stage = "1"'), ["node 'stage-1'", "'stage' is '1'", "integer"]),
        (swap("stage = 1", "stage = 1.0"), ["node 'stage-1'", "'stage' is 1.0"]),
        (swap('"stage-1"', "7"), ["[[nodes]] number 3", "'id' is 7", "string"]),
        (swap('id = "stage-1"\n', ""), ["[[nodes]] number 3 has no 'id'"]),
        (swap('address = "192.168.1.12:19001"\n', ""), ["node 'stage-1' has no 'address'"]),
        ("cluster = 1", ["'cluster' is 1", "a table"]),
        ("[nodes]\nid = 'a'", ["'nodes'", "array of tables"]),
        ("nodes = [1]", ["[[nodes]] number 1 is no table"]),
        (swap("192.168.1.12:19001", "192.168.1.12"), ["node 'stage-1' address", "no port"]),
        (swap('"stage-1"', '"../up"'), ["node '../up' id", "is no name"]),
        (swap('"mlxcel-cluster"', '"a b"'), ["[cluster] name", "is no name"]),
        (swap('"tcp"', '""'), ["[cluster] transport_backend", "is no name"]),
        (swap("pipeline_stage", "decode"), ["node 'stage-0' role", "disaggregated"]),
        (swap("pipeline_stage", "stage"), ["node 'stage-0' role", "'stage' is no role"]),
        (swap("stage = 1", "stage = 1\nresources.memory_bytes = 0"), ["memory_bytes is 0"]),
        (swap("stage = 1", 'stage = 1\nlayers = "5"\n[x]'), ["unknown key 'x'"]),
        (swap("stage = 1", 'stage = 1\nlayers = "5-"'), ["node 'stage-1'", "'5-'", "no range"]),
        (swap("stage = 1", 'stage = 1\nlayers = "0-1,2-3"'), ["no range"]),
        (swap("stage = 1", "stage = 1\nlayers = 5"), ["'layers' is 5", "a string"]),
        (swap("stage = 1", "stage = 0"), ["both have stage 0"]),
        (swap("tensor_p", "expert_p"), ["'expert_parallel_size'", "two dimensions"]),
        ("ep_size = 2", ["'ep_size'", "two dimensions", "--tp-moe-mode"]),
    ],
)
def test_files_that_are_refused(text: str, words: list[str]) -> None:
    """Every fault is named with file, table and key."""
    with pytest.raises(MlxcelError) as caught:
        parse_topology(text, "some.toml")
    assert str(caught.value).startswith("some.toml: ")
    assert [word for word in words if word not in str(caught.value)] == []
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 500


@given(st.text(alphabet='[]{}="#\n.,clusternodiap 0123', max_size=60))
def test_any_text_is_a_cluster_or_refused(text: str) -> None:
    """No text makes the reader raise anything but its own errors."""
    with contextlib.suppress(MlxcelError):
        parse_topology(text, "a file")


@pytest.mark.parametrize("content", [b"\xff", None])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    """What is no text, or not there, is named."""
    file = tmp_path / "cluster.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TopologyError, match="it cannot be read") as caught:
        read_topology(file)
    assert str(file) in str(caught.value)


def test_writing_makes_the_folder_and_replaces_the_file(tmp_path: Path) -> None:
    """The file is there whole, and nothing else is left beside it."""
    file = tmp_path / ".mlxcel" / "cluster.toml"
    write_topology(file, "old")
    write_topology(file, EMITTED)
    assert file.read_text() == EMITTED
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """It is named with the flag that chooses another."""
    folder = tmp_path / "cluster.toml"
    folder.mkdir()
    with pytest.raises(FileError, match="--cluster-config-out") as caught:
        write_topology(folder, EMITTED)
    assert caught.value.path == folder
    assert list(tmp_path.iterdir()) == [folder]


def test_whether_a_file_can_be_written_is_seen_before(tmp_path: Path) -> None:
    """The file stays as it is, nothing is left beside it, and what is wrong is the same error."""
    file = tmp_path / ".mlxcel" / "cluster.toml"
    check_writable(file)
    assert list(file.parent.iterdir()) == []
    write_topology(file, EMITTED)
    check_writable(file)
    assert file.read_text() == EMITTED
    (tmp_path / "no-folder").write_text("")
    with pytest.raises(FileError, match="--cluster-config-out"):
        check_writable(tmp_path / "no-folder" / "cluster.toml")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """A link to the file, perhaps into a repository, is written through."""
    link, file = tmp_path / "cluster.toml", tmp_path / "kept" / "cluster.toml"
    link.symlink_to(file)
    write_topology(link, EMITTED)
    assert link.is_symlink()
    assert file.read_text() == EMITTED


def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    """What is no file, such as a pipe or /dev/null, is refused and stays what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileError, match="it is no file"):
        write_topology(pipe, EMITTED)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_names_and_texts_that_no_file_can_have(tmp_path: Path) -> None:
    """A loop of links, a zero byte, half a surrogate pair: the error names the file."""
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    for path, text in (
        (loop / "cluster.toml", EMITTED),
        (tmp_path / "a\0b.toml", EMITTED),
        (tmp_path / "cluster.toml", EMITTED + "# \ud800\n"),
    ):
        with pytest.raises(FileError, match="cannot be written"):
            write_topology(path, text)
    assert list(tmp_path.iterdir()) == [loop]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# \ud800\n" + EMITTED, "is no TOML"),
        ('[cluster]\nsecret_file = "~nobody-has-this-name/key"', "'secret_file' is '~nobody"),
        ("[cluster]\npipeline_parallel_size = 0x" + "f" * 5000, "of more than 64 bits"),
        ("[cluster]\nname = 0x" + "f" * 5000, "of more than 64 bits"),
        ("[cluster]\nname = [0x" + "f" * 5000 + "]", "'name' is too large"),
        (EMITTED + "resources = {memory_bytes = 0x" + "f" * 5000 + "}", "of more than 64 bits"),
    ],
    ids=["surrogate", "home", "size", "name", "within", "memory"],
)
def test_texts_that_python_stumbles_over(text: str, words: str) -> None:
    """Each is refused like any other text that describes no cluster."""
    with pytest.raises(TopologyError, match=words):
        parse_topology(text, "x.toml")

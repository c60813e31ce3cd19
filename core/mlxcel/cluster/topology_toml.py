"""A cluster's TOML file: read strictly, written always the same.

Files are written whole or not at all, and the same topology gives the same bytes, so a file can
be kept under version control.
"""

from __future__ import annotations

import contextlib
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from mlxcel.cluster.addresses import parse_address
from mlxcel.cluster.toml_table import Table
from mlxcel.cluster.topology import (
    DEFAULT_NAME,
    DEFAULT_TRANSPORT,
    Node,
    Topology,
    check_name,
    parse_role,
)
from mlxcel.cluster.topology_checks import check_topology
from mlxcel.errors import FileError, PartitionError, TopologyError
from mlxcel.partition.ranges import parse_ranges

LARGEST_FILE = 1 << 20
"""Bytes; a node needs about a hundred."""

HEADER = (
    "# The nodes of a cluster, as mlxcel writes them: the same nodes always give the same file."
)

_CLUSTER = (
    "name",
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "transport_backend",
    "secret_file",
)
_THIRD = re.compile(r"(expert|data|context|sequence)_parallel_size|(ep|dp|cp|sp)_size")
_NODE = ("id", "address", "role", "stage", "rank", "resources", "layers")
_RESOURCES = ("memory_bytes",)


def emit_topology(topology: Topology) -> str:
    """The text of the file for ``topology``; what only people write is left out."""
    lines = [
        HEADER,
        "[cluster]",
        f'name = "{topology.name}"',
        f"pipeline_parallel_size = {topology.pipeline_parallel_size}",
        f"tensor_parallel_size = {topology.tensor_parallel_size}",
        f'transport_backend = "{topology.transport_backend}"',
    ]
    for node in topology.nodes:
        lines += ["", "[[nodes]]", f'id = "{node.id}"', f'address = "{node.address}"']
        lines += [f'role = "{node.role}"']
        numbers = (("stage", node.stage), ("rank", node.rank))
        lines += [f"{key} = {number}" for key, number in numbers if number is not None]
    return "\n".join(lines) + "\n"


def write_topology(path: Path, text: str) -> None:
    """Put ``text`` into the file ``path``, making its folder if need be.

    The file is replaced at once. A link stays one, and a device is never replaced by a file.

    Raises:
        FileError: It cannot be written; the file is as it was.
    """
    with _replacing(path) as (target, part):
        with part.open("w", encoding="utf-8", newline="\n") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(target)


def check_writable(path: Path) -> None:
    """See that :func:`write_topology` can write ``path``, which stays as it is; its folder is made.

    Raises:
        FileError: It cannot be written.
    """
    with _replacing(path) as (_, part):
        part.touch()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[tuple[Path, Path]]:
    """The file that ``path`` leads to, and one beside it that may replace it.

    Raises:
        FileError: That is not possible, or what happens within goes wrong.
    """
    part = None
    try:
        target = path.resolve()
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        if target.exists() and not target.is_file():
            raise OSError("it is no file")
        target.parent.mkdir(parents=True, exist_ok=True)
        yield target, part
    # ValueError: a name or a text that no file can have. RuntimeError: a loop of links.
    except (OSError, ValueError, RuntimeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise FileError(
            path,
            f"cannot be written ({problem}).",
            "Name a file in a folder that is yours with --cluster-config-out.",
        ) from error
    finally:
        if part is not None:
            with contextlib.suppress(OSError, ValueError):
                part.unlink()


def read_topology(path: Path) -> Topology:
    """The cluster that the file ``path`` describes.

    Raises:
        TopologyError: It cannot be read.
        MlxcelError: As :func:`parse_topology` does.
    """
    source = str(path)
    try:
        with path.open("rb") as opened:
            raw = opened.read(LARGEST_FILE + 1)
        text = raw.decode("utf-8")
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise TopologyError(
            f"it cannot be read ({problem}).", "Name the cluster's TOML file.", source
        ) from error
    return parse_topology(text, source)


def parse_topology(text: str, source: str) -> Topology:
    """The cluster that ``text`` describes; it is whole and consistent.

    Args:
        source: The file it comes from; a relative ``secret_file`` is sought beside it.

    Raises:
        TopologyError: It is no TOML, too long, has a key that is not known or not of its type,
            or describes a cluster that cannot be.
        UsageError: An address, name or role is none.
        UnsupportedError: A role is one of disaggregated serving.
    """
    if len(text.encode("utf-8", "replace")) > LARGEST_FILE:
        raise TopologyError(
            f"it has more than {LARGEST_FILE} bytes.", "Name the cluster's TOML file.", source
        )
    try:
        text.encode()  # a string may hold what no file can
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"it is no TOML: {error}.", "Correct it.", source) from error
    for key in (*document, *_keys(document.get("cluster"))):
        if _THIRD.fullmatch(key):
            raise TopologyError(
                f"{key!r}: a mesh has two dimensions, stages and their ranks.",
                "Leave it out; --tp-moe-mode says how the ranks of a stage share out experts.",
                source,
            )
    for key in document:
        if key in _CLUSTER:
            raise TopologyError(
                f"{key!r} stands outside of all tables.", "Move it under [cluster].", source
            )
    top = Table(document, "the file", source, ("cluster", "nodes"))
    cluster = Table(top.get("cluster", dict, {}), "[cluster]", source, _CLUSTER)
    nodes = top.get("nodes", list, [])
    topology = Topology(
        nodes=tuple(_node(node, number, source) for number, node in enumerate(nodes, 1)),
        name=check_name(cluster.get("name", str, DEFAULT_NAME), cluster.place("name")),
        pipeline_parallel_size=cluster.get("pipeline_parallel_size", int, 1),
        tensor_parallel_size=cluster.get("tensor_parallel_size", int, 1),
        transport_backend=check_name(
            cluster.get("transport_backend", str, DEFAULT_TRANSPORT),
            cluster.place("transport_backend"),
        ),
        secret_file=_beside(cluster, "secret_file"),
    )
    return check_topology(topology, source)


def _node(values: object, number: int, source: str) -> Node:
    title = f"[[nodes]] number {number}"
    if not isinstance(values, dict):
        raise TopologyError(f"{title} is no table.", "Write each under its own [[nodes]].", source)
    if isinstance(name := values.get("id"), str) and len(name) < 80:
        title = f"node {name!r}"
    table = Table(values, title, source, _NODE)
    name = check_name(table.need("id", str), table.place("id"))
    resources = Table(table.get("resources", dict, {}), f"{title} resources", source, _RESOURCES)
    memory = resources.get("memory_bytes", int, None)
    if memory is not None and not 0 < memory < 1 << 63:
        raise TopologyError(
            f"{resources.title}: memory_bytes is {memory}.", "Give bytes, 1 or more.", source
        )
    return Node(
        id=name,
        address=parse_address(table.need("address", str), table.place("address")),
        role=parse_role(table.need("role", str), table.place("role")),
        stage=table.get("stage", int, None),
        rank=table.get("rank", int, None),
        memory_bytes=memory,
        layers=_layers(table),
    )


def _keys(table: object) -> tuple[str, ...]:
    return tuple(table) if isinstance(table, dict) else ()


def _layers(table: Table) -> range | None:
    text = table.get("layers", str, None)
    if text is None:
        return None
    try:
        [layers] = parse_ranges(text)
    except (PartitionError, ValueError) as error:
        raise TopologyError(
            f"{table.title}: 'layers' is {text!r}, which is no range.",
            'Write both ends, such as "0-19".',
            table.source,
        ) from error
    return layers


def _beside(table: Table, key: str) -> Path | None:
    """The file that ``key`` names, relative to the TOML's own folder.

    Raises:
        TopologyError: It is in the home of somebody who is not known.
    """
    text = table.get(key, str, None)
    if text is None:
        return None
    try:
        return Path(table.source).parent / Path(text).expanduser()
    except RuntimeError as error:  # a ~user that nobody is
        raise TopologyError(
            f"{table.title}: {key!r} is {text!r}: {error}", "Name a file.", table.source
        ) from error

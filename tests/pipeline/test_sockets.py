"""What each worker of a grid is connected with, and that both ends agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel.pipeline.grid import free_ports, wire
from mlxcel.pipeline.sockets import sockets_of
from mlxcel.stage.contract import StageSpec
from mlxcel.tensor.options import TensorParallel
from mlxcel.transport.contract import TransportOptions

ENDS = {("receive", 0), ("send", 0)}


def grid(stages: int, ranks: int) -> list[StageSpec]:
    """The specs of a pipeline of one layer a stage."""
    tensor = TensorParallel(ranks)
    return [
        StageSpec(
            Path("none"), "none", i, stages, i, i + 1,
            tensor=tensor, rank=rank if ranks > 1 else None,
        )
        for i in range(stages)
        for rank in range(ranks)
    ]  # fmt: skip


def test_a_worker_that_is_all_of_a_stage_has_two_links() -> None:
    """Without ranks every stage receives and sends."""
    assert [sockets_of(spec) for spec in grid(3, 1)] == [ENDS] * 3


def test_a_single_stage_of_two_ranks() -> None:
    """Only rank 0 talks with the engine; both talk with each other."""
    leader, follower = map(sockets_of, grid(1, 2))
    assert leader == ENDS | {("group", 1)}
    assert follower == {("group", 0)}


def test_ranks_of_a_mesh_have_links_of_their_own() -> None:
    """A rank that follows has no link from the engine and none to it, but those in between."""
    sockets = [sockets_of(spec) for spec in grid(3, 2)]
    group = {("group", 0)}
    assert sockets[1::2] == [{("send", 0)} | group, ENDS | group, {("receive", 0)} | group]


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_worker_gets_what_it_waits_for(stages: int, ranks: int) -> None:
    """The grid gives each worker exactly the sockets that its spec needs, and both ends of each."""
    specs = grid(stages, ranks)
    made = wire(specs, TransportOptions(), 2.0)
    try:
        for spec, given in zip(specs, made.workers, strict=True):
            keys = [(data.direction, data.rank) for data, _ in given]
            assert set(keys) == sockets_of(spec)
            assert len(keys) == len(set(keys))
        ends = {(spec.title, d.peer): s for spec, g in zip(specs, made.workers, strict=True)
                for d, s in g if d.peer != "engine"}  # fmt: skip
        for number, ((own, peer), sock) in enumerate(ends.items()):
            sock.send(bytes([number]))
            assert ends[peer, own].recv(2) == bytes([number]), f"{own} to {peer}"
        stalls = {data.options.stall for g in made.workers for data, _ in g if data.rank}
        assert stalls <= {2.0}
    finally:
        for sock in (made.first, made.last, *(sock for g in made.workers for _, sock in g)):
            sock.close()


def test_free_ports_are_different() -> None:
    """Each rank gets a port of its own."""
    ports = free_ports(4)
    assert len(set(ports)) == 4
    assert all(0 < port < 65536 for port in ports)

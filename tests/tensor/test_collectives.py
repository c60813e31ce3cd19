"""What ranks do together, in real processes, against numpy: one suite for all ways to do it."""

from __future__ import annotations

import base64
import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxcel.pipeline.group import group_peers

WAIT = 60.0
"""Seconds that a rank may take for anything here: whatever needs longer hangs."""

PATIENCE = 30.0
"""The ranks' deadline where none is to pass."""

Array = npt.NDArray[Any]
Answer = dict[str, Any]
Sockets = tuple[socket.socket, socket.socket]

WAYS = {"pairs": (2, 4), "tcp": (2, 3, 4), "ring": (2, 3)}
"""Our ring over Unix sockets in the clear and over sealed TCP, and the one of mx.distributed."""

DTYPES = ("float32", "float16", "bfloat16", "int32", "int8", "uint64", "complex64")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (1,), (7,), (2, 3, 5), (4, 12))


class Rank:
    """A process that is one rank."""

    def __init__(self, role: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("rank_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
        )
        self.tell(role)

    def tell(self, what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Answer:
        assert self.process.stdout is not None
        timer = threading.Timer(WAIT, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, "the rank has ended, or hung"
        answer: Answer = json.loads(line)
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Ranks:
    """All ranks of a group, started."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.size = len(ranks)

    def run(self, name: str, arrays: Sequence[Array], dtype: str, **extra: Any) -> list[Array]:
        """What each rank gets when all do ``name``, each with its own of ``arrays``."""
        for rank, array in zip(self.ranks, arrays, strict=True):
            rank.tell(command(name, array, dtype) | extra)
        return [result(rank.hear(), dtype) for rank in self.ranks]


Start = Callable[..., Ranks]


@pytest.fixture(scope="module")
def module_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def group(module_stack: ExitStack) -> Callable[[str, int], Ranks]:
    """The ranks of a way and a size, started when they are first asked for."""
    made: dict[tuple[str, int], Ranks] = {}

    def get(way: str, size: int) -> Ranks:
        if (way, size) not in made:
            made[way, size] = start(module_stack, way, size)
        return made[way, size]

    return get


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, way: str, size: int, timeout: float = PATIENCE) -> Ranks:
    """``size`` ranks that are ready; ``stack`` ends them."""
    if way == "ring":
        roles = [
            {"rank": rank, "timeout": timeout, "backend": "ring", "hosts": hosts}
            for hosts in [free_addresses(size)]
            for rank in range(size)
        ]
        ranks = [start_rank(stack, role) for role in roles]
    else:
        ranks = connected(stack, way, size, timeout)
    for rank in ranks:
        assert rank.hear() == {"ready": True}
    return Ranks(ranks)


def connected(stack: ExitStack, way: str, size: int, timeout: float) -> list[Rank]:
    ends: list[dict[int, tuple[int, list[str]]]] = [{} for _ in range(size)]
    # Ours are closed when the ranks have theirs, or nobody would notice that one is gone.
    with ExitStack() as sockets:
        for rank in range(size):
            for peer in (peer for peer in group_peers(rank, size) if peer > rank):
                keys = [] if way == "pairs" else ["11" * 32, "22" * 32]
                a, b = map(
                    sockets.enter_context, socket.socketpair() if way == "pairs" else tcp_pair()
                )
                ends[rank][peer] = (a.fileno(), keys)
                ends[peer][rank] = (b.fileno(), keys[::-1])
        return [
            start_rank(
                stack,
                {"rank": rank, "size": size, "timeout": timeout, "connections": ends[rank]},
                [number for number, _ in ends[rank].values()],
            )
            for rank in range(size)
        ]


def start_rank(stack: ExitStack, role: dict[str, Any], descriptors: Sequence[int] = ()) -> Rank:
    rank = Rank(role, descriptors)
    stack.callback(rank.end)
    return rank


def tcp_pair() -> Sockets:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def free_addresses(count: int) -> list[str]:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]


def command(name: str, array: Array, dtype: str) -> dict[str, Any]:
    raw = base64.b64encode(to_bits(array, dtype).tobytes()).decode()
    return {"name": name, "dtype": dtype, "shape": array.shape, "data": raw}


def result(answer: Answer, dtype: str) -> Array:
    assert answer.get("dtype") == f"mlx.core.{dtype}", answer
    kind = "uint16" if dtype == "bfloat16" else dtype
    bits = np.frombuffer(base64.b64decode(answer["data"]), kind).reshape(answer["shape"])
    return from_bits(bits) if dtype == "bfloat16" else bits


def from_bits(bits: Array) -> Array:
    """bfloat16 as float32."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def to_bits(array: Array, dtype: str) -> Array:
    if dtype != "bfloat16":
        return array.astype(dtype)
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def arrays_of(size: int, shape: tuple[int, ...], dtype: str) -> list[Array]:
    """An array for each rank, the same in every run; those of bfloat16 are float32."""
    random = np.random.default_rng(len(shape) + 7 * sum(shape) + size)
    made = np.asarray(random.normal(size=(size, *shape)) * 3)
    if dtype == "complex64":
        made = made + 1j * random.normal(size=(size, *shape))
    if dtype.startswith("u"):
        made = np.abs(made)
    if dtype == "bfloat16":
        return [from_bits(to_bits(array, dtype)).reshape(shape) for array in made]
    return list(made.astype(dtype))


def is_sum(results: Sequence[Array], arrays: Sequence[Array], dtype: str) -> bool:
    """Whether ``results`` are equal in every bit, and the sum of ``arrays``.

    As near to it as one rounding for each addition allows; integers wrap.
    """
    stacked = np.stack(arrays)
    if "int" in dtype:
        expected, tolerance = stacked.sum(axis=0, dtype=dtype), 0.0
    else:
        step = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 2.0**-23)
        expected = stacked.sum(axis=0, dtype=np.complex128)
        tolerance = step * len(arrays) * float(np.abs(stacked).sum(axis=0).max(initial=0.0))
    return len({array.tobytes() for array in results}) == 1 and all(
        array.shape == expected.shape
        and bool(np.all(np.abs(array.astype(expected.dtype) - expected) <= tolerance))
        for array in results
    )


each_way = pytest.mark.parametrize(
    ("way", "size"), [(way, size) for way, sizes in WAYS.items() for size in sizes]
)


@each_way
def test_sums_of_awkward_arrays(group: Any, way: str, size: int) -> None:
    """Every type and shape: scalars, nothing at all, sizes that the ranks cannot divide."""
    ranks = group(way, size)
    for dtype in DTYPES:
        for shape in SHAPES:
            arrays = arrays_of(size, shape, dtype)
            results = ranks.run("all_sum", arrays, dtype)
            assert is_sum(results, arrays, dtype), (dtype, shape)


@each_way
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_sums_of_many_pieces(group: Any, way: str, size: int, dtype: str) -> None:
    """An array of many pieces, whose size is divisible by nothing."""
    arrays = arrays_of(size, (1_000_003,) if dtype == "float32" else (250_007,), dtype)
    assert is_sum(group(way, size).run("all_sum", arrays, dtype), arrays, dtype)


@each_way
def test_gathers(group: Any, way: str, size: int) -> None:
    """Every rank gets the arrays of all, bit for bit and in their order."""
    ranks = group(way, size)
    for dtype, shape in [
        *((dtype, shape) for dtype in DTYPES for shape in ((), (0, 3), (3, 5))),
        ("float32", (300_007,)),
    ]:
        arrays = arrays_of(size, shape, dtype)
        for gathered in ranks.run("all_gather", arrays, dtype):
            assert gathered.tobytes() == np.stack(arrays).tobytes(), (dtype, shape)
            assert gathered.shape == (size, *shape)


@each_way
def test_reduce_scatters(group: Any, way: str, size: int) -> None:
    """Every rank gets its rows of the sum."""
    ranks = group(way, size)
    for dtype in ("float32", "bfloat16", "int32"):
        for shape in ((size, 3), (3 * size,), (size * 50_001,)):
            arrays = arrays_of(size, shape, dtype)
            shares = ranks.run("reduce_scatter", arrays, dtype)
            assert is_sum([np.concatenate(shares)], arrays, dtype), (dtype, shape)


@each_way
def test_broadcasts(group: Any, way: str, size: int) -> None:
    """Every rank gets the array of the root, whichever that is."""
    ranks = group(way, size)
    for root in range(size):
        for dtype, shape in [("float32", ()), ("bfloat16", (5,)), ("int32", (200_003,))]:
            arrays = arrays_of(size, shape, dtype)
            for array in ranks.run("broadcast", arrays, dtype, root=root):
                assert array.tobytes() == arrays[root].tobytes(), (root, dtype, shape)


@each_way
def test_arrays_that_are_not_contiguous(group: Any, way: str, size: int) -> None:
    """What is sent are the elements in their order, not the memory."""
    arrays = arrays_of(size, (30, 40), "float32")
    results = group(way, size).run("all_sum", arrays, "float32", transposed=True)
    assert is_sum(results, [array.T for array in arrays], "float32")


@each_way
def test_a_barrier_waits_for_all(group: Any, way: str, size: int) -> None:
    """Nobody is through it before the last one has come."""
    ranks = group(way, size).ranks
    for rank in ranks[:-1]:
        rank.tell({"name": "barrier"})
    for rank in ranks[:-1]:
        assert not readable(rank)
    ranks[-1].tell({"name": "barrier"})
    for rank in ranks:
        assert rank.hear() == {}


def readable(rank: Rank) -> bool:
    return bool(select.select([rank.process.stdout], [], [], 0.1)[0])


DEADLINE = 1.5
"""Of the ranks that miss one; who looks which one it is takes a quarter longer at most."""

SOON = 10 * DEADLINE
"""When it has to be over for all, on however busy a machine."""


def lost(ranks: Ranks, absent: int) -> list[Answer]:
    """What the other ranks say when one is absent and they need it."""
    others = [rank for index, rank in enumerate(ranks.ranks) if index != absent]
    array = np.ones(5, np.float32)
    for rank in others:
        rank.tell(command("all_sum", array, "float32"))
    return [rank.hear() for rank in others]


@pytest.mark.parametrize(
    ("way", "size", "how"),
    [
        ("tcp", 4, "killed"),
        ("tcp", 4, "stopped"),
        ("pairs", 4, "absent"),
        ("tcp", 3, "stopped"),
        ("tcp", 2, "stopped"),
        ("pairs", 2, "killed"),
    ],
)
def test_a_lost_rank_is_named_by_all(stack: ExitStack, way: str, size: int, how: str) -> None:
    """All others name the rank that is gone, hangs or is elsewhere, within the deadline."""
    ranks = start(stack, way, size, DEADLINE)
    ranks.run("all_sum", [np.ones(3, np.float32)] * size, "float32")
    absent = size // 2
    harm(ranks.ranks[absent], how)
    for answer in lost(ranks, absent):
        assert (answer["error"], answer["stage"], answer["rank"]) == ("RankLost", 3, absent)
        assert answer["operation"] == "all-reduce 2"
        assert answer["seconds"] < SOON


@pytest.mark.parametrize(("size", "how"), [(2, "killed"), (2, "stopped"), (3, "killed")])
def test_a_lost_rank_ends_the_ring_of_mlx(stack: ExitStack, size: int, how: str) -> None:
    """One that is killed breaks what is evaluated, one that hangs lets the watchdog bark."""
    ranks = start(stack, "ring", size, DEADLINE)
    ranks.run("all_sum", [np.ones(3, np.float32)] * size, "float32")
    harm(ranks.ranks[1], how)
    for answer in lost(ranks, 1):
        assert (answer["error"], answer["operation"]) == ("RankLost", "all-reduce 2 over ring")
        assert size > 2 or answer["rank"] == 1


def test_a_rank_that_never_comes_ends_the_start_of_the_ring_of_mlx(stack: ExitStack) -> None:
    """MLX would wait for ever, and no thread could say so: the process ends."""
    role = {"rank": 0, "timeout": 1.0, "backend": "ring", "hosts": free_addresses(2), "connect": 1}
    rank = start_rank(stack, role)
    assert rank.process.wait(WAIT) == 1


def harm(rank: Rank, how: str) -> None:
    if how == "killed":
        rank.process.kill()
        rank.process.wait()
    elif how == "stopped":
        rank.process.send_signal(signal.SIGSTOP)


def test_a_rank_stopped_within_an_array(stack: ExitStack) -> None:
    """Large arrays fill all buffers on their way; a rank that takes nothing more is found too."""
    ranks = start(stack, "tcp", 3, DEADLINE)
    ranks.run("all_sum", [np.ones(3, np.float32)] * 3, "float32")
    harm(ranks.ranks[1], "stopped")
    others = (ranks.ranks[0], ranks.ranks[2])
    for rank in others:
        rank.tell(command("all_sum", np.ones(4 << 20, np.float32), "float32"))
    for answer in [rank.hear() for rank in others]:
        assert (answer["error"], answer["rank"]) == ("RankLost", 1)
        assert answer["operation"] == "all-reduce 2"


@pytest.mark.parametrize("backend", ["mpi", "nccl", "token-ring"])
def test_backends_that_are_not_there_are_refused(stack: ExitStack, backend: str) -> None:
    """By name, with what is there."""
    if mx.distributed.is_available(backend):
        pytest.skip(f"{backend} is here")
    role = {"rank": 0, "timeout": 1.0, "backend": backend, "hosts": ["a", "b"]}
    answer = start_rank(stack, role).hear()
    assert answer["error"] == "UsageError"
    assert f"--tp-collectives {backend}" in answer["text"] and "ring" in answer["text"]

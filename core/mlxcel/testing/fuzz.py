"""Random damage to everything that is read from a network: ``python -m mlxcel.testing.fuzz``.

Samples of what each decoder accepts are mutated, a million times over. A decoder may accept what
comes out or refuse it with its own error; it may not raise anything else, take long, or allocate
much more than it was given. The same seed makes the same inputs.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from collections.abc import Sequence

import attrs

from mlxcel.testing.fuzz_targets import Target, targets

SECONDS = 2.0
"""What one input may take of a core; far more than any needs."""

ALLOWANCE = 2 << 20
FACTOR = 200
"""An input of n bytes may cost ALLOWANCE + n * FACTOR bytes: JSON grows when it becomes objects,
and a connection has buffers for some chunks."""

TOKENS = (
    b"null", b"true", b"[]", b"{}", b'""', b"-1", b"0.5", b"1e999", b"NaN", b"-Infinity",
    b"9" * 30, b"9" * 5000, b'"\\ud800"', b"\\ud800", b"0x" + b"f" * 5000, b"\xff\xfe", b"[" * 3000,
    b'{"a":' * 500, b",", b":",
    b"\0" * 8, b"\xff" * 8, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\1\0\0\0\0\0\0\0",
)  # fmt: skip
"""What decoders are known to stumble over."""


@attrs.define(eq=False)
class Found(Exception):
    """An input that a decoder did not survive."""

    target: str
    data: bytes
    problem: str

    def __str__(self) -> str:
        shown = self.data[:400].hex() + ("…" if len(self.data) > 400 else "")
        return f"{self.target}: {self.problem}; the {len(self.data)} bytes are {shown}"


def mutate(source: random.Random, samples: Sequence[bytes]) -> bytes:
    """One of ``samples``, damaged in one to four places."""
    data = bytearray(source.choice(samples))
    for _ in range(source.randint(1, 4)):
        # Most of what is interesting stands at the beginning.
        limit = min(len(data), 1 << source.randint(0, 20))
        place = source.randint(0, limit)
        match source.randint(0, 8):
            case 0 | 1 if data:
                data[place % len(data)] ^= 1 << source.randint(0, 7)
            case 2 if data:
                data[place % len(data)] = source.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B))
            case 3:
                del data[place:]
            case 4:
                del data[place : place + source.randint(1, 16)]
            case 5:
                data[place:place] = source.choice(TOKENS)
            case 6:
                token = source.choice(TOKENS)
                data[place : place + len(token)] = token
            case 7:
                other = source.choice(samples)
                data[place:] = other[source.randint(0, len(other)) :]
            case _:
                data += source.randbytes(source.randint(1, 16))
    return bytes(data)


def check(target: Target, data: bytes) -> bool:
    """Whether ``target`` accepts ``data``.

    Raises:
        Found: It does neither that nor refuse it as it should.
    """
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    begun = time.thread_time()
    accepted = True
    try:
        target.decode(data)
    except target.refusal:
        accepted = False
    except Exception as error:
        raise Found(target.name, data, f"{type(error).__name__}: {error}") from error
    seconds = time.thread_time() - begun
    grown = tracemalloc.get_traced_memory()[1] - before
    if seconds > SECONDS:
        raise Found(target.name, data, f"it took {seconds:.1f} s")
    if grown > ALLOWANCE + FACTOR * len(data):
        raise Found(target.name, data, f"it allocated {grown} bytes")
    return accepted


def fuzz(target: Target, inputs: int, seed: int) -> int:
    """Give ``target`` as many mutated inputs; returns how many of them it accepted.

    Raises:
        Found: It did not survive one of them.
    """
    source = random.Random(f"{seed} {target.name}")
    tracemalloc.start()
    try:
        for sample in target.samples:
            target.decode(sample)
        return sum(check(target, mutate(source, target.samples)) for _ in range(inputs))
    finally:
        tracemalloc.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Fuzz all targets and print a line for each."""
    parser = argparse.ArgumentParser(description="damage what is read from a network")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all (1000000)")
    parser.add_argument("--seed", type=int, default=0, help="the same one, the same inputs (0)")
    args = parser.parse_args(arguments)
    everything = targets()
    each = -(-args.inputs // len(everything))
    for target in everything:
        begun = time.thread_time()
        accepted = fuzz(target, each, args.seed)
        seconds = time.thread_time() - begun
        print(f"{target.name}: {each} inputs, {accepted} accepted, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()

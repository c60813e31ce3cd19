"""The flags of ranks: what they come to, and which of them mean nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.cli.main import build_parser, run
from mlxcel.cli.tensor_flags import check_rank_flags, tensor_options
from mlxcel.errors import UsageError
from mlxcel.tensor.options import ALONE, TensorParallel


def parsed(*flags: str, command: str = "serve") -> argparse.Namespace:
    return build_parser().parse_args([command, "-m", "model", *flags])


@pytest.mark.parametrize("command", ["generate", "serve", "chat"])
def test_what_they_come_to(command: str) -> None:
    """Size and modes become the options of a stage; nothing given is no ranks."""
    assert tensor_options(parsed(command=command)) == ALONE
    modes = ["--tp-moe-mode", "within_expert", "--tp-embedding-mode", "vocab_parallel"]
    head = ["--tp-lm-head-mode", "vocab_parallel"]
    assert tensor_options(
        parsed("--tp-size", "3", *modes, *head, command=command)
    ) == TensorParallel(3, "within_expert", "vocab_parallel", "vocab_parallel")


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--tp-size", "1"],
        ["--tp-size", "2", "--tp-moe-mode", "expert_parallel"],
        ["--tp-size", "2", "--tp-workers", "inline", "--pp-workers", "thread"],
        ["--tp-size", "2", "--tp-workers", "process", "--tp-timeout", "5"],
        ["--tp-size", "2", "--tp-workers", "process", "--tp-collectives", "ring"],
    ],
    ids=" ".join,
)
def test_what_goes_together(flags: list[str]) -> None:
    """Flags that have an effect are taken."""
    check_rank_flags(parsed(*flags))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tp-moe-mode", "within_expert"], "--tp-moe-mode has no effect: a stage that is one"),
        (["--tp-moe-mode", "expert_parallel"], "--tp-moe-mode has no effect"),
        (["--tp-embedding-mode", "replicated"], "--tp-embedding-mode has no effect"),
        (["--tp-lm-head-mode", "vocab_parallel"], "--tp-lm-head-mode has no effect"),
        (["--tp-size", "1", "--tp-workers", "process"], "--tp-workers has no effect"),
        (["--tp-size", "2", "--tp-timeout", "5"], "--tp-timeout has no effect: ranks that are one"),
        (["--tp-size", "2", "--tp-collectives", "ring"], "--tp-collectives has no effect"),
        (
            ["--tp-size", "2", "--tp-workers", "process", "--pp-workers", "thread"],
            "--tp-workers process does not go with --pp-workers thread",
        ),
        (["--tp-size", "2", "--tp-workers", "process", "--tp-timeout", "0"], "--tp-timeout 0.0 is"),
        (["--tp-size", "2", "--tp-workers", "process", "--tp-timeout", "nan"], "--tp-timeout nan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_means_nothing(flags: list[str], reason: str) -> None:
    """A flag without an effect, or a value out of range, is refused with the reason."""
    with pytest.raises(UsageError, match="^" + reason):
        check_rank_flags(parsed(*flags))


@pytest.mark.parametrize("size", ["0", "-1", "257", "1000000"])
def test_sizes_that_mean_nothing(size: str) -> None:
    """There is at least one rank, and no more than ranks can tell of each other."""
    with pytest.raises(UsageError, match=f"^--tp-size {size} is out of range"):
        tensor_options(parsed("--tp-size", size))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tp-size", "3"], "Legal sizes: 1, 2"),
        (["--tp-size", "2", "--tp-collectives", "mpi"], "--tp-collectives has no effect"),
        (["--tp-size", "2", "--allow-mirrored-kv"], "--allow-mirrored-kv"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_refuse_before_anything_loads(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    """What cannot work is one line and the exit code of usage."""
    assert run(["generate", "-m", str(tiny("llama")), "-p", "x", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("mlxcel: error: ")) == ("", 1)
    assert reason in err
    assert "activations" not in err


def test_an_absent_backend_starts_no_worker(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What MLX was built without is refused by name before there is a process."""
    monkeypatch.setattr("mlxcel.engine.local.ProcessPipeline", None)
    flags = ["--tp-size", "2", "--pp-workers", "process", "--tp-workers", "process"]
    command = ["generate", "-m", str(tiny("llama")), "-p", "x", *flags, "--blas", "wheel"]
    assert run([*command, "--tp-collectives", "nccl"]) == 2
    assert "--tp-collectives nccl: MLX has no such backend here." in capsys.readouterr().err


def test_rank_processes_make_the_same_tokens(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two stages of two ranks, each a process: the tokens of one process, and a true notice."""
    flags = ["-p", "Hello", "-p", "abc", "-n", "8", "--no-chat-template", "--json"]
    apart = ["--pp-size", "2", "--tp-size", "2", "--pp-workers", "process"]
    apart += ["--tp-workers", "process", "--blas", "wheel"]
    made, notices = [], []
    for more in ([], apart):
        assert run(["generate", "-m", str(tiny("llama")), *flags, *more]) == 0
        out, err = capsys.readouterr()
        made.append([json.loads(line)["tokens"] for line in out.splitlines()[:2]])
        notices.append(err.splitlines())
    assert made[0] == made[1]
    assert "decode path: batched forward, a worker for each of 2 ranks" in notices[1]

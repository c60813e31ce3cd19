"""The flags that say how the ranks of a stage share its layers."""

from __future__ import annotations

import argparse

from mlxcel.cli.given_flags import given
from mlxcel.cli.model_flags import LONGEST_WAIT, check_bounds
from mlxcel.errors import UsageError
from mlxcel.tensor.options import MOST_RANKS, TensorParallel


def add_tensor_flags(group: argparse._ActionsContainer) -> None:
    """How many ranks there are, and what they share out."""
    group.add_argument(
        "--tp-size", type=int, default=1, metavar="N", help="ranks that share each stage (1)"
    )
    group.add_argument(
        "--tp-moe-mode",
        default="expert_parallel",
        choices=["expert_parallel", "within_expert"],
        help="whether a rank has whole experts, or a share of each (expert_parallel)",
    )
    for part, what in (("embedding", "the token embedding"), ("lm-head", "the output projection")):
        group.add_argument(
            f"--tp-{part}-mode",
            default="replicated",
            choices=["replicated", "vocab_parallel"],
            help=f"whether each rank has all of {what}, or a share of its rows (replicated)",
        )


def tensor_options(args: argparse.Namespace) -> TensorParallel:
    """What the flags of :func:`add_tensor_flags` come to.

    Raises:
        UsageError: The number of ranks means nothing.
    """
    if not 1 <= args.tp_size <= MOST_RANKS:
        raise UsageError(f"--tp-size {args.tp_size} is out of range.", f"Give 1 to {MOST_RANKS}.")
    return TensorParallel(
        args.tp_size, args.tp_moe_mode, args.tp_embedding_mode, args.tp_lm_head_mode
    )


def add_rank_flags(group: argparse._ActionsContainer) -> None:
    """What runs the ranks of a stage, and how they reach each other."""
    group.add_argument(
        "--tp-workers",
        default="inline",
        choices=["inline", "process"],
        help="whether the ranks of a stage are one worker, or a process each (inline)",
    )
    group.add_argument(
        "--tp-collectives",
        default="transport",
        choices=["transport", "ring", "jaccl", "mpi", "nccl"],
        help="how rank processes add up their results: encrypted like all else, or by a backend "
        "of MLX, in the clear (transport)",
    )
    group.add_argument(
        "--tp-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="longest wait of a rank process for the others of its stage (30)",
    )


def check_shared(args: argparse.Namespace, size: int) -> None:
    """Refuse flags of ranks where a stage is only one, and a wait that means nothing.

    Args:
        size: The ranks of each stage.

    Raises:
        UsageError: The first of them, with the reason.
    """
    seconds = args.tp_timeout
    check_bounds(
        [("--tp-timeout", seconds, 0 < seconds <= LONGEST_WAIT, "seconds, up to a million")]
    )
    check_effect(args, size)


def check_effect(args: argparse.Namespace, size: int) -> None:
    """Refuse what is said about ranks where a stage is only one.

    Raises:
        UsageError: The first such flag.
    """
    for flag in sorted(given(args)):
        if size == 1 and flag.startswith("--tp-") and flag != "--tp-size":
            raise UsageError(
                f"{flag} has no effect: a stage that is one rank shares nothing out.",
                "Give --tp-size N too, or leave it out.",
            )


def check_rank_flags(args: argparse.Namespace) -> None:
    """Refuse flags of ranks that mean nothing here, where all runs on this machine.

    Raises:
        UsageError: The first of them, with the reason.
    """
    check_shared(args, args.tp_size)
    if args.tp_workers == "inline":
        for flag in ("--tp-collectives", "--tp-timeout"):
            if flag in given(args):
                raise UsageError(
                    f"{flag} has no effect: ranks that are one worker wait for nobody.",
                    "Give --tp-workers process too, or leave it out.",
                )
    elif args.pp_workers != "process":
        raise UsageError(
            f"--tp-workers process does not go with --pp-workers {args.pp_workers}: where a rank "
            "is a process, its stage cannot be a thread.",
            "Give --pp-workers process too, or leave --tp-workers out.",
        )

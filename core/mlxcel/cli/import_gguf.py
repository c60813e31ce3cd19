"""``mlxcel import-gguf``: a Llama-architecture GGUF file as a checkpoint folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlxcel.checkpoint.gguf_import import import_gguf


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``mlxcel``."""
    parser = subparsers.add_parser(
        "import-gguf",
        help="convert a Llama-architecture GGUF file into a checkpoint folder",
        description="Convert a Llama-architecture GGUF file (F32, F16, Q4_0, Q4_1 and Q8_0 "
        "tensors, byte-level BPE) into a folder that mlxcel and mlx-lm read.",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="the GGUF file")
    parser.add_argument("folder", metavar="DIR", type=Path, help="new, or an earlier import")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert ``args.source`` into ``args.folder``; returns the exit code.

    Raises:
        MlxcelError: As :func:`~mlxcel.checkpoint.gguf_import.import_gguf` does.
    """
    import_gguf(args.source, args.folder)
    print(f"{args.folder}: imported from {args.source}")
    return 0

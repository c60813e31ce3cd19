"""Turn a GGUF file into a checkpoint folder that mlxcel and mlx-lm read."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from mlxcel.checkpoint.config import CONFIG_FILE, GENERATION_CONFIG_FILE
from mlxcel.checkpoint.gguf import read_gguf
from mlxcel.checkpoint.gguf_llama import llama_config, llama_weights
from mlxcel.checkpoint.gguf_tokenizer import import_tokenizer
from mlxcel.checkpoint.index import SINGLE_FILE
from mlxcel.errors import CheckpointError, UsageError

IMPORT_FILE = "gguf_import.json"
"""Marks a folder as an import, which a later import may replace: ``{"origin": …}``."""


def import_gguf(source: Path, target: Path, origin: str = "") -> None:
    """Convert the Llama-architecture GGUF file ``source`` into the folder ``target``.

    The folder appears whole or not at all, and replaces an earlier import.

    Args:
        source: A GGUF file.
        target: A folder that does not exist, is empty, or holds an earlier import.
        origin: What to note as the import's origin; the name of ``source`` by default.

    Raises:
        UsageError: ``target`` holds something else.
        UnsupportedError: The architecture, the tokenizer or a tensor type cannot be imported.
        CheckpointError: ``source`` is malformed, or ``target`` cannot be written.
    """
    import mlx.core as mx

    target = target.resolve()
    _refuse_foreign(target, source)
    gguf = read_gguf(source)
    config = llama_config(gguf)
    tokenizer = import_tokenizer(gguf)
    if (rows := gguf.tensors["token_embd.weight"].shape[0]) != tokenizer.size:
        raise CheckpointError(
            source,
            f"has {tokenizer.size} tokens but embeds {rows}.",
            "Use another GGUF file of the model.",
        )
    config |= {"vocab_size": tokenizer.size, **tokenizer.special_ids}
    weights = llama_weights(gguf, config)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            _write(made / CONFIG_FILE, config)
            _write(made / GENERATION_CONFIG_FILE, tokenizer.special_ids)
            _write(made / "tokenizer_config.json", tokenizer.config)
            made.joinpath("tokenizer.json").write_text(tokenizer.tokenizer, encoding="utf-8")
            mx.save_safetensors(str(made / SINGLE_FILE), weights, {"format": "mlx"})
            _write(made / IMPORT_FILE, {"origin": origin or source.name})
            if target.exists():
                target.rename(Path(scratch, "replaced"))
            made.rename(target)
    except OSError as error:
        raise CheckpointError(
            target, f"cannot be written ({error.strerror}).", "Name another folder."
        ) from error


def import_origin(folder: Path) -> str | None:
    """The origin that the import in ``folder`` noted, or None if ``folder`` holds no import."""
    try:
        origin = json.loads((folder / IMPORT_FILE).read_bytes())["origin"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return origin if isinstance(origin, str) else None


def _refuse_foreign(target: Path, source: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and import_origin(target) is None):
        raise UsageError(f"{target} exists and is no earlier import.", "Name another folder.")
    if target in source.resolve().parents:
        raise UsageError(f"{source} lies inside {target}.", "Name another folder.")


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

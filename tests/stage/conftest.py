"""Checkpoints with something wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., Path]:
    """Copies a checkpoint; ``tensors`` and ``config`` replace entries, None takes them away."""

    def alter(
        source: Path,
        tensors: Mapping[str, mx.array | None] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        weights = mx.load(str(source / "model.safetensors")) | dict(tensors or {})
        settings = json.loads((source / "config.json").read_text()) | dict(config or {})
        weights = {name: value for name, value in weights.items() if value is not None}
        settings = {name: value for name, value in settings.items() if value is not None}
        mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
        (tmp_path / "config.json").write_text(json.dumps(settings))
        for file in source.glob("tokenizer*"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    return alter

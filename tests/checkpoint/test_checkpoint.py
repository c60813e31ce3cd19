import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.checkpoint.checkpoint import open_checkpoint
from mlxcel.checkpoint.quantization import Quantization
from mlxcel.errors import CheckpointError


def test_everything_in_one_value(write_checkpoint: Callable[..., Path]) -> None:
    """A folder opens to its settings, tensors, files and quantization."""
    folder = write_checkpoint(
        {"model.norm.weight": ("F32", (8,)), "lm_head.weight": ("U32", (4, 1))},
        quantization={"group_size": 32, "bits": 4},
    )
    checkpoint = open_checkpoint(folder)
    assert checkpoint.path == folder
    assert checkpoint.config.model_type == "toy"
    assert checkpoint.files == (folder / "model.safetensors",)
    assert checkpoint.tensors["model.norm.weight"].nbytes == 32
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.for_path("lm_head") == Quantization(32, 4)
    assert open_checkpoint(folder / "config.json") == checkpoint


def test_config_without_weights(write_checkpoint: Callable[..., Path]) -> None:
    """A config.json alone is no checkpoint."""
    folder = write_checkpoint({})
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no model weights"):
        open_checkpoint(folder)


def test_reading_imports_nothing_heavy() -> None:
    """Everything that reads checkpoints for planning works without MLX."""
    code = (
        "import sys, mlxcel.checkpoint.dtype, mlxcel.checkpoint.gguf_import\n"
        "import mlxcel.cli.import_gguf, mlxcel.cli.fetch_demo_model\n"
        "heavy = {'mlx.core', 'mlx_lm', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

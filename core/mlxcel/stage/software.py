"""What a worker runs with: all that must be the same on every stage of a pipeline."""

from __future__ import annotations

from importlib.metadata import version

from mlxcel.pipeline.report import Software
from mlxcel.plugins import Plugins
from mlxcel.stage.blas import running_blas


def running_software(plugins: Plugins) -> Software:
    """Versions of mlxcel, MLX, mlx-lm and the plugins, and the BLAS; MLX must be imported."""
    versions = {name: version(name) for name in ("mlxcel", "mlx", "mlx-lm")}
    blas = running_blas()
    versions["BLAS"] = f"{blas.name} {blas.path or ''}".strip()
    return Software(versions | plugins.versions())

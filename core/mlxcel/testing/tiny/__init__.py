"""Tiny checkpoints of every family, with random weights that are the same everywhere."""

from mlxcel.testing.tiny.builder import build, draw_model, models, names

__all__ = ["build", "draw_model", "models", "names"]

"""The OpenAI-compatible HTTP server."""

from mlxcel.server.app import create_app
from mlxcel.server.options import Options

__all__ = ["Options", "create_app"]

"""``python -m mlxcel``."""

import sys

from mlxcel.cli.main import run

sys.exit(run())

"""``python -m mlxcel``."""

import sys

from mlxcel.cli.main import run

if __name__ == "__main__":
    sys.exit(run())

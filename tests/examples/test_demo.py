"""The demo is what it says: a coordinator and two peers make the tokens of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo(demo_model: Path) -> None:
    """It ends with 0, says that the tokens are identical, and what went over the wire."""
    done = subprocess.run(
        [sys.executable, str(DEMO), str(demo_model)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens identical: yes" in done.stdout
    for words in ("received over the wire", "p99", "tok/s", "without the load"):
        assert words in done.stdout

"""The survey of many architectures, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from mlxcel.plugins import Plugins
from mlxcel.testing.survey.finding import Finding, served_by

SECONDS = 180.0
"""How long one architecture may take."""


def findings(architectures: Sequence[str], plugins: Plugins) -> Iterator[Finding]:
    """The finding of each, in their order; as many run at once as there are cores.

    An architecture that ends its process, as some do with sizes that they do not expect, or
    that takes too long, is a finding too.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda name: find(name, plugins), architectures)


def find(architecture: str, plugins: Plugins) -> Finding:
    """The finding of one; if no family of its own serves it, from a process of its own."""
    name, family = served_by(architecture, plugins)
    if not family.fallback:
        return Finding(architecture, name, "own")
    command = [sys.executable, "-m", "mlxcel.testing.survey", "--one", architecture]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(architecture, name, "none", f"it took more than {SECONDS:g} seconds")
    if done.returncode == 0:
        return Finding(**json.loads(done.stdout.splitlines()[-1]))
    if done.returncode < 0:
        end = "it crashes its process"  # by which signal is an accident of its memory
    else:
        end = f"its process failed: {(done.stderr.splitlines() or [''])[-1]}"
    return Finding(architecture, name, "none", end)

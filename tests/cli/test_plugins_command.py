"""``mlxcel plugins`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlxcel
from mlxcel.cli.plugins import COLUMNS

CORE = str(Path(mlxcel.__file__).parents[1])
SOURCE = """
import sys
from mlxcel.cli.main import run
code = run(sys.argv[1:])
heavy = [name for name in ("mlx", "mlx_lm", "transformers") if name in sys.modules]
sys.exit(f"imported {heavy}" if heavy else code)
"""


def mlxcel_plugins(site: Any, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command with the plugins of ``site`` and those that are installed."""
    return subprocess.run(
        [sys.executable, "-c", SOURCE, "plugins", *flags],
        env={**os.environ, "PYTHONPATH": f"{site.path}{os.pathsep}{CORE}", **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_table_with_one_line_per_plugin(site: Any) -> None:
    """The listing loads the light modules, and nothing heavy with them."""
    site.family("alpha")
    done = mlxcel_plugins(site, MLXCEL_PLUGINS="alpha")
    assert (done.returncode, done.stderr) == (0, "")
    header, *lines = done.stdout.splitlines()
    assert tuple(header.split()) == COLUMNS
    assert ["family", "alpha", "fake-family-alpha", "1.2.3", "1.0", "loaded", "-"] in [
        line.split() for line in lines
    ]


def test_json(site: Any) -> None:
    """--json prints exactly the documented keys; --all adds hooks and location."""
    site.hooks("watch", "@hookimpl\ndef mlxcel_observe(event): pass\n")
    done = mlxcel_plugins(site, "--json")
    [found] = [r for r in json.loads(done.stdout) if r["name"] == "watch"]
    assert found == {
        "name": "watch",
        "kind": "hooks",
        "distribution": "fake-hooks-watch",
        "version": "1.2.3",
        "api": "1.0",
        "state": "loaded",
        "reason": "",
    }
    done = mlxcel_plugins(site, "--json", "--all")
    [more] = [r for r in json.loads(done.stdout) if r["name"] == "watch"]
    assert more == {
        **found,
        "hooks": ["mlxcel_observe"],
        "location": str(site.path / "fake_hooks_watch.py"),
    }


def test_a_bad_plugin_makes_it_exit_with_1(site: Any) -> None:
    """Failed is a bad state; leaving the plugin out makes the listing good again."""
    site.family("bad", before="import sys; sys.exit(0)")
    done = mlxcel_plugins(site)
    assert done.returncode == 1
    assert "SystemExit: 0" in done.stdout
    done = mlxcel_plugins(site, "--no-plugin", "bad", MLXCEL_PLUGINS="bad")
    assert done.returncode == 0
    assert "disabled by --no-plugin" in done.stdout


def test_strict_mode_shows_the_traceback(site: Any) -> None:
    """With MLXCEL_PLUGINS_STRICT=1 the plugin's own traceback comes first."""
    site.family("bad", before="raise ValueError('broken on purpose')")
    done = mlxcel_plugins(site, MLXCEL_PLUGINS_STRICT="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "fake_family_bad.py" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("mlxcel: error: family plugin 'bad'")


def test_a_misspelt_name_is_said_on_stderr(site: Any) -> None:
    """Notices go to stderr, so that --json stays JSON."""
    done = mlxcel_plugins(site, "--json", "--no-plugin", "no-such-plugin")
    json.loads(done.stdout)
    assert done.stderr.startswith("mlxcel: warning: --no-plugin names 'no-such-plugin'")

"""``mlxcel cluster`` and ``mlxcel serve --dry-run`` as commands."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxcel.cli.main import run
from mlxcel.cluster.topology_toml import read_topology

SERVE = ["--pp-auto", "2", "--cluster-peers", "192.168.1.11:19001,192.168.1.12:19001", "--dry-run"]

PRINTED = """\
Cluster: mlxcel-cluster
TP size: 1, PP size: 2
Nodes (3):
- coordinator @ 127.0.0.1:19000 [hybrid]
- stage-0 @ 192.168.1.11:19001 [pipeline_stage]
- stage-1 @ 192.168.1.12:19001 [pipeline_stage]
Emitted cluster TOML at: {path}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an empty folder ``model``, where no secret is known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLXCEL_CLUSTER_SECRET", raising=False)
    monkeypatch.delenv("MLXCEL_CLUSTER_SECRET_FILE", raising=False)
    (tmp_path / "model").mkdir()
    return tmp_path


def serve(*flags: str) -> int:
    model = [] if "-m" in flags else ["-m", "model"]
    return run(["serve", *model, "--port", "0", *flags])


def test_a_dry_run_as_a_process(folder: Path) -> None:
    """stdout is the documented text and nothing else; neither MLX nor mlx-lm is imported."""
    source = (
        "import sys\nfrom mlxcel.cli.serve import run_server\n"
        f"sys.argv = ['mlxcel-server', '-m', 'model', '--port', '0', *{SERVE!r}]\n"
        "code = run_server()\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'aiohttp'} & set(sys.modules)\n"
        "print(code, sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    path = folder / ".mlxcel" / "cluster.toml"
    assert done.stderr == "0 []\n"
    assert done.stdout == PRINTED.format(path=path)
    assert read_topology(path).describe() + "\n" == "\n".join(PRINTED.split("\n")[:-2]) + "\n"


def test_the_dry_run_of_the_documents() -> None:
    """What docs/cluster.md shows is what is printed."""
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    assert PRINTED.partition("{path}")[0] in text


PRINTED_MESH = """\
Cluster: mlxcel-cluster
TP size: 2, PP size: 2
Nodes (5):
- coordinator @ 127.0.0.1:19000 [hybrid]
- s0-r0 @ 192.168.1.11:19001 [pipeline_tensor_parallel]
- s0-r1 @ 192.168.1.12:19001 [pipeline_tensor_parallel]
- s1-r0 @ 192.168.1.13:19001 [pipeline_tensor_parallel]
- s1-r1 @ 192.168.1.14:19001 [pipeline_tensor_parallel]
"""


def test_a_dry_run_of_a_mesh(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank is a line; the file that is written passes the check, which prints the same."""
    peers = ",".join(f"192.168.1.{number}:19001" for number in range(11, 15))
    assert serve(*SERVE[:3], peers, "--tp-size", "2", "--dry-run") == 0
    path = folder / ".mlxcel" / "cluster.toml"
    assert capsys.readouterr().out == f"{PRINTED_MESH}Emitted cluster TOML at: {path}\n"
    assert run(["cluster", "check", str(path)]) == 0
    assert capsys.readouterr().out == PRINTED_MESH


def test_a_dry_run_into_another_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path that is printed is absolute."""
    assert serve(*SERVE, "--cluster-config-out", "other/file.toml") == 0
    assert capsys.readouterr().out.endswith(f"at: {folder / 'other' / 'file.toml'}\n")
    assert not (folder / ".mlxcel").exists()


def test_notices_of_a_dry_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than the documented text goes to stderr."""
    peers = f"{SERVE[3]},192.168.1.13:19001"
    assert serve(*SERVE[:3], peers, "--dry-run") == 0
    out, err = capsys.readouterr()
    assert out == PRINTED.format(path=folder / ".mlxcel" / "cluster.toml")
    assert err == "not used, a spare: 192.168.1.13:19001\n"


def test_a_model_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No model is loaded, but its folder must be there."""
    (folder / "model").rmdir()
    assert serve(*SERVE) == 2
    assert capsys.readouterr().err.startswith("mlxcel: error: -m model: there is no such folder.")
    assert not (folder / ".mlxcel").exists()


def test_too_few_peers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer peers than stages: exit 2, both numbers said."""
    assert serve("--pp-auto", "3", *SERVE[2:]) == 2
    assert "lists 2 of the 3 peers" in capsys.readouterr().err


def test_the_http_port_is_the_control_port(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One address for both: exit 2."""
    assert serve("--port", "19000", *SERVE) == 2
    assert "--cluster-control-addr" in capsys.readouterr().err


def test_the_http_port_is_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What another program has: exit 1, nothing written."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert serve("--port", str(port), *SERVE) == 1
    out, err = capsys.readouterr()
    assert (out, f"port {port}" in err) == ("", True)
    assert not (folder / ".mlxcel").exists()


def test_a_file_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed of a file that is not there."""
    assert serve(*SERVE, "--cluster-config-out", "model") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{folder / 'model'} cannot be written" in err


def test_a_coordinator_whose_file_cannot_be_written(
    folder: Path,
    tiny: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends before it looks for any peer, not when all of them have started."""
    monkeypatch.setenv("MLXCEL_CLUSTER_SECRET", "a secret of the cluster")
    (folder / "file").write_text("")
    peers = ["--pp-auto", "2", "--cluster-peers", "127.0.0.1:1,127.0.0.1:2"]
    flags = ["--cluster-config-out", "file/cluster.toml", "--cluster-discovery-timeout", "0.1"]
    assert serve("-m", str(tiny("llama")), *peers, *flags) == 1
    err = capsys.readouterr().err
    assert f"{folder / 'file' / 'cluster.toml'} cannot be written" in err
    assert "stage-0" not in err


def test_a_secret_by_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is made once, is never printed, and is what nodes take."""
    assert run(["cluster", "secret", "key"]) == 0
    content = (folder / "key").read_text().strip()
    out, err = capsys.readouterr()
    assert out == "key: a new secret, copy it to all nodes\n"
    assert content not in out + err
    assert run(["cluster", "secret", "key"]) == 1
    assert (folder / "key").read_text().strip() == content
    assert capsys.readouterr().err.startswith("mlxcel: error: key exists already.")


def test_a_secret_that_others_can_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning comes before anything else; here, before no peer is heard."""
    run(["cluster", "secret", "key"])
    (folder / "key").chmod(0o644)
    mdns = "--pp-auto 2 --dry-run --cluster-discovery mdns --cluster-discovery-timeout 0.01"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", 0))
        port = str(sock.getsockname()[1])
    code = serve(*mdns.split(), "--cluster-discovery-port", port, "--cluster-secret-file", "key")
    warning, waiting, error = capsys.readouterr().err.splitlines()
    assert code == 1
    assert warning.startswith("mlxcel: warning: key is open to other users")
    assert waiting == f"waiting for the beacons of 2 peers on UDP port {port}"
    assert error.startswith(f"mlxcel: error: 0 of 2 peers announced themselves on UDP port {port}")


def test_a_file_is_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The nodes of a right file are printed; a wrong one is refused, exit 2."""
    serve(*SERVE)
    file = folder / ".mlxcel" / "cluster.toml"
    printed = capsys.readouterr().out
    assert run(["cluster", "check", str(file)]) == 0
    assert capsys.readouterr().out == printed.partition("Emitted")[0]
    file.write_text(file.read_text().replace("stage = 1", "stage = 0"))
    assert run(["cluster", "check", str(file)]) == 2
    assert "both have stage 0" in capsys.readouterr().err

"""``mlxcel serve`` as a command: flags, the socket, signals, workers that die."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from mlxcel.cli.main import build_parser, run
from mlxcel.cli.serve import context_notices, engine_settings, server_options
from mlxcel.engine.limits import Limits
from mlxcel.engine.local import open_model
from mlxcel.plugins import Plugins
from mlxcel.testing.quick import quick

BIN = Path(sys.executable).parent
SECONDS = 60.0
LISTENING = "listening on "


@contextmanager
def server(
    folder: Path, *flags: str, command: Any = None, hang_up: signal.Handlers = signal.SIG_DFL
) -> Iterator[tuple[Any, str]]:
    """A server process that listens, and its URL; ``hang_up`` is what it inherits for SIGHUP."""
    command = command or [str(BIN / "mlxcel"), "serve"]
    process = subprocess.Popen(
        [*command, "-m", str(folder), "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGHUP, hang_up),
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith(LISTENING):
                break
        else:
            raise AssertionError("the server ended before it listened")
        yield process, line.removeprefix(LISTENING).strip()
    finally:
        process.kill()
        process.communicate()


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ready(process: Any, url: str) -> None:
    while get(f"{url}/health")[0] != 200:
        assert process.poll() is None


@contextmanager
def streaming(url: str, **fields: Any) -> Iterator[IO[bytes]]:
    """A completion under way: its first event has been read."""
    body = json.dumps({"prompt": "hello", "stream": True, **fields}).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", body, SECONDS) as response:
        assert response.readline().startswith(b"data: ")
        yield response


def events(response: IO[bytes]) -> list[Any]:
    """What is left of a stream; the last event may be [DONE]."""
    data = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    return ["[DONE]" if text == b"[DONE]" else json.loads(text) for text in data]


def workers_of(process: Any) -> list[int]:
    """The ids of a server's two worker processes."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    workers = [int(pid) for path in tasks for pid in path.read_text().split()]
    assert len(workers) == 2
    return workers


def parsed(*flags: str) -> Any:
    return build_parser().parse_args(["serve", "-m", "models/some", *flags])


def test_settings_come_from_flags() -> None:
    """Each flag reaches the setting it names."""
    flags = "--parallel 5 --max-batch-size 6 --pp-micro-batch-size 2 --prefill-chunk-size 7"
    settings = engine_settings(
        parsed(*flags.split(), "--max-queue-depth", "8", "--queue-timeout", "9")
    )
    assert settings.limits == Limits(parallel=5, batch=6, micro_batch=2, chunk=7)
    assert (settings.queue_depth, settings.queue_timeout) == (8, 9)
    assert engine_settings(parsed()).limits == Limits(32, 32, None, 512)
    assert (
        engine_settings(parsed()).prefixes,
        engine_settings(parsed("--prefix-cache", "0")).prefixes,
    ) == (
        64,
        0,
    )


def test_options_come_from_flags(tmp_path: Path) -> None:
    """Names, keys and limits of the HTTP side are those of the flags."""
    keys = tmp_path / "keys"
    keys.write_text("two\n\n three \n")
    flags = [
        "--api-key",
        "s3cret",
        "--api-key-file",
        str(keys),
        *"--alias tiny --ctx-size 64".split(),
    ]
    options = server_options(parsed(*flags, "--metrics", "--max-body-size", "1MB"))
    assert options.model_id == "tiny"
    assert options.knows("some") and options.knows("models/some")
    assert options.knows(str(Path("models/some").resolve()))
    assert (options.context_size, options.metrics) == (64, True)
    assert options.api_keys == ("s3cret", "two", "three")
    assert options.max_body_size == 1_000_000
    assert server_options(parsed()).model_id == "some"
    assert "s3cret" not in repr(options)
    assert options.allowed_origins == ()
    pages = "https://chat.example, http://localhost:3000,app://obsidian.md"
    assert server_options(parsed("--allowed-origins", pages)).allowed_origins == (
        "https://chat.example",
        "http://localhost:3000",
        "app://obsidian.md",
    )


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "65536"],
        ["--parallel", "0"],
        ["--max-batch-size", "0"],
        ["--max-queue-depth", "0"],
        ["--ctx-size", "0"],
        ["--pp-micro-batch-size", "0"],
        ["--queue-timeout", "0"],
        ["--prefix-cache", "-1"],
        ["--drain-timeout", "nan"],
        ["--kv-cache-budget", "lots"],
        ["--max-body-size", "big"],
        ["--max-body-size", "0"],
        ["--allowed-origins", ""],
        ["--allowed-origins", "chat.example"],
        ["--allowed-origins", "https://chat.example/"],
        ["--allowed-origins", "https://a.example,https://Chat.example"],
    ],
)
def test_flags_out_of_range(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that means nothing is refused with the flag's name, exit 2."""
    assert run(["serve", "-m", str(tmp_path), *flags]) == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "warned"), [([], 0), (["512"], 0), (["513"], 1)])
def test_more_than_the_models_context(
    tiny: Callable[..., Path], plugins: Plugins, flags: list[str], warned: int
) -> None:
    """Who allows longer sequences than the model was made for is warned."""
    folder = tiny("llama")
    given = [part for size in flags for part in ("--ctx-size", size)]
    args = build_parser().parse_args(["serve", "-m", str(folder), *given])
    notices = context_notices(args, open_model(folder, plugins))
    assert len(notices) == warned
    assert all("--ctx-size 513 is more than the 512 tokens" in notice for notice in notices)


def test_a_port_in_use(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, naming port and flag, before anything loads."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert run(["serve", "-m", str(tiny("llama")), "--port", str(port)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert f"port {port}: Address already in use" in line
    assert "--port" in line


@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGHUP], [signal.SIGTERM]))
def test_a_server_and_sigterm(tiny: Callable[..., Path], number: int) -> None:
    """It serves, drains on a signal: the running stream ends well, exit 0, stdout stays empty.

    SIGHUP comes from a terminal that is closed, and to the workers too.
    """
    with server(tiny("llama"), "--pp-size", "2", "--ctx-size", "100000") as (process, url):
        ready(process, url)
        assert get(f"{url}/v1/models")[0] == 200
        with streaming(url, max_tokens=400, logit_bias={"257": -100}) as response:
            send = (
                process.send_signal if number == signal.SIGTERM else partial(os.killpg, process.pid)
            )
            send(number)
            *_, last, done = events(response)
        assert done == "[DONE]"
        assert last["choices"][0]["finish_reason"] == "length"
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out, err) == (0, "", "")


def test_the_quality_of_the_plan_is_told(tiny: Callable[..., Path]) -> None:
    """With --verbose the report comes once, after the load, with what each stage really holds."""
    flags = ["--pp-workers", "thread", "--pp-size", "2", "--no-warmup", "--verbose"]
    with server(tiny("llama"), *flags) as (process, url):
        ready(process, url)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SECONDS)
    head, *stages = [line for line in err.splitlines() if "actual=" in line or "quality" in line]
    assert head.startswith("pipeline partition quality: 2 stages, max=")
    assert [line.split(" actual")[0].split()[:4] for line in stages] == [
        ["stage", str(n), "device", f"'local-stage-{n}'"] for n in range(2)
    ]
    assert all(re.search(r"actual=\d+ drift=[+-]\d+\.\d%$", line) for line in stages)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_server_under_nohup(tiny: Callable[..., Path]) -> None:
    """Where SIGHUP was ignored from the start it still is: only the next signal ends the server."""
    flags = ["--no-warmup", "--pp-workers", "thread"]
    with server(tiny("llama"), *flags, hang_up=signal.SIG_IGN) as (process, url):
        ready(process, url)
        process.send_signal(signal.SIGHUP)
        assert get(f"{url}/health")[0] == 200
        status = Path(f"/proc/{process.pid}/status").read_text()
        [ignored] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
        assert int(ignored, 16) & 1
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(tiny: Callable[..., Path], number: int) -> None:
    """The stream is cut with a typed error instead of being waited for; still exit 0."""
    flags = ["--ctx-size", "10000000", "--drain-timeout", "1000", "--no-warmup"]
    with server(tiny("llama"), *flags) as (process, url):
        ready(process, url)
        with streaming(url, max_tokens=100_000, logit_bias={"257": -100}) as response:
            process.send_signal(number)
            while get(f"{url}/health")[1]["status"] != "draining":
                pass
            process.send_signal(number)
            last = events(response)[-1]
        assert last["error"]["code"] == "unavailable"
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out, err) == (0, "", "")


def test_a_signal_while_loading(tiny: Callable[..., Path]) -> None:
    """A server that still loads gives up quietly."""
    with server(tiny("llama"), "--pp-size", "2") as (process, url):
        assert get(f"{url}/health")[1]["status"] == "loading"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.slow
def test_workers_tell_what_they_do(tiny: Callable[..., Path]) -> None:
    """Busy shares, memory and hop times of worker processes reach the status of the server."""
    with server(tiny("llama"), "--pp-size", "2", "--ctx-size", "100000") as (process, url):
        ready(process, url)
        with streaming(url, max_tokens=100_000, logit_bias={"257": -100}) as response:
            status: dict[str, Any] = {"hops": []}
            while len(status["hops"]) < 3 or not all(map(any, status["timeline"]["busy"])):
                response.readline()
                status = get(f"{url}/status")[1]
        assert [(hop["from"], hop["to"]) for hop in status["hops"]] == [
            ("engine", "0"),
            ("0", "1"),
            ("1", "engine"),
        ]
        assert all(hop["p50"] > 0 for hop in status["hops"])
        assert all(stage["memory"] > 0 for stage in status["stages"])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_worker_that_dies(tiny: Callable[..., Path]) -> None:
    """Its streams end with a typed, retryable error; the server names it and exits 1."""
    with server(tiny("llama"), "--pp-size", "2", "--ctx-size", "10000000") as (process, url):
        ready(process, url)
        workers = workers_of(process)
        with streaming(url, max_tokens=100_000, logit_bias={"257": -100}) as response:
            os.kill(workers[1], signal.SIGKILL)
            last = events(response)[-1]
        assert (last["error"]["code"], last["error"]["retryable"]) == ("stage_lost", True)
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out) == (1, "")
        [line] = err.splitlines()
        assert "mlxcel: error: stage" in line
        assert "killed by SIGKILL" in line


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_second_signal_does_not_wait_for_a_worker_that_hangs(tiny: Callable[..., Path]) -> None:
    """A stopped worker is killed, not waited for as long as --pp-timeout would allow."""
    with server(tiny("llama"), "--pp-size", "2", "--pp-timeout", "100000") as (process, url):
        ready(process, url)
        os.kill(workers_of(process)[0], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        while get(f"{url}/health")[1]["status"] != "draining":
            pass
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out, err) == (0, "", "")


def test_a_model_that_does_not_load(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A fault found while loading ends the server with the fault's own text and exit code."""
    import shutil

    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with server(folder) as (process, _):
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out) == (1, "")
        assert "config.json asks for" in err.splitlines()[-1]
        assert "Traceback" not in err


def test_the_server_process_stays_light(tiny: Callable[..., Path]) -> None:
    """With worker processes, the server itself imports neither mlx_lm nor transformers."""
    source = (
        "import sys\nfrom mlxcel.cli.main import run\ncode = run(sys.argv[1:])\n"
        "heavy = [name for name in ('mlx_lm', 'transformers') if name in sys.modules]\n"
        "print(code, heavy)\n"
    )
    command = [sys.executable, "-c", source, "serve"]
    with server(tiny("llama"), command=command) as (process, url):
        ready(process, url)
        with streaming(url, max_tokens=3) as response:
            assert events(response)[-1] == "[DONE]"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=SECONDS)[0] == "0 []\n"


def test_the_other_name_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """mlxcel-server takes the flags of mlxcel serve."""
    from mlxcel.cli.serve import run_server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["mlxcel-server", "--help"])
        with pytest.raises(SystemExit) as stop:
            run_server()
    assert stop.value.code == 0
    assert "--kv-cache-budget" in capsys.readouterr().out


@pytest.mark.parametrize(("flag", "known"), [("64", True), ("0", False)])
def test_usage_says_what_was_known(tiny: Callable[..., Path], flag: str, known: bool) -> None:
    """The second request for one prompt reports cached tokens, unless that is switched off."""
    flags = ["--pp-workers", "thread", "--no-warmup", "--prefix-cache", flag]
    with server(tiny("llama"), *flags) as (process, url):
        ready(process, url)
        body = json.dumps({"prompt": "The same long beginning of a text", "max_tokens": 2}).encode()
        used = []
        for _ in range(2):
            with urllib.request.urlopen(f"{url}/v1/completions", body, SECONDS) as response:
                used.append(json.load(response)["usage"])
        assert "prompt_tokens_details" not in used[0]
        cached = used[1].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        assert cached == (used[1]["prompt_tokens"] - 1 if known else 0)


def test_ranks_behind_http(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages of two ranks, as processes, answer what one answers; the status says ranks."""
    flags = ["--pp-size", "2", "--tp-size", "2"]
    with server(tiny("llama"), *flags) as (process, url):
        ready(process, url)
        body = json.dumps({"prompt": "hello", "max_tokens": 8, "ignore_eos": True}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", body, SECONDS) as response:
            text = json.load(response)["choices"][0]["text"]
        assert [stage["ranks"] for stage in get(f"{url}/status")[1]["stages"]] == [2, 2]
    raw = ["-p", "hello", "-n", "8", "--no-chat-template", "--json"]
    assert run(["generate", "-m", str(tiny("llama")), *raw]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["text"] == text

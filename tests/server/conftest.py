"""Apps over scripted stages or a tiny model, on real sockets."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import attrs
import pytest
from aiohttp import web

from mlxcel.checkpoint.config import read_config
from mlxcel.engine.engine import Deliver, Engine, Settings
from mlxcel.engine.kv_manager import AdmissionDiagnostic, StageKVManager
from mlxcel.engine.limits import Limits, credits_for
from mlxcel.engine.local import open_model
from mlxcel.engine.local import running as run_stages
from mlxcel.engine.service import Phase, Service, StageState
from mlxcel.engine.slot import Request
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer
from mlxcel.errors import MlxcelError, Unavailable
from mlxcel.observe.live import LiveFigures
from mlxcel.pipeline.step import Step
from mlxcel.pipeline.threads import ThreadPipeline
from mlxcel.plugins import Plugins
from mlxcel.server import Options, create_app
from mlxcel.server.run import make_runner
from mlxcel.stage.contract import StageSpec
from mlxcel.testing.doubles import ScriptedExecutor, specs
from mlxcel.testing.tiny.tokenizer import EOS, VOCAB

WAIT = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that are coroutines, each in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class Gate:
    """Lets the steps of a scripted stage through: all of them, or as many as it is told."""

    def __init__(self) -> None:
        self.open = True
        self.fail: Exception | None = None
        self._steps = threading.Semaphore(0)

    def close(self) -> None:
        self.open = False

    def let(self, steps: int) -> None:
        self._steps.release(steps)

    def release(self) -> None:
        self.open = True
        self.let(1000)

    def __call__(self, step: Step) -> None:
        if step.tensors and not self.open:
            assert self._steps.acquire(timeout=WAIT)
        if step.tensors and self.fail is not None:
            raise self.fail


class ScriptedBackend:
    """A real engine over stages that answer with the bytes of ``answers``, then the end.

    Requests take turns with the answers.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answers: Sequence[bytes],
        gate: Gate,
        settings: Settings,
        managers: Sequence[StageKVManager],
        *,
        deliver: Deliver,
        on_refusal: Callable[[AdmissionDiagnostic], None],
        on_end: Callable[[], None],
        context_size: int | None = 512,
    ) -> None:
        self.phase: Phase = "loading"
        self.error: MlxcelError | None = None
        self.stages = [StageState(0, (0, 3), 5, 10), StageState(1, (3, 6))]
        self.live = LiveFigures(2)
        self.tokenizer = tokenizer
        self.vocab_size = VOCAB
        self.managers = managers
        self.context_size = context_size
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self._gate = gate

        def script(request: int, made: int) -> int:
            answer = answers[(request - 1) % len(answers)]
            return answer[made] if made < len(answer) else EOS

        def build(spec: StageSpec) -> ScriptedExecutor:
            return self.executors[spec.index]

        self.executors = [ScriptedExecutor(s, script, on_step=gate) for s in specs(2)[:1]]
        self.executors += [ScriptedExecutor(s, script) for s in specs(2)[1:]]
        credits = credits_for(2, settings.limits)
        self._pipeline = ThreadPipeline(specs(2), build, credits=credits, timeout=WAIT)
        self._pipeline.reports.on_beat = self.live.beat
        self.engine = Engine(
            self._pipeline, managers, tokenizer, settings, deliver, on_refusal, self._died
        )
        self._on_end = on_end

    @property
    def waiting(self) -> int:
        return self.engine.waiting

    @property
    def active(self) -> int:
        return self.engine.active

    def start(self) -> None:
        self._pipeline.start()
        self.engine.start()
        self.phase = "ready"

    def submit_all(self, requests: Sequence[Request]) -> None:
        if self.phase != "ready":
            raise Unavailable("The model is still loading.", 2.0)
        self.requests += requests
        self.engine.submit_all(requests)

    def cancel(self, index: int) -> None:
        self.cancelled.append(index)
        self.engine.cancel(index)

    def stop(self, *, drain: float = 0.0) -> None:
        self.phase = "draining"
        self.engine.stop(drain=drain)
        self._gate.release()
        self._pipeline.stop(drain=False)
        self.phase = "stopped"

    def _died(self, error: MlxcelError) -> None:
        self.error, self.phase = error, "failed"
        self._on_end()


@attrs.frozen
class Client:
    """Speaks to one app."""

    session: aiohttp.ClientSession
    app: web.Application
    backend: Any
    gate: Gate
    port: int

    async def post(self, path: str, body: object, **more: Any) -> tuple[int, Any]:
        """Status and JSON of a POST; ``body`` is bytes, or made JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data, **more) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.session.get(path, **more) as response:
            return response.status, await response.json()

    async def chat(self, text: str = "hi", **fields: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})

    async def complete(self, prompt: str = "hi", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def text(self, prompt: str = "hi", **fields: Any) -> tuple[str, str]:
        """A completion's text and finish reason."""
        status, body = await self.complete(prompt, **fields)
        assert status == 200, body
        [choice] = body["choices"]
        return choice["text"], choice["finish_reason"]

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of all events of an answer that streams, up to its end."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode("ascii")
        assert text.endswith("\n\n")
        blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        return [block.removeprefix("data: ") for block in blocks]

    async def chunks(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The chunks of an answer that streams and ends well."""
        *chunks, done = await self.events(path, body)
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


@asynccontextmanager
async def running(app: web.Application, gate: Gate | None = None) -> AsyncIterator[Client]:
    """The app as the command runs it: a handler is not cancelled when its client leaves."""
    from mlxcel.server.serving import SERVING

    runner = make_runner(app, WAIT)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    timeout = aiohttp.ClientTimeout(total=WAIT)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout) as session:
            yield Client(session, app, app[SERVING].backend, gate or Gate(), port)
    finally:
        if gate is not None:
            gate.release()
        await runner.cleanup()


Served = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture(scope="session")
def tokenizer(tiny: Callable[..., Path]) -> Tokenizer:
    folder = tiny("llama")
    return load_tokenizer(folder, read_config(folder))


@pytest.fixture
def served(tokenizer: Tokenizer) -> Served:
    """Runs an app whose model answers with ``answer``; further arguments are of Options."""

    @asynccontextmanager
    async def serve(
        answer: str | bytes | Sequence[str] = "hello",
        *,
        settings: Settings | None = None,
        managers: Sequence[StageKVManager] = (),
        context: int | None = 512,
        using: Tokenizer = tokenizer,
        **options: Any,
    ) -> AsyncIterator[Client]:
        gate = Gate()
        given = [answer] if isinstance(answer, str | bytes) else answer
        data = [each.encode() if isinstance(each, str) else each for each in given]

        def make(**callbacks: Any) -> ScriptedBackend:
            return ScriptedBackend(
                using,
                data,
                gate,
                settings or Settings(),
                managers,
                context_size=context,
                **callbacks,
            )

        chosen = Options(**{"model_id": "tiny", "drain_timeout": 0.0, **options})
        async with running(create_app(make, chosen), gate) as client:
            yield client

    return serve


@pytest.fixture
def tiny_served(tiny: Callable[..., Path], eventually: Any) -> Served:
    """Runs an app with a tiny model on two stages that are threads."""

    @asynccontextmanager
    async def serve(**options: Any) -> AsyncIterator[Client]:
        model = open_model(tiny("llama"), Plugins.discover(environ={}), size=2)
        make = partial(
            Service,
            model,
            partial(run_stages, model, timeout=WAIT),
            Settings(Limits(parallel=4)),
            [1 << 30, 1 << 30],
            warm_up=True,
        )
        chosen = Options(
            **{"model_id": "tiny", "context_size": 100_000, "drain_timeout": 0.0, **options}
        )
        async with running(create_app(make, chosen)) as client:
            await eventually(lambda: client.backend.phase != "loading")
            assert client.backend.error is None
            yield client

    return serve


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], Any]:
    """Waits until something holds."""

    async def wait(holds: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT):
            while not holds():
                await asyncio.sleep(0.005)

    return wait


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails the test if anything is logged as a warning or worse."""
    with caplog.at_level("WARNING"):
        yield
    assert [record.getMessage() for record in caplog.records] == []

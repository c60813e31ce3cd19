"""The OpenAI-compatible server as an aiohttp application."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from mlxcel.engine.kv_grid import StageUse, stage_uses
from mlxcel.engine.kv_manager import AdmissionDiagnostic
from mlxcel.engine.sequence import Output
from mlxcel.observe.metrics import ServerMetrics
from mlxcel.server import chat, completions, health, messages, models, tokenize
from mlxcel.server.backend import MakeBackend
from mlxcel.server.dispatch import Dispatcher, Stream
from mlxcel.server.middleware import count_and_explain, require_key
from mlxcel.server.options import Options
from mlxcel.server.origins import answer_preflights, refuse_foreign_pages, tell_origin
from mlxcel.server.serving import SERVING, Serving
from mlxcel.server.status import add_status


def create_app(make_backend: MakeBackend, options: Options) -> web.Application:
    """An application that serves one model; any aiohttp runner can run it.

    The model begins to load when the application starts, and ends with it. Nothing is shared
    between applications, so that one process can have several::

        model = open_model(Path("smollm2"), Plugins.discover())
        run = partial(running, model, timeout=60)
        service = partial(Service, model, run, Settings(), kv_budgets(model))
        app = create_app(service, Options("smollm2"))
        web.run_app(app, port=8080)

    Args:
        make_backend: Makes what runs the requests; called here, once.
        options: What the operator decides.
    """
    metrics = ServerMetrics(options.model_id)
    serving: Serving

    def on_tokens(count: int) -> None:
        serving.backend.live.tokens(count)
        metrics.generated_tokens.inc(count)

    dispatcher = Dispatcher(partial(_observe, metrics), on_tokens)

    def on_end() -> None:
        dispatcher.call(serving.ended.set)

    backend = make_backend(
        deliver=dispatcher.deliver, on_refusal=partial(_refused, metrics), on_end=on_end
    )
    serving = Serving(options, backend, dispatcher, metrics)
    metrics.watch_pipeline(backend.live)
    metrics.watch(lambda: backend.waiting, lambda: backend.active)
    for stage, use in stage_uses(backend.managers).items():
        metrics.watch_stage(stage, partial(_used, use), partial(_budget, use))

    app = web.Application(
        middlewares=[count_and_explain, answer_preflights, refuse_foreign_pages, require_key],
        client_max_size=options.max_body_size,
    )
    app[SERVING] = serving
    app.on_response_prepare.append(tell_origin)
    app.add_routes(
        [
            web.post(messages.PATH, messages.messages),
            web.post(f"{messages.PATH}/count_tokens", messages.count_tokens),
            web.post("/tokenize", tokenize.tokenize),
            web.post("/detokenize", tokenize.detokenize),
            web.get("/health", health.health),
        ]
    )
    for base in ("/v1", ""):  # clients of mlx-lm and llama.cpp may leave it out
        app.add_routes(
            [
                web.post(f"{base}/chat/completions", chat.chat_completions),
                web.post(f"{base}/completions", completions.completions),
                web.get(f"{base}/models", models.list_models),
                web.get(f"{base}/models/{{id:.+}}", models.get_model),
            ]
        )
    if options.metrics:
        app.router.add_get("/metrics", health.metrics)
    app.on_startup.append(_start)
    app.on_shutdown.append(_stop)
    add_status(app)  # after _stop: who watches sees the end
    return app


async def _start(app: web.Application) -> None:
    app[SERVING].dispatcher.attach()
    app[SERVING].backend.start()
    app[SERVING].look_for_tools()


async def _stop(app: web.Application) -> None:
    """Handlers still run here: those who wait get their last output."""
    await app[SERVING].stop(app[SERVING].options.drain_timeout)


def _observe(metrics: ServerMetrics, stream: Stream, output: Output, now: float) -> None:
    if not output.tokens:
        return
    number = output.request - stream.numbers.start
    latest = stream.latest[number]
    if latest is None:
        metrics.first_token_seconds.observe(now - stream.began)
    else:
        metrics.inter_token_seconds.observe(now - latest)
    stream.latest[number] = now


def _refused(metrics: ServerMetrics, diagnostic: AdmissionDiagnostic) -> None:
    metrics.refused(diagnostic.stage_index, diagnostic.reason.metric_label())


def _used(use: StageUse) -> int:
    return use.used


def _budget(use: StageUse) -> int | None:
    return use.budget

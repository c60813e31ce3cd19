"""What the server and its pipeline are doing at this moment, as one JSON object."""

from __future__ import annotations

from typing import Any

from mlxcel.engine.kv_grid import stage_uses
from mlxcel.observe.live import HopFigures, StageFigures
from mlxcel.server.backend import Backend
from mlxcel.server.options import Options

NOW_SECONDS = 3
"""Of how much of the past the figures of the moment are."""


def snapshot(options: Options, backend: Backend, seconds: int) -> dict[str, Any]:
    """The state of all there is, with a timeline of the last ``seconds``.

    Shares are between 0 and 1, memory is in bytes, latencies are in microseconds, and
    ``timeline.last`` counts seconds on the server's clock.
    """
    live = backend.live
    timeline = live.timeline(seconds)
    state: dict[str, Any] = {
        "model": options.model_id,
        "phase": backend.phase,
        "requests": {"running": backend.active, "waiting": backend.waiting},
        "tokens": {
            "per_second": round(live.tokens_per_second(NOW_SECONDS), 1),
            "generated": live.generated,
        },
        "stages": _stages(backend, live.stage_figures(NOW_SECONDS)),
        "hops": [_hop(hop) for hop in live.hop_figures()],
        "timeline": {
            "last": timeline.last,
            "busy": [[round(share, 3) for share in row] for row in timeline.busy],
            "tokens": timeline.tokens,
        },
    }
    if backend.error is not None:
        state["error"] = str(backend.error)
    return state


def _stages(backend: Backend, figures: tuple[StageFigures, ...]) -> list[dict[str, Any]]:
    uses = stage_uses(backend.managers)
    stages = []
    for state, figure in zip(backend.stages, figures, strict=True):
        cache = uses[state.stage].tightest if state.stage in uses else None
        stages.append(
            {
                "stage": state.stage,
                "place": state.place,
                "ranks": state.ranks,
                "layers": f"{state.layers[0]}-{state.layers[1] - 1}",
                "ready": state.ready,
                "bytes_done": state.bytes_done,
                "bytes_total": state.bytes_total,
                "memory": figure.memory,
                "busy": round(figure.busy, 3),
                "bubble": round(figure.bubble, 3),
                "received_per_second": round(figure.received),
                "received": figure.received_total,
                "kv_used": 0 if cache is None else cache.used,
                "kv_budget": None if cache is None else cache.budget,
            }
        )
    return stages


def _hop(hop: HopFigures) -> dict[str, Any]:
    p50, p95, p99 = (round(value, 1) for value in hop.quantiles)
    return {
        "from": hop.source,
        "to": hop.target,
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "max": round(hop.largest, 1),
        "count": hop.count,
    }

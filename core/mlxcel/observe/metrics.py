"""The figures of one HTTP server, in a registry of its own.

No label takes its values from clients: a model is the served one or ``other``.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from mlxcel.observe.live import LiveFigures
from mlxcel.observe.pipeline_metrics import PipelineCollector

OTHER = "other"

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """Counts what happens; ``model`` is the name of the served model.

    Attributes:
        prompt_tokens, generated_tokens: Counters of tokens.
        first_token_seconds: Histogram of the time from a request to its first token.
        inter_token_seconds: Histogram of the time between two tokens of one request.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._requests = Counter(
            "mlxcel_requests",
            "Requests answered (499: the client hung up)",
            ["endpoint", "model", "status"],
            registry=self.registry,
        )
        self._rejections = Counter(
            "mlxcel_pp_admission_rejections",
            "Refusals of a stage to admit a sequence",
            ["stage", "reason"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "mlxcel_prompt_tokens", "Tokens of prompts", registry=self.registry
        )
        self.generated_tokens = Counter(
            "mlxcel_generated_tokens", "Tokens generated", registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "mlxcel_time_to_first_token_seconds",
            "From a request to its first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.inter_token_seconds = Histogram(
            "mlxcel_inter_token_latency_seconds",
            "Between two tokens of one request",
            buckets=INTER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._queued = Gauge(
            "mlxcel_queue_depth", "Requests that wait for a place", registry=self.registry
        )
        self._active = Gauge(
            "mlxcel_active_sequences", "Sequences that hold a place", registry=self.registry
        )
        self._reserved = Gauge(
            "mlxcel_kv_reserved_bytes",
            "Cache bytes reserved",
            ["stage"],
            registry=self.registry,
        )
        self._budget = Gauge(
            "mlxcel_kv_budget_bytes", "Cache bytes allowed", ["stage"], registry=self.registry
        )

    def watch(self, queued: Callable[[], float], active: Callable[[], float]) -> None:
        """Read the gauges of the engine through these."""
        self._queued.set_function(queued)
        self._active.set_function(active)

    def watch_stage(
        self, stage: int, reserved: Callable[[], float], budget: Callable[[], float | None]
    ) -> None:
        """Read the cache bytes reserved and allowed on ``stage`` through these.

        What has no budget now must never have one.
        """
        self._reserved.labels(str(stage)).set_function(reserved)
        if budget() is not None:
            self._budget.labels(str(stage)).set_function(lambda: budget() or 0)

    def watch_pipeline(self, live: LiveFigures) -> None:
        """Offer the figures of the pipeline's stages and of the hops between them."""
        self.registry.register(PipelineCollector(live))

    def answered(self, endpoint: str, served: bool, status: int) -> None:
        """Count an answer; ``served`` if it was asked of the served model."""
        self._requests.labels(endpoint, self._model if served else OTHER, str(status)).inc()

    def refused(self, stage: int, reason: str) -> None:
        """Count a stage's refusal to admit."""
        self._rejections.labels(str(stage), reason).inc()

    def exposition(self) -> tuple[bytes, str]:
        """All figures as text, and that text's content type."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

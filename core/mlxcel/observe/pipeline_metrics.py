"""The figures of a pipeline for Prometheus, worked out when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from mlxcel.observe.live import QUANTILES, LiveFigures

WINDOW_SECONDS = 15.0
"""Of how much of the past the gauges tell: that of the usual interval between two scrapes."""

LATENCY = "mlxcel_pp_activation_latency_microseconds"


class PipelineCollector(Collector):
    """Offers the figures of ``live``; labels are stages and nothing else."""

    def __init__(self, live: LiveFigures) -> None:
        self._live = live

    def collect(self) -> Iterator[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        stages = self._live.stage_figures(WINDOW_SECONDS)
        busy = GaugeMetricFamily(
            "mlxcel_pp_stage_busy_fraction",
            "Share of the last 15 s in which the stage computed",
            labels=["stage"],
        )
        bubble = GaugeMetricFamily(
            "mlxcel_pp_stage_bubble_fraction",
            "Share of the time with work in the pipeline, of the last 15 s, in which it did not",
            labels=["stage"],
        )
        memory = GaugeMetricFamily(
            "mlxcel_pp_stage_memory_bytes", "Bytes that MLX holds", labels=["stage"]
        )
        received = CounterMetricFamily(
            "mlxcel_pp_received_bytes", "Bytes that came over a wire", labels=["stage"]
        )
        for stage in stages:
            received.add_metric([str(stage.stage)], stage.received_total)
            busy.add_metric([str(stage.stage)], stage.busy)
            bubble.add_metric([str(stage.stage)], stage.bubble)
            memory.add_metric([str(stage.stage)], stage.memory)
        mean = sum(stage.bubble for stage in stages) / len(stages) if stages else 0.0
        yield from (busy, bubble, memory, received)
        yield GaugeMetricFamily(
            "mlxcel_pp_mean_bubble_ratio", "Mean of the stages' bubble fractions", value=mean
        )
        yield from self._latencies()

    def _latencies(self) -> Iterator[Metric]:
        pair = ["src_stage", "dst_stage"]
        text = "What messages took from stage to stage"
        latency = SummaryMetricFamily(LATENCY, f"{text}; quantiles of recent ones", labels=pair)
        largest = GaugeMetricFamily(f"{LATENCY}_max", f"{text} at most", labels=pair)
        for hop in self._live.hop_figures():
            labels = {"src_stage": hop.source, "dst_stage": hop.target}
            for q, value in zip(QUANTILES, hop.quantiles, strict=True):
                latency.add_sample(LATENCY, {**labels, "quantile": str(q)}, value)
            latency.add_metric(list(labels.values()), hop.count, hop.total)
            largest.add_metric(list(labels.values()), hop.largest)
        yield from (latency, largest)

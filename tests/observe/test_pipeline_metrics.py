"""What Prometheus reads of a pipeline."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mlxcel.observe.live import LAG_SECONDS, LiveFigures
from mlxcel.observe.pipeline_metrics import WINDOW_SECONDS, PipelineCollector
from mlxcel.pipeline.report import Beat


def exposed(live: LiveFigures) -> str:
    registry = CollectorRegistry()
    registry.register(PipelineCollector(live))
    return generate_latest(registry).decode()


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_the_figures_of_each_stage() -> None:
    """Busy is of the window, bubble of the time with work, and their mean is there."""
    now = 1000.0
    live = LiveFigures(2, lambda: now)
    live.beat(Beat(0, WINDOW_SECONDS, WINDOW_SECONDS, 9, memory=7))
    live.beat(Beat(1, WINDOW_SECONDS, WINDOW_SECONDS / 4, 9, received=5))
    now += LAG_SECONDS
    found = lines(exposed(live))
    assert 'mlxcel_pp_stage_busy_fraction{stage="0"} 1.0' in found
    assert 'mlxcel_pp_stage_busy_fraction{stage="1"} 0.25' in found
    assert 'mlxcel_pp_stage_bubble_fraction{stage="0"} 0.0' in found
    assert 'mlxcel_pp_stage_bubble_fraction{stage="1"} 0.75' in found
    assert 'mlxcel_pp_stage_memory_bytes{stage="0"} 7.0' in found
    assert 'mlxcel_pp_received_bytes_total{stage="1"} 5.0' in found
    assert "mlxcel_pp_mean_bubble_ratio 0.375" in found


def test_the_latencies_of_each_pair() -> None:
    """A pair of neighbours has a summary with quantiles, and the largest of all."""
    live = LiveFigures(2)
    live.beat(Beat(1, 1.0, 1.0, 1, hops=tuple(float(n) for n in range(1, 101))))
    text = exposed(live)
    name, pair = "mlxcel_pp_activation_latency_microseconds", 'dst_stage="1",src_stage="0"'
    found = {"".join(sorted(line.rpartition(" ")[0])): line for line in lines(text)}
    for labels, value in [
        (f'{{{pair},quantile="0.5"}}', 50.0),
        (f'{{{pair},quantile="0.95"}}', 95.0),
        (f'{{{pair},quantile="0.99"}}', 99.0),
        (f"_count{{{pair}}}", 100.0),
        (f"_sum{{{pair}}}", 5050.0),
        (f"_max{{{pair}}}", 100.0),
    ]:
        line = found["".join(sorted(name + labels))]
        assert float(line.rpartition(" ")[2]) == value
    assert f"# TYPE {name} summary" in text
    assert f"# TYPE {name}_max gauge" in text


def test_what_is_exposed_can_be_read() -> None:
    """The text is what Prometheus's own parser takes, with nothing measured and with all."""
    live = LiveFigures(3)
    assert len(list(text_string_to_metric_families(exposed(live)))) == 7
    for stage in range(3):
        live.beat(Beat(stage, 1.0, 1.0, 1, hops=(5.0,)))
    live.hops(3, (6.0,))
    families = {f.name: f for f in text_string_to_metric_families(exposed(live))}
    latency = families["mlxcel_pp_activation_latency_microseconds"]
    assert len(latency.samples) == 4 * 5

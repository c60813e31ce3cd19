"""How a partition's evenness is told; the lines are a contract."""

from mlxcel.family.contract import LayerAdjacencyGroup
from mlxcel.partition.assignment import StageAssignment
from mlxcel.partition.report import PartitionQualityReport


def stages(*loads: int, layers: int = 13) -> tuple[StageAssignment, ...]:
    """Stages of ``layers`` layers each with these estimates."""
    return tuple(
        StageAssignment(
            stage_index=i,
            device_id=f"local-stage-{i}",
            layer_range=range(i * layers, (i + 1) * layers),
            has_embedding=i == 0,
            has_lm_head=i == len(loads) - 1,
            estimated_memory_bytes=load,
        )
        for i, load in enumerate(loads)
    )


def test_the_printed_lines() -> None:
    """Before the stages have loaded, their actual bytes are unknown."""
    assert PartitionQualityReport(stages(12_500_000, 11_900_000)).lines() == (
        "pipeline partition quality: 2 stages, max=12500000 bytes, min=11900000 bytes, "
        "imbalance=1.05x",
        "stage 0 device 'local-stage-0' layers=13 estimated=12500000 actual=unknown",
        "stage 1 device 'local-stage-1' layers=13 estimated=11900000 actual=unknown",
    )


def test_actual_bytes_show_the_drift() -> None:
    """After load, each stage shows what it took and how far the estimate was off, signed."""
    report = PartitionQualityReport(stages(12_500_000, 11_900_000))
    lines = report.with_actual([12_550_000, 11_852_400]).lines()
    assert lines[1].endswith("estimated=12500000 actual=12550000 drift=+0.4%")
    assert lines[2].endswith("estimated=11900000 actual=11852400 drift=-0.4%")


def test_the_warning_begins_at_one_and_a_half() -> None:
    """Only a ratio of 1.5 or more is worth a warning."""
    assert PartitionQualityReport(stages(81, 120)).warning() is None
    assert PartitionQualityReport(stages(80, 120)).warning() == (
        "pipeline auto-partition produced an imbalanced plan: stage byte loads range from 80 to "
        "120 (1.50x), which may hurt throughput."
    )


def test_the_warning_names_the_heaviest_stages_group() -> None:
    """A group on the heaviest stage is the likely cause; one on another stage is not."""
    plan = (*stages(80), StageAssignment(1, "b", range(0, 8), False, True, 120))
    group = LayerAdjacencyGroup(0, 7, "synthetic forced-join")
    assert PartitionQualityReport(plan, (group,)).warning() == (
        "pipeline auto-partition produced an imbalanced plan: stage byte loads range from 80 to "
        "120 (1.50x), which may hurt throughput. Heaviest stage 1 carries adjacency group 0..7 "
        "(synthetic forced-join)."
    )
    elsewhere = LayerAdjacencyGroup(0, 7, "on the light stage")
    assert "carries" not in str(PartitionQualityReport(stages(80, 120), (elsewhere,)).warning())


def test_an_empty_stage_is_infinitely_imbalanced() -> None:
    """A load of nothing divides nothing by zero."""
    assert "imbalance=infx" in PartitionQualityReport(stages(5, 0)).lines()[0]
    assert "imbalance=1.00x" in PartitionQualityReport(stages(0, 0)).lines()[0]

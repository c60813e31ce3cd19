"""A partition made concrete: which stage holds what, on which device, in how many bytes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mlxcel.partition.profile import ModelProfile


@attrs.frozen
class StageAssignment:
    """The share of one stage.

    ``layer_range`` is half-open. ``device_id`` is the node's id in the cluster's TOML, or
    ``local-stage-<i>`` within one process. ``estimated_memory_bytes`` are the weights alone,
    ``kv_bytes`` the caches of as many tokens as the plan is made for, ``mirrors`` the layers of
    earlier stages whose caches are among them.
    """

    stage_index: int
    device_id: str
    layer_range: range
    has_embedding: bool
    has_lm_head: bool
    estimated_memory_bytes: int
    kv_bytes: int = 0
    mirrors: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        """What a memory budget must hold: weights and caches."""
        return self.estimated_memory_bytes + self.kv_bytes


def assign(
    profile: ModelProfile, ranges: Sequence[range], device_ids: Sequence[str] | None = None
) -> tuple[StageAssignment, ...]:
    """One assignment per range: the first stage embeds, the last one has the head.

    ``ranges`` must be valid for ``profile`` (see ``partition.ranges.validate_ranges``), and
    ``device_ids``, if given, as many.
    """
    if device_ids is None:
        device_ids = [f"local-stage-{stage}" for stage in range(len(ranges))]
    last = len(ranges) - 1
    return tuple(
        StageAssignment(
            stage_index=stage,
            device_id=device_id,
            layer_range=layers,
            has_embedding=stage == 0,
            has_lm_head=stage == last,
            estimated_memory_bytes=_memory(profile, layers, stage == 0, stage == last),
            kv_bytes=sum(
                profile.layers[layer].kv_bytes for layer in (*profile.mirrored(layers), *layers)
            ),
            mirrors=profile.mirrored(layers),
        )
        for stage, (layers, device_id) in enumerate(zip(ranges, device_ids, strict=True))
    )


def _memory(profile: ModelProfile, layers: range, first: bool, last: bool) -> int:
    total = sum(profile.layers[layer].bytes for layer in layers)
    if first:
        total += profile.embedding_bytes
    if last:
        total += profile.head_bytes
    return total - profile.shared_bytes if first and last else total

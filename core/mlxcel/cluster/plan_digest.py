"""A short name of a plan, by which two nodes see that they mean the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import attrs

from mlxcel.cluster.messages import ModelIdentity
from mlxcel.tensor.options import TensorParallel


def plan_digest(
    identity: ModelIdentity, family: str, ranges: Sequence[range], tensor: TensorParallel
) -> str:
    """The SHA-256, in hex, of a plan.

    Args:
        identity, family: The model, and the family that runs it.
        ranges: The layers of each stage.
        tensor: How the ranks of a stage share it.
    """
    plan = {
        "config": identity.config,
        "files": [list(file) for file in identity.files],
        "layers": identity.layers,
        "family": family,
        "stages": [[layers.start, layers.stop] for layers in ranges],
        "tensor": attrs.asdict(tensor),
    }
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()

"""A short name of a plan, by which two nodes see that they mean the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from mlxcel.cluster.messages import ModelIdentity


def plan_digest(identity: ModelIdentity, family: str, ranges: Sequence[range]) -> str:
    """The SHA-256, in hex, of a model, the family that runs it, and the layers of each stage."""
    plan = {
        "config": identity.config,
        "files": [list(file) for file in identity.files],
        "layers": identity.layers,
        "family": family,
        "stages": [[layers.start, layers.stop] for layers in ranges],
    }
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()

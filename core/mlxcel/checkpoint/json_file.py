"""Read one JSON object from a checkpoint's file, or say which file is at fault and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxcel.errors import CheckpointError

MAX_BYTES = 64 << 20
"""No JSON file of a checkpoint is larger than 64 MiB."""


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``.

    Raises:
        CheckpointError: The file cannot be read, is larger than :data:`MAX_BYTES`, is not
            JSON, or holds something other than an object.
    """
    again = "Copy or download the file again."
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read ({error.strerror}).", again) from error
    if len(data) > MAX_BYTES:
        raise CheckpointError(file, f"is larger than {MAX_BYTES >> 20} MiB.", again)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(file, f"is not JSON ({error}).", again) from error
    if not isinstance(value, dict):
        raise CheckpointError(file, "holds no JSON object.", again)
    return value

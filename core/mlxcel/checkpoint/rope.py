"""Rotary positions in config.json: ``rope_parameters``, and the fields that it replaces.

transformers 5 writes the base, what stood in ``rope_scaling`` and the share of a head that is
rotated into one object, or into one for each type of layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

ROPE_PARAMETERS = "rope_parameters"

_FULL, _SLIDING = "full_attention", "sliding_attention"
_TYPES = (_FULL, _SLIDING)
_LOCAL = "rope_local_base_freq"
_OF_THEIR_OWN = ("rope_theta", "partial_rotary_factor")


def with_single_rope_fields(
    settings: Mapping[str, Any], known: Collection[str] | None = None
) -> dict[str, Any]:
    """``settings`` with the fields that its ``rope_parameters`` stands for; given ones stay.

    Args:
        known: What the reader of the settings has fields for. One that knows
            ``rope_parameters`` needs no others. None: nobody can tell.

    Raises:
        ValueError: The fields cannot say the same.
    """
    parameters = settings.get(ROPE_PARAMETERS)
    if parameters is None or (known is not None and ROPE_PARAMETERS in known):
        return dict(settings)
    if not isinstance(parameters, dict):
        raise ValueError(f"{ROPE_PARAMETERS} is {parameters!r}, not an object")
    if any(key in _TYPES or isinstance(value, dict) for key, value in parameters.items()):
        found = _of_layer_types(parameters, known)
    else:
        found = _of_all_layers(parameters)
    return {**settings, **{key: value for key, value in found.items() if settings.get(key) is None}}


def rope_scaling_of(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How positions are rescaled (YaRN, Llama 3 and others), whichever form says it; or None."""
    try:
        scaling = with_single_rope_fields(settings).get("rope_scaling")
    except ValueError:
        return None  # whoever builds the model says so
    if not isinstance(scaling, dict) or _rope_type(scaling) == "default":
        return None
    return scaling


def _of_all_layers(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: parameters[key] for key in _OF_THEIR_OWN if parameters.get(key) is not None}
    kind = _rope_type(parameters)
    if kind == "default":
        return {**found, "rope_scaling": None}
    rest = {key: value for key, value in parameters.items() if key not in _OF_THEIR_OWN}
    return {**found, "rope_scaling": {**rest, "type": kind, "rope_type": kind}}  # some read one


def _of_layer_types(parameters: Mapping[str, Any], known: Collection[str] | None) -> dict[str, Any]:
    """A type that stands alone is that of all layers; one that is null or empty says nothing."""
    given = {kind: value for kind, value in parameters.items() if value is not None}
    for kind, value in given.items():
        if kind not in _TYPES or not isinstance(value, dict):
            raise ValueError(f"{ROPE_PARAMETERS} has {kind!r} beside settings of types of layers")
    full, sliding = given.get(_FULL, {}), given.get(_SLIDING, {})
    if not full and not sliding:
        raise ValueError(f"{ROPE_PARAMETERS} says nothing of {_FULL} or {_SLIDING}")
    found, local = _of_all_layers(full or sliding), _of_all_layers(sliding or full)
    if known is not None and _LOCAL not in known:
        if local != found:
            raise ValueError(
                f"{ROPE_PARAMETERS} differ for {_FULL} and {_SLIDING}, "
                "and mlx-lm's model of this type has no field for that"
            )
        return found
    if local.keys() != {"rope_theta", "rope_scaling"} or local["rope_scaling"] is not None:
        raise ValueError(
            f"{ROPE_PARAMETERS} of {_SLIDING} must be a plain rope_theta, "
            "as mlx-lm's model of this type has no field for more"
        )
    return {**found, _LOCAL: local["rope_theta"]}


def _rope_type(settings: Mapping[str, Any]) -> Any:
    return settings.get("rope_type") or settings.get("type") or "default"

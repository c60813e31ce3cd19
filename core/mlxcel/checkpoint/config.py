"""``config.json`` as mlxcel reads it: nested text settings, defaults, end-of-sequence ids."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from mlxcel.checkpoint.json_file import read_json_object
from mlxcel.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
MAX_LAYERS = 10_000
TIED = "tie_word_embeddings"

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
"""The usual name, and what GPT-2 and others say instead."""

_PER_LAYER = ("hybrid_override_pattern", "layers_block_type", "layer_types")
"""What has an entry for each layer; Nemotron-H leaves the count to them."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TAG = "__float__"
_TAGGED_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


@attrs.frozen(kw_only=True)
class ModelConfig:
    """The settings of one checkpoint.

    Attributes:
        path: The ``config.json`` that was read.
        raw: The whole object.
        text: The settings of the language model: ``raw["text_config"]`` if there is one,
            ``raw`` otherwise.
        model_type: ``raw["model_type"]``.
        num_layers: Decoder layers of the language model.
        has_vision: Whether the checkpoint carries a vision tower.
        eos_token_ids: Ids that end a sequence; may be empty.
    """

    path: Path
    raw: dict[str, Any]
    text: Mapping[str, Any]
    model_type: str
    num_layers: int
    has_vision: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key`` in the text settings, else at the top; null counts as absent."""
        for settings in (self.text, self.raw):
            if (value := settings.get(key)) is not None:
                return value
        return default

    def first(self, *keys: str) -> Any:
        """The value of the first of ``keys`` that is present, or None."""
        return next((value for key in keys if (value := self.get(key)) is not None), None)

    def with_layers(self, count: int) -> ModelConfig:
        """The same settings with ``count`` decoder layers, wherever ``raw`` states them."""
        raw = {**self.raw, "num_hidden_layers": count}
        if self.text is self.raw:
            return attrs.evolve(self, raw=raw, text=raw, num_layers=count)
        text = {**self.text, "num_hidden_layers": count}
        return attrs.evolve(self, raw={**raw, "text_config": text}, text=text, num_layers=count)

    def require(self, key: str) -> Any:
        """The value of ``key``.

        Raises:
            CheckpointError: The key is absent or null.
        """
        if (value := self.get(key)) is None:
            raise CheckpointError(
                self.path,
                f"has no {key!r}, which a model of type {self.model_type!r} needs.",
                "Use the config.json that belongs to the weights.",
            )
        return value


def read_config(path: Path) -> ModelConfig:
    """Read the settings of the checkpoint at ``path``, a folder or its ``config.json``.

    Raises:
        CheckpointError: The folder or the file is missing or malformed, it lacks
            ``model_type`` or ``num_hidden_layers`` (and a list of the layers), or it wants to
            run code of its own.
    """
    file = _config_file(Path(path))
    raw = _with_one_tie(_untag(read_json_object(file)))
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    if (script := raw.get("model_file")) is not None:
        raise CheckpointError(
            file,
            f"asks to build the model with its own program (model_file = {script!r}), "
            "and code from a checkpoint never runs.",
            "Install or write a family plugin for this architecture.",
        )
    return ModelConfig(
        path=file,
        raw=raw,
        text=text,
        model_type=_model_type(raw, file),
        num_layers=_num_layers(raw, text, file),
        has_vision=raw.get("vision_config") is not None,
        eos_token_ids=_eos_token_ids(raw, text, file),
    )


def _config_file(path: Path) -> Path:
    if path.is_dir():
        if (path / CONFIG_FILE).is_file():
            return path / CONFIG_FILE
        raise CheckpointError(
            path, f"has no {CONFIG_FILE}.", "Name the folder that holds config.json and weights."
        )
    if path.is_file():
        if path.name == CONFIG_FILE:
            return path
        if path.suffix == ".gguf":
            way_out = f"Convert it first: `mlxcel import-gguf {path} DIR`."
        else:
            way_out = f"Name the folder that holds {CONFIG_FILE} and weights."
        raise CheckpointError(path, "is not a checkpoint folder.", way_out)
    if _HUB_ID.fullmatch(str(path)):
        raise CheckpointError(
            path,
            "does not exist; it looks like a hub's model id, and mlxcel reads local disk only.",
            f"Download it first: `hf download {path} --local-dir {path.name}`.",
        )
    raise CheckpointError(path, "does not exist.", "Name the folder of a checkpoint.")


def _untag(value: Any) -> Any:
    """Undo the tags by which transformers keeps non-finite floats valid JSON."""
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(tag := value.get(_TAG), str) and tag in _TAGGED_FLOATS:
            return _TAGGED_FLOATS[tag]
        return {key: _untag(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untag(item) for item in value]
    return value


def _with_one_tie(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with the outer flag for a tied head in the text settings too, where they have none.

    It is the whole model's, but mlx-lm builds the text model of its own settings alone.
    """
    text, tied = raw.get("text_config"), raw.get(TIED)
    if not isinstance(text, dict) or tied is None or text.get(TIED) is not None:
        return raw
    return {**raw, "text_config": {**text, TIED: tied}}


def _model_type(raw: Mapping[str, Any], file: Path) -> str:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(
            file,
            "has no model_type, so its architecture is unknown.",
            "Use the config.json that belongs to the weights.",
        )
    return model_type


def _num_layers(raw: Mapping[str, Any], text: Mapping[str, Any], file: Path) -> int:
    given = (source.get(key) for key in _LAYER_COUNTS for source in (text, raw))
    lists = (source.get(key) for key in _PER_LAYER for source in (text, raw))
    lengths = (len(entries) for entries in lists if isinstance(entries, list | str))
    count = next((value for value in (*given, *lengths) if value is not None), None)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= MAX_LAYERS:
        found = "is missing" if count is None else f"is {count!r}"
        raise CheckpointError(
            file,
            f"num_hidden_layers {found}, not a count from 1 to {MAX_LAYERS}.",
            "Use the config.json that belongs to the weights.",
        )
    return count


def _eos_token_ids(raw: Mapping[str, Any], text: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    """generation_config.json's ids, else config.json's, else its text settings'."""
    generation = file.with_name(GENERATION_CONFIG_FILE)
    if generation.is_file():
        settings = read_json_object(generation)
        if (ids := settings.get("eos_token_id")) is not None:
            return _token_ids(ids, generation)
    ids = raw.get("eos_token_id")
    return _token_ids(text.get("eos_token_id") if ids is None else ids, file)


def _token_ids(value: Any, file: Path) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise CheckpointError(
            file,
            f"eos_token_id is {value!r}, neither a token id nor a list of them.",
            "Correct eos_token_id.",
        )
    return ids

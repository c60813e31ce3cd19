"""What one tiny checkpoint is made of, and how its numbers are drawn."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import mlx.core as mx

Config: TypeAlias = Mapping[str, Any]
Weights: TypeAlias = "dict[str, mx.array]"


def _as_they_are(weights: Weights, config: Config) -> Weights:
    return weights


@attrs.frozen
class Recipe:
    """One tiny checkpoint.

    Attributes:
        name: What :func:`mlxcel.testing.tiny.build` knows it by.
        config: The content of config.json.
        to_hub: From the model's parameters to the file's tensors: the inverse of the renaming
            that loading does, plus what hub files hold beside it.
        seed: What the random numbers start from; recipes with one seed share their weights.
            It is chosen so that greedy decoding does not fall into one repeated token.
        model_config: Fields of ``config`` that a reader of the checkpoint has to take
            otherwise to get the model that was drawn, and that its conversion states; empty
            for nearly all.
    """

    name: str
    config: Config
    to_hub: Callable[[Weights, Config], Weights] = _as_they_are
    seed: str = attrs.field()
    model_config: Config = attrs.field(factory=dict)
    headless: bool = False

    @seed.default
    def _own_seed(self) -> str:
        return self.name

    @property
    def tied(self) -> bool:
        """Whether the drawn model projects with its embedding table."""
        config = {**self.config, **self.model_config}
        return bool(config.get("text_config", config).get("tie_word_embeddings", False))

    def bits(self) -> np.random.PCG64:
        """A fresh source of this recipe's random bits."""
        return np.random.PCG64(zlib.crc32(self.seed.encode()))


# Sharp attention makes what follows depend on the whole context; a wide head parts the logits.
_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 3.0, "conv1d": 0.5}


def draw(
    bits: np.random.PCG64, path: str, shape: tuple[int, ...], *, tied: bool
) -> NDArray[np.float32]:
    """The parameter ``path``, scaled for its role so that activations stay near 1."""
    words: NDArray[np.uint64] = bits.random_raw(math.prod(shape)).reshape(shape)
    leaf = path.rsplit(".", 1)[-1]
    if leaf in ("scale", "per_expert_scale", "layer_scalar") or (
        "norm" in path and leaf == "weight"
    ):
        # on a grid that bfloat16 holds exactly
        return np.float32(1 / 64) * ((words % 25).astype(np.float32) + np.float32(52))
    if leaf == "A_log":  # 0 to 2 and -2 to 1: recurrent states that fade, some soon, some late
        return np.float32(1 / 8) * (words % 17).astype(np.float32)
    if leaf == "dt_bias":
        return np.float32(1 / 8) * ((words % 25).astype(np.float32) - np.float32(16))
    normal = _normal(words)
    if leaf in ("bias", "e_score_correction_bias"):
        return np.float32(0.1) * normal
    if path.split(".")[-2].startswith(("embed_tokens", "embeddings")):
        # a tied table that dominates the residual makes greedy decoding repeat one token
        return np.float32(0.06 if tied else 0.2) * normal
    return np.float32(_GAINS.get(path.split(".")[-2], 1.0) / math.sqrt(shape[-1])) * normal


def _normal(words: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Nearly normal numbers of variance 1: the four quarters of each word, added.

    Only integers and one product, so that every machine and numpy version agrees; the
    library's own normal distribution rests on the platform's logarithm.
    """
    quarters = words[..., None].view(np.int16).astype(np.int32)
    sums: NDArray[np.float32] = quarters.sum(axis=-1).astype(np.float32)
    return np.float32(math.sqrt(3) / 2**16) * sums

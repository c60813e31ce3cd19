"""The shared base of all families: a range of layers of mlx-lm's own model class.

A family subclasses :class:`TransformerStage` and says what differs: which mask a layer
reads, what the first hidden state is made of, what else crosses a stage boundary. The
recipe keeps a split run bit-identical with the whole one: positions come from each
layer's own cache, masks from the stage's own first cache of that kind *before* any layer
runs, and only the payload crosses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

import attrs
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxcel import compat
from mlxcel.checkpoint.config import ModelConfig

Payload = dict[str, mx.array]
"""What crosses a stage boundary: ``h`` [rows, length, hidden] and what the family adds."""

Cache = Any
"""One of mlx-lm's cache objects; a layer without one has None in its place."""


@attrs.frozen
class Mask:
    """The kind of mask a layer reads; layers of one kind share one mask per step.

    ``full``: causal. ``array``: causal, always as an array (attention that adds the mask
    itself). ``sliding``: causal within ``window`` positions. ``chunk``: causal within the
    same chunk of ``window`` positions, chunks being counted from a row's first token.
    ``ssm``: real tokens against padding, for recurrent layers. ``none``: the layer needs no
    mask, or makes its own.
    """

    kind: Literal["full", "array", "sliding", "chunk", "ssm", "none"] = "full"
    window: int | None = None

    def make(self, h: mx.array, cache: Cache) -> Any:
        """The mask for hidden states ``h`` [rows, length, hidden] on top of ``cache``."""
        match self.kind:
            case "full":
                return compat.create_attention_mask(h, cache)
            case "array":
                return compat.create_attention_mask(h, cache, return_array=True)
            case "sliding":
                return compat.create_attention_mask(h, cache, window_size=self.window)
            case "chunk":
                assert self.window is not None, "a chunk has a size"
                return _chunk_mask(h.shape[1], cache, self.window)
            case "ssm":
                return compat.create_ssm_mask(h, cache)
            case "none":
                return None


class TransformerStage:
    """Layers ``start`` to ``stop`` (half-open) of a model, and its ends where they belong.

    The constructor takes the whole, still unevaluated model, asks it what it needs to know
    and gives up every other layer, the embedding unless this is the first stage (or the
    last one of a tied model), and norm and head unless it is the last.

    Attributes:
        model: What is left of mlx-lm's model.
        text: The module of ``model`` that owns the output projection.
        inner: The module of ``text`` that owns embedding, layers and final norm.
        layers: This stage's own layers.
        masks: The mask each own layer reads.
        first, last: Whether this stage holds the model's ends.
        expected: The parameter names of the *whole* model, to tell a stray tensor from a
            foreign one.
        layers_name: What ``inner`` calls its list of layers.
    """

    layers_name = "layers"

    def __init__(self, model: nn.Module, start: int, stop: int) -> None:
        self.model = model
        self.text = self.find_text(model)
        self.inner = self.find_inner(self.text)
        self.start, self.stop = start, stop
        every = list(self.inner[self.layers_name])
        self.num_layers = len(every)
        self.first, self.last = start == 0, stop == self.num_layers
        self.layers = every[start:stop]
        self.masks = [self.mask_of(start + i, layer) for i, layer in enumerate(self.layers)]
        self._caches = self.find_caches(model)[start:stop]
        self._prefix = f"{_path_of(model, self.inner)}{self.layers_name}."
        self.expected = frozenset(flat_parameters(model))
        self._give_up_foreign_parts()

    # What a family may override, in the order of loading and of a forward pass.

    @classmethod
    def build_model(cls, config: ModelConfig) -> nn.Module:
        """The whole model, its parameters never evaluated: mlx-lm's for the ``model_type``."""
        return compat.empty_model(config.raw)

    @classmethod
    def sanitize(cls, model: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The parameters of the whole ``model`` from the checkpoint's tensors, all still lazy.

        mlx-lm's own ``sanitize``, where the model has one. It sees every tensor that the model
        uses, on every stage: some decide from one tensor what to do with another. It must not
        change an array in place: what is only renamed, ranks read in part from the file.
        """
        return dict(model.sanitize(weights)) if hasattr(model, "sanitize") else weights

    def find_text(self, model: nn.Module) -> nn.Module:
        """The text model inside ``model``: its ``language_model``, or the model itself."""
        return cast(nn.Module, getattr(model, "language_model", model))

    def find_inner(self, text: nn.Module) -> nn.Module:
        """The module of ``text`` with the embedding, the layers and the final norm."""
        return cast(nn.Module, text.model)

    def find_caches(self, model: nn.Module) -> list[Cache | None]:
        """One empty cache per layer of the whole model, None for a layer without one."""
        return list(compat.make_prompt_cache(model))

    def mask_of(self, index: int, layer: nn.Module) -> Mask:
        """The mask that layer ``index`` of the model reads."""
        return Mask("full")

    def embed(self, tokens: mx.array) -> Payload:
        """The first payload, of token ids [rows, length]."""
        return {"h": self.inner.embed_tokens(tokens)}

    def run(self, payload: Payload, caches: list[Cache | None]) -> Payload:
        """This stage's layers over ``payload``; ``caches`` are those of its own layers."""
        h = payload["h"]
        masks = self.make_masks(h, caches)
        for layer, mask, cache in zip(self.layers, self.masks, caches, strict=True):
            self.begin(h)
            h = layer(h, masks[mask], cache)
        return {"h": h}

    def logits(self, h: mx.array) -> mx.array:
        """Final norm and output projection: [rows, length, hidden] to [rows, length, vocab]."""
        h = self.final_norm(h)
        if "lm_head" in self.text:
            return cast(mx.array, self.text.lm_head(h))
        return cast(mx.array, self.inner.embed_tokens.as_linear(h))

    def final_norm(self, h: mx.array) -> mx.array:
        """The norm before the output projection."""
        return cast(mx.array, self.inner.norm(h))

    # What the runtime calls.

    def __call__(self, payload: Mapping[str, mx.array], caches: list[Cache | None]) -> Payload:
        """One forward pass: from token ids on the first stage, from a payload on the others."""
        start = self.embed(payload["tokens"]) if self.first else dict(payload)
        return self.run(start, caches)

    def begin(self, h: mx.array) -> None:
        """Let MLX compute ``h`` while Python describes the next layer.

        On a CPU the description of a whole step takes some milliseconds in which the other
        core would wait. A GPU gets its work in larger pieces, where this would only disturb.
        """
        if mx.default_device().type == mx.DeviceType.cpu:
            mx.async_eval(h)

    def make_caches(self) -> list[Cache | None]:
        """Empty caches for one sequence, one entry per own layer."""
        return copy.deepcopy(self._caches)

    def change_cache(self, path: str, change: Callable[[Cache], Cache]) -> None:
        """Let the layer that the module ``path`` belongs to keep another cache, if it has one.

        ``change`` gets an empty one, of which only copies will be used.
        """
        index = int(path.removeprefix(self._prefix).partition(".")[0])
        if self._caches[index] is not None:
            self._caches[index] = change(self._caches[index])

    def make_masks(self, h: mx.array, caches: list[Cache | None]) -> dict[Mask, Any]:
        """One mask per kind, from the first own cache of that kind, before any layer runs."""
        masks: dict[Mask, Any] = {}
        for mask, cache in zip(self.masks, caches, strict=True):
            if mask not in masks and (cache is not None or mask.kind == "none"):
                masks[mask] = mask.make(h, cache)
        return masks

    def local_name(self, name: str) -> str | None:
        """The name that the model parameter ``name`` has in this stage; None if not here."""
        if not name.startswith(self._prefix):
            return name
        index, _, rest = name.removeprefix(self._prefix).partition(".")
        own = int(index) - self.start
        return f"{self._prefix}{own}.{rest}" if 0 <= own < len(self.layers) else None

    def parameter_groups(self) -> Iterator[list[str]]:
        """The names of the parameters in the order of loading: the ends first, then by layer."""
        names = list(flat_parameters(self.model))
        yield [name for name in names if not name.startswith(self._prefix)]
        for index in range(len(self.layers)):
            yield [name for name in names if name.startswith(f"{self._prefix}{index}.")]

    def nbytes(self) -> int:
        """Bytes of the parameters that this stage holds; what ranks share counts once."""
        values = flat_parameters(self.model).values()
        return sum({id(value): value.nbytes for value in values}.values())

    def _give_up_foreign_parts(self) -> None:
        tied = "lm_head" not in self.text
        keep: set[str] = set()
        if self.first or (self.last and tied):
            keep |= self.table_parts()
        if self.first:
            keep |= self.embedding_parts()
        if self.last:
            keep |= self.head_parts()
        for module in (self.inner, self.text):
            for part in self.table_parts() | self.embedding_parts() | self.head_parts():
                if part in module and part not in keep:
                    module.pop(part)
        self.inner[self.layers_name] = self.layers

    def table_parts(self) -> set[str]:
        """The token embedding: kept by the first stage, and by the last one when tied."""
        return {"embed_tokens"}

    def embedding_parts(self) -> set[str]:
        """What else the first stage needs to make the first payload."""
        return set()

    def head_parts(self) -> set[str]:
        """What only the last stage needs."""
        return {"norm", "lm_head"}


def flat_parameters(module: nn.Module) -> dict[str, mx.array]:
    """The parameters of ``module`` by their dotted path."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())))


def _chunk_mask(length: int, cache: Cache, size: int) -> mx.array:
    """bool [rows, 1, length, columns]: the columns before and at a position, of its own chunk.

    A row's padding on the left shifts its positions, so its chunks begin at other columns
    than its neighbour's; the columns of the padding itself belong to no chunk.
    """
    before = cache.size()
    padding = getattr(cache, "left_padding", mx.array([0]))
    columns = mx.arange(before + length) - padding[:, None, None, None]
    own = columns[..., before:].swapaxes(-1, -2)
    chunk_start = own - own % size
    return (chunk_start <= columns) & (columns <= own)


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    """The path of ``wanted`` inside ``model``, with a trailing dot unless it is the root."""
    for path, module in model.named_modules():
        if module is wanted:
            return f"{path}." if path else ""
    raise ValueError("the inner module is not part of the model")

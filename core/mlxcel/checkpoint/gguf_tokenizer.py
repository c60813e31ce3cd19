"""The tokenizer of a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``.

Byte-level BPE only: ``tokenizer.ggml.model`` = ``gpt2``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.checkpoint.gguf import GgufFile
from mlxcel.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@attrs.frozen
class ImportedTokenizer:
    """What a GGUF file's tokenizer becomes.

    Attributes:
        tokenizer: The text of ``tokenizer.json``.
        config: The object of ``tokenizer_config.json``.
        special_ids: ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``, where known.
        size: Tokens in the vocabulary.
    """

    tokenizer: str
    config: dict[str, Any]
    special_ids: dict[str, int]
    size: int


def import_tokenizer(gguf: GgufFile) -> ImportedTokenizer:
    """Rebuild the tokenizer from the tokens, merges and token types in ``gguf``.

    Raises:
        UnsupportedError: Another tokenizer model or pre-tokenizer, named in the error.
        CheckpointError: A field is missing or contradicts another.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    model, pre = (gguf.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model != "gpt2":
        raise UnsupportedError(
            f"The tokenizer model {model!r} of {gguf.path} cannot be imported.",
            "Only byte-level BPE (gpt2) can.",
        )
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"The pre-tokenizer {pre!r} of {gguf.path} cannot be imported.",
            f"Known are {', '.join(_PRE_TOKENIZERS)}.",
        )
    tokens = _list(gguf, "tokens", str)
    kinds = _list(gguf, "token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _list(gguf, "merges", str)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or len(kinds) != len(tokens):
        raise _malformed(gguf, "its tokens repeat or do not match their types")
    special = {
        name: index
        for name in ("bos", "eos", "pad")
        if (index := _token_id(gguf, name, len(tokens))) is not None
    }
    llama3 = pre == "llama-bpe"
    try:
        bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=llama3)
    except Exception as error:  # the library raises nothing narrower
        raise _malformed(gguf, f"its merges do not fit its tokens ({error})") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    add_bos = bool(gguf.metadata.get("tokenizer.ggml.add_bos_token", llama3)) and "bos" in special
    if add_bos:
        bos = tokens[special["bos"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, special["bos"])]
        )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[index] for name, index in special.items()},
    }
    if template := gguf.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return ImportedTokenizer(
        tokenizer=tokenizer.to_str(),
        config=config,
        special_ids={f"{name}_token_id": index for name, index in special.items()},
        size=len(tokens),
    )


def _gpt2() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, as_bytes])


_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
}


def _list(gguf: GgufFile, key: str, kind: type) -> list[Any]:
    values = gguf.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise _malformed(gguf, f"tokenizer.ggml.{key} is missing or of another type")
    return values


_ID_KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id"}


def _token_id(gguf: GgufFile, name: str, size: int) -> int | None:
    index = gguf.metadata.get(f"tokenizer.ggml.{_ID_KEYS[name]}")
    if index is not None and (type(index) is not int or not 0 <= index < size):
        raise _malformed(gguf, f"tokenizer.ggml.{_ID_KEYS[name]} is {index!r}, no token's id")
    return index


def _malformed(gguf: GgufFile, what: str) -> CheckpointError:
    return CheckpointError(
        gguf.path, f"holds no usable tokenizer: {what}.", "Use another GGUF file of the model."
    )

"""Streaming detokenization: whole characters only, and nothing lost."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from mlxcel.engine.detokenizer import StreamingDetokenizer, read_decoder
from mlxcel.engine.tokenizer import Tokenizer
from mlxcel.errors import UnsupportedError

SAMPLES = (
    "plain words",
    "日本語のテキスト、混ぜた text",
    "family 👨‍👩‍👧‍👦 and flags 🇯🇵🇨🇭, é and e\u0301",
    "  two spaces  and a tab\t\n\n",
    " leading",
    "",
)


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(
        path=Path("nowhere"),
        backend=backend,
        decoder=read_decoder(backend.decoder.__getstate__()),
        special_tokens={},
        special_ids=frozenset({backend.token_to_id("<|end|>")}),
        eos_ids=frozenset(),
        template=None,
    )


@cache
def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    # tokens that end or begin inside a character: 日 is E6 97 A5, 本 is E6 9C AC
    space, e6, x97, xa5 = (_spelled(byte) for byte in (0x20, 0xE6, 0x97, 0xA5))
    merges = [(space, e6), (x97, xa5), (space + e6, x97 + xa5), (e6, x97)]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<call>", special=False), AddedToken("   ", special=False)])
    return wrap(backend)


def _spelled(byte: int) -> str:
    """``byte`` in the byte-level alphabet, as the library itself spells it."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in ("日", "本", " "):
        spelled = split.pre_tokenize_str(character)[0][0]
        for value, letter in zip(character.encode(), spelled, strict=True):
            if value == byte:
                return letter
    raise AssertionError(byte)


def sentencepiece_vocabulary() -> dict[str, int]:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"plainwordsmixetfgc日本語、é", "in", "▁wor", "▁l"]
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


@cache
def sentencepiece(strips: bool) -> Tokenizer:
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=sentencepiece_vocabulary(),
            merges=[("i", "n"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    mark = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * strips + mark)
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return wrap(backend)


@cache
def metaspace() -> Tokenizer:
    vocabulary = sentencepiece_vocabulary()
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return wrap(backend)


TOKENIZERS = {
    "byte-level": byte_level,
    "sentencepiece": lambda: sentencepiece(True),
    "sentencepiece-no-strip": lambda: sentencepiece(False),
    "metaspace": metaspace,
}
every_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = StreamingDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
def test_any_ids_join_to_decode(kind: str, data: st.DataObject, skip: bool) -> None:
    """Whatever the ids, the streamed pieces join to what decode gives for them at once."""
    tokenizer = TOKENIZERS[kind]()
    size = tokenizer.backend.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=40))
    streamed = "".join(stream(tokenizer, ids, skip=skip))
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@given(
    ids=st.lists(st.integers(0, byte_level().backend.get_vocab_size() - 1), max_size=40),
    skip=st.booleans(),
)
def test_byte_level_agrees_with_the_library_on_any_ids(ids: list[int], skip: bool) -> None:
    """A byte-level stream equals the tokenizers library's decode, broken bytes included."""
    expected = byte_level().backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(byte_level(), ids, skip=skip)) == expected


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "sentencepiece-no-strip"])
@given(text=st.one_of(st.sampled_from(SAMPLES), st.text(max_size=30)))
def test_valid_text_comes_back_without_replacement_characters(kind: str, text: str) -> None:
    """Text goes through ids and back unchanged, and no piece shows half a character."""
    tokenizer = TOKENIZERS[kind]()
    text = text.replace("\ufffd", "").replace("▁", "").replace("<", "")
    pieces = stream(tokenizer, tokenizer.backend.encode(text).ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-no-strip", "metaspace"])
@pytest.mark.parametrize("text", ["plain words", "  two  in", "語 日本", "▁", ""])
def test_sentencepiece_agrees_with_the_library(kind: str, text: str) -> None:
    """A SentencePiece-style stream equals the library's decode, leading spaces included."""
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.backend.encode(text).ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.backend.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_character_appears_with_its_last_byte(kind: str) -> None:
    """An emoji of four byte tokens is held back for three of them, then shown whole."""
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.backend.encode("👍").ids[-4:]
    assert stream(tokenizer, ids) == ["", "", "", "👍", ""]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_cut_character_becomes_one_replacement_at_the_end(kind: str) -> None:
    """Tokens that end inside a character leave one U+FFFD, and only at finish."""
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.backend.encode("in👍").ids[:-1]
    *pieces, last = stream(tokenizer, ids)
    assert "".join(pieces) == "in"
    assert last == "\ufffd"


def test_a_broken_byte_does_not_hold_back_what_follows() -> None:
    """After bytes that are no character, text flows on at once."""
    tokenizer = sentencepiece(False)
    broken = tokenizer.backend.token_to_id("<0xFF>")
    letter = tokenizer.backend.token_to_id("d")
    assert stream(tokenizer, [broken, letter]) == ["\ufffd", "d", ""]


def test_unknown_ids_have_no_text() -> None:
    """An id beyond the vocabulary (a padded head) adds nothing."""
    assert stream(byte_level(), [10**6]) == ["", ""]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Replace", "pattern": {"Regex": "x+"}, "content": " "},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Fuse"},
                {"type": "Replace", "pattern": {"String": "ab"}, "content": ""},
            ],
        },
    ],
)
def test_decoders_whose_tokens_depend_on_each_other_are_refused(decoder: object) -> None:
    """A decoder that cannot be streamed token by token is refused by name."""
    with pytest.raises(UnsupportedError, match=r"cannot stream"):
        read_decoder(json.dumps(decoder).encode())

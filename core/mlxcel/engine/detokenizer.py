"""Token ids to text, one at a time, in constant time per token.

Every token stands for some bytes, whatever its neighbours are; text is those bytes read
as UTF-8. So a stream needs to hold back at most the three bytes of a character that has
begun, and text once handed out never changes. Bytes that are no UTF-8 become U+FFFD, one
per maximal ill-formed part (the Unicode standard's practice, section 3.9).
"""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.errors import UnsupportedError

if TYPE_CHECKING:
    from mlxcel.engine.tokenizer import Tokenizer


def _byte_level_characters() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes are themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


BYTE_OF_CHARACTER = _byte_level_characters()


@attrs.frozen
class TokenDecoder:
    """How a tokenizer's tokens become bytes.

    Attributes:
        replacements: Substitutions in a token, in order, e.g. the mark for a space.
        byte_level: A token's characters each stand for one byte.
        byte_fallback: Tokens of the form ``<0xE2>`` stand for one byte.
        strip: The character, and how many of it, that the whole text loses at its start.
        first_loses: A mark that the first token of a text loses wherever it stands in it.
    """

    replacements: tuple[tuple[str, str], ...] = ()
    byte_level: bool = False
    byte_fallback: bool = False
    strip: tuple[str, int] = ("", 0)
    first_loses: str = ""

    def to_bytes(self, token: str, *, first: bool = False) -> bytes:
        """The bytes of ``token``; ``first`` if it is the first token of its text."""
        if first and self.first_loses:
            token = token.replace(self.first_loses, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return bytes([byte])
        if self.byte_level and all(character in BYTE_OF_CHARACTER for character in token):
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        return token.encode()


def _fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def read_decoder(state: bytes) -> TokenDecoder:
    """The decoder that a ``tokenizer.json`` describes under ``decoder``.

    Args:
        state: The description as JSON.

    Raises:
        UnsupportedError: A decoder whose tokens do not stand for bytes of their own.
    """
    parts = _flattened(json.loads(state))
    kinds = [part["type"] for part in parts]
    decoder = TokenDecoder()
    for index, part in enumerate(parts):
        match part:
            case {"type": "ByteLevel"}:
                decoder = attrs.evolve(decoder, byte_level=True)
            case {"type": "ByteFallback"}:
                decoder = attrs.evolve(decoder, byte_fallback=True)
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not (
                {"Fuse", "ByteFallback", "ByteLevel"} & set(kinds[:index])
            ):
                decoder = attrs.evolve(decoder, replacements=(*decoder.replacements, (old, new)))
            case {"type": "Strip", "content": character, "start": count, "stop": 0} if (
                "Fuse" in kinds[:index]
            ):
                decoder = attrs.evolve(decoder, strip=(character, count))
            case {"type": "Metaspace", "replacement": mark}:
                decoder = attrs.evolve(
                    decoder,
                    replacements=(*decoder.replacements, (mark, " ")),
                    first_loses="" if part.get("prepend_scheme") == "never" else mark,
                )
            case _:
                raise UnsupportedError(
                    f"the tokenizer's decoder {' + '.join(kinds)} has a part ({part['type']}) "
                    f"that mlxcel cannot stream.",
                    "Use a checkpoint with a byte-level or SentencePiece-style tokenizer.",
                )
    return decoder


def _flattened(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return [{"type": "none"}]
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flattened(inner)]
    return [decoder]


class StreamingDetokenizer:
    """The text of one sequence as its tokens arrive.

    What :meth:`add` and finally :meth:`finish` return, joined, is ``tokenizer.decode`` of
    the same ids.

    Args:
        tokenizer: Where token ids get their meaning; it can be shared.
        skip_special_tokens: Special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip, self._to_strip = tokenizer.decoder.strip
        self._first = True

    def add(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is unfinished."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return ""
        data = self._tokenizer.token_bytes(token_id, first=self._first)
        if data is None:
            return ""
        self._first = False
        text = self._utf8.decode(data)
        return self._stripped(text) if self._to_strip else text

    def finish(self) -> str:
        """What is still held back: U+FFFD for a character that never became whole."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._strip):
                self._to_strip = 0
                break
            text = text[len(self._strip) :]
            self._to_strip -= 1
        return text

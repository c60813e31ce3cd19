"""A checkpoint's tokenizer: text to token ids and back, and its chat template.

Reads ``tokenizer.json`` with the `tokenizers` library and the files around it as the hub
lays them out: ``tokenizer_config.json``, ``special_tokens_map.json`` and
``chat_template.jinja``. Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import tokenizers

from mlxcel.checkpoint.json_file import read_json_object
from mlxcel.engine.chat_template import ChatTemplate, Message
from mlxcel.engine.detokenizer import StreamingDetokenizer, TokenDecoder, read_decoder
from mlxcel.engine.thinking import STRUCTURE, Thinking, find_thinking
from mlxcel.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from mlxcel.checkpoint.config import ModelConfig


LONG_TEXT = 1 << 12
"""Characters of a text that takes long enough for other threads to notice."""


@attrs.frozen(eq=False)
class Tokenizer:
    """The tokenizer of one checkpoint; it never changes, so threads can share it.

    Attributes:
        path: The checkpoint's folder.
        backend: The `tokenizers` object that splits text.
        decoder: How its tokens become bytes.
        special_tokens: Named special tokens: ``bos_token``, ``eos_token``, ``pad_token``, ….
        special_ids: The ids whose text a reader does not want to see: the special tokens,
            except those that give an answer its structure.
        eos_ids: The ids that end a sequence: config.json's and the tokenizer's own.
        template: The chat template, if the checkpoint has one.
        affixes: Ids put before and after a text, or None where ``tokenizer.json`` decides.
        thinking: How the model marks its thoughts, if it has any.
    """

    path: Path
    backend: tokenizers.Tokenizer
    decoder: TokenDecoder
    special_tokens: Mapping[str, str]
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    template: ChatTemplate | None
    affixes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    thinking: Thinking | None = None
    _token_bytes: dict[int, bytes | None] = attrs.field(factory=dict, init=False, repr=False)

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a sequence."""
        return self.special_tokens.get("bos_token")

    @property
    def has_chat_template(self) -> bool:
        return self.template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of ``text``.

        Args:
            text: Special tokens that it spells out become their ids.
            add_special_tokens: Begin (and end) as the tokenizer says, usually with BOS; not
                where ``text`` begins with BOS already.
        """
        text = _well_formed(text)
        if self.bos_token and text.startswith(self.bos_token):
            add_special_tokens = False
        if not add_special_tokens or self.affixes is None:
            return self._split(text, add_special_tokens)
        before, after = self.affixes
        return [*before, *self._split(text, False), *after]

    def _split(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        # A batch lets other threads run meanwhile, which `encode` does not.
        [found] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; ids that the tokenizer does not know have none."""
        stream = StreamingDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.add, ids), stream.finish()])

    def token(self, token_id: int) -> str | None:
        """The token of ``token_id`` as the vocabulary spells it, or None where there is none."""
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes | None:
        """The bytes that ``token_id`` stands for, or None where there is no such token.

        Args:
            first: Whether it is the first token of its text.
        """
        known = self._token_bytes
        if first or token_id not in known:
            token = self.token(token_id)
            data = None if token is None else self.decoder.to_bytes(token, first=first)
            if first:
                return data
            known[token_id] = data
        return known[token_id]

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text for ``messages``; see :meth:`ChatTemplate.render`.

        Raises:
            UsageError: The checkpoint has no chat template.
            ChatTemplateError: The template refuses the messages, or fails.
        """
        if self.template is None:
            raise UsageError(
                f"the checkpoint at {self.path} has no chat template.",
                "Send the prompt as it is (--no-chat-template), or put a chat_template.jinja "
                "beside tokenizer.json.",
            )
        return self.template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The token ids of :meth:`render_chat`; the template itself writes BOS."""
        text = self.render_chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        return self.encode(text, add_special_tokens=False)


def _well_formed(text: str) -> str:
    """``text`` with U+FFFD for half surrogate pairs, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def load_tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of the checkpoint in the folder ``path``.

    Raises:
        CheckpointError: ``tokenizer.json`` is missing, or a file cannot be read.
        ChatTemplateError: The chat template's syntax is wrong.
        UnsupportedError: The tokenizer's decoder cannot be streamed.
    """
    backend = _read_backend(path)
    settings = _read_object(path / "tokenizer_config.json")
    named = _named_tokens(_read_object(path / "special_tokens_map.json"))
    named |= _named_tokens(settings)
    eos = backend.token_to_id(named.get("eos_token", ""))
    template = _read_template(path, settings, named)
    return Tokenizer(
        path=path,
        backend=backend,
        decoder=read_decoder(backend.decoder.__getstate__() if backend.decoder else b"null"),
        special_tokens=named,
        special_ids=frozenset(
            id
            for id, token in backend.get_added_tokens_decoder().items()
            if token.special and token.content not in STRUCTURE
        ),
        eos_ids=frozenset(config.eos_token_ids) | ({eos} if eos is not None else set()),
        template=template,
        affixes=_affixes(backend, settings, named),
        thinking=find_thinking(
            lambda token: backend.token_to_id(token) is not None,
            template.source if template is not None else "",
        ),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        others = [p.name for p in sorted(path.glob("*")) if _is_tokenizer_file(p.name)]
        raise CheckpointError(
            path,
            "there is no tokenizer.json"
            + (f", only {', '.join(others)}." if others else ", and no other tokenizer file."),
            "Make it once with `from transformers import AutoTokenizer; "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})`."
            if others
            else "Copy it from where the checkpoint came from.",
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            file, f"this is not a tokenizer ({error}).", "Download the file again."
        ) from error
    # Some files keep how they were used in training; a prompt is never cut or filled up.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _is_tokenizer_file(name: str) -> bool:
    return (
        name.endswith((".model", ".tiktoken"))
        or name in ("vocab.json", "merges.txt", "vocab.txt")
        or name.startswith("tokenizer")
    )


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``, or an empty one where there is no file."""
    return read_json_object(file) if file.exists() else {}


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, which are strings or objects with ``content``."""
    named = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            named[name] = value
    return named


def _affixes(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What stands around a text where ``add_bos_token`` or ``add_eos_token`` say so.

    Such a setting, true or false, overrides the post-processor of ``tokenizer.json``.
    """
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return None

    def wanted(setting: str, name: str) -> tuple[int, ...]:
        id = backend.token_to_id(named.get(name, "")) if settings.get(setting) else None
        return () if id is None else (id,)

    return wanted("add_bos_token", "bos_token"), wanted("add_eos_token", "eos_token")


def _read_template(
    path: Path, settings: Mapping[str, Any], named: Mapping[str, str]
) -> ChatTemplate | None:
    """The first of chat_template.jinja, tokenizer_config.json and chat_template.json."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), file, named)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                file, f"this cannot be read as UTF-8 text ({error}).", "Download the file again."
            ) from error
    for file in (path / "tokenizer_config.json", path / "chat_template.json"):
        found = settings if file.name == "tokenizer_config.json" else _read_object(file)
        source = _default_template(found.get("chat_template"), file)
        if source is not None:
            return ChatTemplate(source, file, named)
    return None


def _default_template(value: Any, file: Path) -> str | None:
    """The template under ``chat_template``: a string, or a list of which "default" counts."""
    if value is None or isinstance(value, str):
        return value
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}.get("default")
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            file,
            "chat_template is neither a string nor a list of {name, template}.",
            "Correct it, or put the template into chat_template.jinja.",
        ) from error

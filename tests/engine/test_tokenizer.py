"""Reading a tokenizer with its neighbouring files, encoding, decoding, chatting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from mlxcel.checkpoint.config import ModelConfig
from mlxcel.engine.tokenizer import Tokenizer, load_tokenizer
from mlxcel.errors import CheckpointError, UsageError
from mlxcel.testing.tiny.tokenizer import BOS, EOS, write_tokenizer

HELLO = [{"role": "user", "content": "Hi 👍"}]


def load(folder: Path, eos: tuple[int, ...] = ()) -> Tokenizer:
    config = ModelConfig(
        path=folder / "config.json",
        raw={},
        text={},
        model_type="llama",
        num_layers=1,
        eos_token_ids=eos,
    )
    return load_tokenizer(folder, config)


def edit(file: Path, **changes: Any) -> None:
    """Change fields of the JSON object in ``file``; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def settings(folder: Path) -> Path:
    return folder / "tokenizer_config.json"


@pytest.fixture
def with_bos(folder: Path) -> Path:
    """A tokenizer whose post-processor begins each text with BOS."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("text", ["hello", "日本語 👨‍👩‍👧 é", "", " two  spaces\n"])
def test_text_survives_encoding(folder: Path, text: str) -> None:
    """decode(encode(text)) is text, and a byte token's id is its byte."""
    tokenizer = load(folder)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_skipped_on_demand(folder: Path) -> None:
    """Special tokens have text only for who asks for it."""
    tokenizer = load(folder)
    assert tokenizer.decode([BOS, 97, EOS]) == "a"
    assert tokenizer.decode([BOS, 97, EOS], skip_special_tokens=False) == "<|bos|>a<|eos|>"


def test_bos_is_added_once(with_bos: Path) -> None:
    """The post-processor's BOS begins a text, but not one that spells it out already."""
    tokenizer = load(with_bos)
    assert tokenizer.encode("a") == [BOS, 97]
    assert tokenizer.encode("<|bos|>a") == [BOS, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_add_bos_token_overrides_the_post_processor(with_bos: Path) -> None:
    """tokenizer_config.json's add_bos_token and add_eos_token decide where they are given."""
    file = with_bos / "tokenizer_config.json"
    edit(file, add_bos_token=False)
    assert load(with_bos).encode("a") == [97]
    edit(file, add_bos_token=True, add_eos_token=True)
    assert load(with_bos).encode("a") == [BOS, 97, EOS]
    assert load(with_bos).encode("a", add_special_tokens=False) == [97]


def test_eos_ids_are_the_configs_and_the_tokenizers(folder: Path) -> None:
    """A sequence ends at config.json's ids and at the tokenizer's own EOS."""
    assert load(folder, eos=(5, 7)).eos_ids == {5, 7, EOS}


def test_token_names_may_be_objects_or_stand_in_the_map(folder: Path, settings: Path) -> None:
    """Special tokens are read as strings, as objects, and from special_tokens_map.json."""
    edit(settings, bos_token={"content": "<|bos|>", "lstrip": False}, eos_token=None)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|user|>"}, "bos_token": "<|pad|>"})
    )
    tokenizer = load(folder)
    assert tokenizer.bos_token == "<|bos|>"
    assert tokenizer.special_tokens["eos_token"] == "<|user|>"
    assert tokenizer.eos_ids == {tokenizer.backend.token_to_id("<|user|>")}


def test_training_leftovers_do_not_cut_or_pad(folder: Path) -> None:
    """Truncation and padding stored in tokenizer.json do not touch a prompt."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    assert load(folder).encode("abcdef") == list(b"abcdef")
    assert load(folder).encode("ab") == list(b"ab")


def test_half_a_surrogate_pair_is_replaced(folder: Path) -> None:
    """Text that JSON can carry but UTF-8 cannot becomes U+FFFD instead of an error."""
    tokenizer = load(folder)
    assert tokenizer.decode(tokenizer.encode("a\ud83d")) == "a\ufffd"
    assert tokenizer.decode(tokenizer.encode("\ud83d\udc4d")) == "👍"


def test_chat_is_encoded_without_a_second_bos(with_bos: Path) -> None:
    """The template writes BOS itself; encode_chat adds none."""
    tokenizer = load(with_bos)
    text = tokenizer.render_chat(HELLO)
    assert text == "<|bos|><|user|>Hi 👍<|eos|><|assistant|>"
    ids = tokenizer.encode_chat(HELLO)
    assert ids.count(BOS) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_agrees_with_transformers(with_bos: Path) -> None:
    """Text, ids and chat ids are those of the reference tokenizer library."""
    from transformers import AutoTokenizer

    (with_bos / "config.json").write_text('{"model_type": "llama"}')
    reference = AutoTokenizer.from_pretrained(with_bos)
    tokenizer = load(with_bos)
    for prompt in (True, False):
        assert tokenizer.render_chat(HELLO, add_generation_prompt=prompt) == (
            reference.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=prompt)
        )
    assert tokenizer.encode("Hi 👍") == reference.encode("Hi 👍")


def test_without_a_template_chatting_is_refused(folder: Path, settings: Path) -> None:
    """A checkpoint without chat template says so, with the way out."""
    edit(settings, chat_template=None)
    tokenizer = load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(UsageError, match="--no-chat-template"):
        tokenizer.render_chat(HELLO)


def test_where_the_template_is_found(folder: Path, settings: Path) -> None:
    """chat_template.jinja wins over tokenizer_config.json, which wins over chat_template.json."""
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    edit(settings, chat_template=[{"name": "other", "template": "no"}])
    assert load(folder).render_chat(HELLO) == "json"
    edit(
        settings,
        chat_template=[
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "config"},
        ],
    )
    assert load(folder).render_chat(HELLO) == "config"
    (folder / "chat_template.jinja").write_text("jinja")
    assert load(folder).render_chat(HELLO) == "jinja"


def test_a_jinja_file_alone_is_enough(folder: Path, settings: Path) -> None:
    """A template that stands only in chat_template.jinja is used, without any settings file."""
    settings.unlink()
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load(folder).render_chat(HELLO) == "Hi 👍"


@pytest.mark.parametrize(
    ("others", "says"),
    [(["tokenizer.model"], "only tokenizer.model"), ([], "no other tokenizer file")],
)
def test_a_missing_tokenizer_says_what_is_there(
    tmp_path: Path, others: list[str], says: str
) -> None:
    """Without tokenizer.json the error names what the folder has instead, and the way out."""
    for name in others:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=says) as caught:
        load(tmp_path)
    assert caught.value.path == tmp_path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"model": '),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("special_tokens_map.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, content: bytes) -> None:
    """Each file that cannot be read is named by its path."""
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.path == folder / name


def test_the_module_is_light() -> None:
    """Loading a tokenizer imports neither transformers nor MLX."""
    code = (
        "import sys, mlxcel.engine.tokenizer\n"
        "print([m for m in ('transformers', 'mlx', 'mlx_lm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

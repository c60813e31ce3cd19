"""The tokenizer of every tiny checkpoint: 256 bytes and 32 special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from mlxcel.engine.detokenizer import BYTE_OF_CHARACTER

BOS, EOS, PAD = 256, 257, 258
VOCAB = 288

_NAMED = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
SPECIAL_TOKENS = _NAMED + tuple(f"<|extra{i}|>" for i in range(VOCAB - 256 - len(_NAMED)))

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder ``out``.

    The id of a byte is the byte; special tokens follow from 256. No token is added to a text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHARACTER), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS - 256],
        "eos_token": SPECIAL_TOKENS[EOS - 256],
        "pad_token": SPECIAL_TOKENS[PAD - 256],
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=1) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")

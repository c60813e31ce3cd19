"""Fields that other servers take and that would change the answer: refused by name, not ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mlxcel.server.errors import invalid
from mlxcel.server.fields import Fields


@attrs.frozen
class Refused:
    """A field that is not supported.

    ``harmless`` are the values that ask for nothing, such as the defaults of the servers that
    know it; ``instead`` says what else can be done.
    """

    harmless: tuple[Any, ...] = ()
    instead: str = "Leave it out."


_ZERO = (0, 0.0)
_ONE = (1, 1.0)
_BY_SCHEMA = Refused((), "Describe the form of the answer with 'response_format'.")
_NO_STOP_IDS = Refused(([],), "Name the strings that end the text with 'stop'.")
_OTHER_LIMIT = Refused((), "Send 'max_tokens'.")
_OTHER_SAMPLER = "Choose what may be drawn with 'top_p', 'top_k' and 'min_p'."

_SAMPLERS = (
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
)
"""What versions of llama.cpp do by default, and their clients repeat to them."""

UNSUPPORTED: Mapping[str, Refused] = {
    "adapters": Refused((), "The server has one model, without adapters."),
    "add_generation_prompt": Refused((True,)),
    "allowed_token_ids": Refused(([],), "Favour tokens with 'logit_bias'."),
    "bad_words": Refused(([],), "Disfavour tokens with 'logit_bias'."),
    "chat_template": Refused((), "The model's own template is used."),
    "continue_final_message": Refused((False,)),
    "documents": Refused(([],), "Send the documents in a message."),
    "dry_multiplier": Refused(_ZERO),
    "dynatemp_range": Refused(_ZERO, "Send 'temperature'."),
    "grammar": Refused(("",), _BY_SCHEMA.instead),
    "guidance_scale": Refused(_ONE),
    "guided_choice": _BY_SCHEMA,
    "guided_grammar": _BY_SCHEMA,
    "guided_json": _BY_SCHEMA,
    "guided_regex": _BY_SCHEMA,
    "include_reasoning": Refused((True,)),
    "include_stop_str_in_output": Refused((False,)),
    "json_schema": _BY_SCHEMA,
    "length_penalty": Refused(_ONE),
    "logits_processors": Refused(([],)),
    "lora": Refused(([],), "The server has one model, without adapters."),
    "max_new_tokens": _OTHER_LIMIT,
    "max_output_tokens": _OTHER_LIMIT,
    "min_keep": Refused((0, 1)),
    "min_tokens": Refused((0,)),
    "mirostat": Refused((0,)),
    "n_predict": _OTHER_LIMIT,
    "n_probs": Refused((0,), "Send 'logprobs'."),
    "negative_prompt": Refused(("",)),
    "num_beams": Refused((1,)),
    "num_return_sequences": Refused((1,), "Send 'n'."),
    "prompt_embeds": Refused(([],), "Send the prompt as text or token ids."),
    "prompt_logprobs": Refused(),
    "reasoning_format": Refused(
        ("auto", "deepseek"), "Thoughts come as 'reasoning_content'; leave it out."
    ),
    "repeat_penalty": Refused(_ONE, "Send 'repetition_penalty'."),
    "role_mapping": Refused((), "The model's own template is used."),
    "samplers": Refused(_SAMPLERS),
    "skip_special_tokens": Refused((True,)),
    "stop_token_ids": _NO_STOP_IDS,
    "structured_outputs": _BY_SCHEMA,
    "tfs_z": Refused(_ONE, _OTHER_SAMPLER),
    "thinking_token_budget": Refused((), "'max_tokens' holds for thoughts and text together."),
    "top_n_sigma": Refused((*_ZERO, -1, -1.0), _OTHER_SAMPLER),
    "truncate_prompt_tokens": Refused(),
    "typ_p": Refused(_ONE, _OTHER_SAMPLER),
    "typical_p": Refused(_ONE, _OTHER_SAMPLER),
    "use_beam_search": Refused((False,)),
    "xtc_probability": Refused(_ZERO),
}
"""Those that no API has here."""

_ALL_OF_IT = Refused((-1,), "Penalties look back at all of the text.")

WINDOWS: Mapping[str, Refused] = {
    "frequency_context_size": _ALL_OF_IT,
    "presence_context_size": _ALL_OF_IT,
    "repeat_last_n": _ALL_OF_IT,
    "repetition_context_size": _ALL_OF_IT,
}
"""How far penalties look back; without a penalty they mean nothing."""


def refuse_unsupported(fields: Fields, unsupported: Mapping[str, Refused]) -> None:
    """Refuse the body if a field asks for something of ``unsupported``.

    Raises:
        ApiError: It does.
    """
    for name in fields.names():
        if (refused := unsupported.get(name)) is not None and not _asks_for_nothing(
            refused, fields.get(name)
        ):
            path = fields.path(name)
            text = f"'{path}' is not supported by this server. {refused.instead}"
            raise invalid(text, path, "unsupported_parameter")


def _asks_for_nothing(refused: Refused, value: object) -> bool:
    # 0 equals False to Python, and to nobody else.
    return any(type(value) is type(same) and value == same for same in refused.harmless)

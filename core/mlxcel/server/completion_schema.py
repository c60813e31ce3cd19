"""The body of ``/v1/completions``: one prompt or several, as text or as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from mlxcel.server.errors import invalid
from mlxcel.server.fields import Fields
from mlxcel.server.schema import MOST_CHOICES, MOST_LOGPROBS, Generation, read_generation
from mlxcel.server.unsupported import Refused

MOST_TOKEN_ID = (1 << 31) - 1

_FOR_CHATS = "A text has no chat template; send it to /v1/chat/completions."

UNSUPPORTED: Mapping[str, Refused] = {
    "add_special_tokens": Refused((True,), "Send the prompt as token ids."),
    "chat_template_kwargs": Refused(({},), _FOR_CHATS),
    "enable_thinking": Refused((), _FOR_CHATS),
    "functions": Refused(([],), "Send 'tools' to /v1/chat/completions."),
    "reasoning": Refused(({},), _FOR_CHATS),
    "reasoning_effort": Refused((), _FOR_CHATS),
    "stop_sequences": Refused(([],), "Send 'stop'."),
    "suffix": Refused(("",)),
    "system": Refused((), "Send it as the beginning of the prompt."),
    "thinking": Refused(({},), _FOR_CHATS),
    "tool_choice": Refused(("none", "auto"), "Send 'tools' to /v1/chat/completions."),
    "tools": Refused(([],), "Send them to /v1/chat/completions."),
    "top_logprobs": Refused((0,), "Send 'logprobs'."),
}
"""Fields of other APIs that would change the answer."""

PromptText = str | tuple[int, ...]
"""A prompt as the client has it: text, or token ids."""


@attrs.frozen
class CompletionRequest:
    """Texts to go on with.

    Attributes:
        generation: What the answer is to be like.
        prompts: One or more.
        echo: Whether each answer begins with its prompt.
        logprobs: Whether the answer has log-probabilities.
    """

    generation: Generation
    prompts: tuple[PromptText, ...]
    echo: bool = False
    logprobs: bool = False


def read_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Check the body of a completion request.

    Raises:
        ApiError: A field is missing, is not what it must be, or asks for what is not supported.
    """
    fields = Fields(body)
    logprobs = None
    if fields.get("logprobs") is not False:  # as good as absent
        logprobs = fields.integer("logprobs", 0, MOST_LOGPROBS)
    generation = read_generation(fields, UNSUPPORTED, logprobs)
    prompts, echo = read_prompts(fields), fields.flag("echo")
    if echo and logprobs is not None:
        text = (
            "'echo' is not supported together with 'logprobs': the log-probabilities of a prompt "
            "are not computed. Leave one of them out."
        )
        raise invalid(text, "echo", "unsupported_parameter")
    if len(prompts) * generation.choices > MOST_CHOICES:
        text = f"{len(prompts)} prompts with 'n' {generation.choices} are more than {MOST_CHOICES} "
        raise invalid(f"{text}answers. Send several requests.", "prompt", "invalid_value")
    return CompletionRequest(generation, prompts, echo, logprobs is not None)


def read_prompts(fields: Fields) -> tuple[PromptText, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    given = fields.get("prompt")
    if isinstance(given, str):
        return (given,)
    wanted = "a string, a list of strings, a list of token ids, or a list of such lists"
    if not isinstance(given, list) or not given:
        raise fields.wrong("prompt", wanted)
    if _are_ids(given):
        return (tuple(given),)
    if all(isinstance(prompt, str) for prompt in given):
        return tuple(given)
    if all(isinstance(prompt, list) and _are_ids(prompt) for prompt in given):
        return tuple(map(tuple, given))
    raise fields.wrong("prompt", wanted)


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= MOST_TOKEN_ID for value in values)

"""From generated tokens to text and figures, one result per prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from mlxcel.engine.detokenizer import StreamingDetokenizer
from mlxcel.engine.generation import FinishReason, Generation
from mlxcel.engine.slot import Request
from mlxcel.engine.tokenizer import Tokenizer


@attrs.frozen
class Result:
    """One finished prompt; ``tokens`` without the end token, speeds in tokens per second."""

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    generation_tokens: int
    prompt_tps: float
    generation_tps: float


OnText = Callable[[int, str], None]
"""Called with a prompt's index and the text that has just become final."""


def collect(
    generation: Generation,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    on_text: OnText = lambda index, text: None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run ``generation`` to its end.

    Args:
        on_text: Told each piece of text as soon as no later token can change it.
        on_result: Told each result when its prompt is finished, in order of finishing.

    Returns:
        The results in the order of ``requests``.
    """
    decoders = {request.index: StreamingDetokenizer(tokenizer) for request in requests}
    tokens: dict[int, list[int]] = {request.index: [] for request in requests}
    texts: dict[int, list[str]] = {request.index: [] for request in requests}
    results: dict[int, Result] = {}
    prompts = {request.index: len(request.prompt) for request in requests}

    def say(index: int, text: str) -> None:
        if text:
            texts[index].append(text)
            on_text(index, text)

    for event in generation:
        index = event.index
        if event.token is not None:
            tokens[index].append(event.token)
            say(index, decoders[index].add(event.token))
        if event.finish_reason is None:
            continue
        say(index, decoders[index].finish())
        progress = generation.progress[index]
        made = len(tokens[index])
        results[index] = Result(
            index,
            "".join(texts[index]),
            tuple(tokens[index]),
            event.finish_reason,
            prompts[index],
            made,
            _rate(prompts[index], progress.first - progress.started),
            _rate(made - 1, progress.last - progress.first),
        )
        on_result(results[index])
    return [results[request.index] for request in requests]


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0

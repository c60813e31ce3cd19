"""How a model marks its thinking, and which marks of an answer's structure readers must see.

A model that thinks writes its thoughts between two marks before it answers. Which marks, the
vocabulary tells; where the tokenizer has no tokens for them, the chat template does.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs


@attrs.frozen
class Thinking:
    """The marks of one model.

    Attributes:
        start, end: What stands before and after the thoughts.
        answer: What stands before the answer itself, if anything.
        noise: Further marks between the parts of an answer, which mean nothing to a reader.
    """

    start: str
    end: str
    answer: str = ""
    noise: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Whether ``prompt`` ends where the thoughts begin, so that the answer begins inside."""
        return prompt.rstrip().endswith(self.start)

    def skipped(self, prompt: str) -> str:
        """``prompt`` with marks added, so that the answer itself comes next."""
        end = f"{self.end}\n\n" if self.opened_by(prompt) else ""
        return f"{prompt}{end}{self.answer}"


_PAIRS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
)

_OF_SEVERAL_TOKENS = (
    # The tokens that tell, and what they are put together to.
    (("<|channel>", "<channel|>"), Thinking("<|channel>thought", "<channel|>")),
    (
        ("<|open|>", "<|close|>", "<|sep|>"),
        Thinking(
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            "<|open|>response<|sep|>",
            (
                "<|open|>response<|sep|>",
                "<|close|>response<|sep|>",
                "<|close|>message<|sep|>",
            ),
        ),
    ),
    (
        ("<|channel|>", "<|message|>", "<|end|>"),
        Thinking(
            "<|channel|>analysis<|message|>",
            "<|end|>",
            "<|channel|>final<|message|>",
            (
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>commentary<|message|>",
            ),
        ),
    ),
)

STRUCTURE = frozenset(
    """
    <think> </think> <longcat_think> </longcat_think> <|think:start|> <|think:end|>
    <|channel> <channel|> <|open|> <|close|> <|sep|>
    <|channel|> <|message|> <|start|> <|end|> <|constrain|>
    <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>
    <longcat_tool_call> </longcat_tool_call> <longcat_arg_key> </longcat_arg_key>
    <longcat_arg_value> </longcat_arg_value>
    <|tool_call> <tool_call|> <|"|> <start_function_call> <end_function_call> <escape>
    [TOOL_CALLS] [ARGS] [CALL_ID]
    <|tool_call_start|> <|tool_call_end|>
    <|tool_calls_section_begin|> <|tool_calls_section_end|>
    <|tool_call_begin|> <|tool_call_end|> <|tool_call_argument_begin|>
    <minimax:tool_call> </minimax:tool_call> <atem:function_calls> </atem:function_calls>
    """.split()
)
"""Tokens that give an answer its structure: they are text, even where a tokenizer calls them
special, because thoughts and calls could not be told from the rest without them."""


def find_thinking(knows: Callable[[str], bool], template: str) -> Thinking | None:
    """The marks of a model's thoughts; None if it has none.

    Args:
        knows: Whether the vocabulary has a token.
        template: The source of the chat template.
    """
    for start, end in _PAIRS:
        if knows(start) and knows(end):
            return Thinking(start, end)
    for tokens, marks in _OF_SEVERAL_TOKENS:
        if all(map(knows, tokens)):
            return marks
    for start, end in _PAIRS:
        if start in template and end in template:
            return Thinking(start, end)
    return None

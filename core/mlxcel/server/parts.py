"""What an answer is made of: content, thoughts and calls of tools."""

from __future__ import annotations

import attrs


@attrs.define
class Content:
    """Text for the reader."""

    text: str


@attrs.define
class Reasoning:
    """Text of the model's thoughts."""

    text: str


@attrs.define
class ToolCall:
    """A call of a function of the client's; ``arguments`` is a JSON object as text."""

    id: str
    name: str
    arguments: str


Part = Content | Reasoning | ToolCall

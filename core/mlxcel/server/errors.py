"""Errors as OpenAI's clients expect them: a status and ``{"error": {…}}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from mlxcel.errors import (
    ChannelClosed,
    ChatTemplateError,
    ChatTemplateRefusal,
    DeadlineError,
    GrammarFailed,
    LogitsError,
    MlxcelError,
    NeverFits,
    PeerLost,
    QueueFull,
    RankLinkBroken,
    StageError,
    TooManyAtOnce,
    Unavailable,
    UnsupportedError,
    WorkerDied,
    WorkerFailed,
    WorkerSilent,
)

RETRY_AFTER = 1.0
"""Seconds after which to try again where the error itself names none."""

NOT_NUMBERS = (
    "The model's logits are not numbers (NaN), and would not be for the same request again. "
    "Another prompt may work; if none does, whoever runs the server can try --dtype float32, or "
    "get the checkpoint again."
)


@attrs.define(eq=False)
class ApiError(MlxcelError):
    """A refusal or failure, as the client is told.

    Attributes:
        status: The HTTP status.
        message: What happened and what to do.
        code: A word for programs.
        param: The field of the request at fault.
        retry_after: Seconds after which the same request may work; None if it never will.
        more_headers: HTTP headers that this status asks for.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None
    more_headers: Mapping[str, str] = attrs.field(factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def type(self) -> str:
        """The class of the error in OpenAI's terms."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        """The JSON object that the client gets."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.retry_after is not None:
            error["retryable"] = True
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """The HTTP headers that belong to the error."""
        if self.retry_after is None:
            return {**self.more_headers}
        return {**self.more_headers, "Retry-After": str(math.ceil(self.retry_after))}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is wrong, and will be wrong again."""
    return ApiError(400, message, code, param)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of ``error``; nothing of those that nobody foresaw."""
    match error:
        case ApiError():
            return error
        case NeverFits():
            return invalid(str(error), code="request_too_large")
        case TooManyAtOnce():
            return invalid(str(error), "n", "request_too_large")
        case QueueFull():
            return ApiError(429, str(error), "queue_full", retry_after=RETRY_AFTER)
        case Unavailable():
            return ApiError(503, str(error), "unavailable", retry_after=error.retry_after)
        case StageError():
            text = (
                f"{error.problem} Try again; if it fails again, whoever runs the server must look."
            )
            return ApiError(503, text, "stage_failed", retry_after=RETRY_AFTER)
        case LogitsError():
            return ApiError(500, NOT_NUMBERS, "invalid_logits")
        case PeerLost() | RankLinkBroken() | ChannelClosed():
            return ApiError(503, str(error), "stage_lost", retry_after=RETRY_AFTER)
        case WorkerDied() | WorkerFailed() | WorkerSilent():
            return ApiError(503, str(error), "stage_lost", retry_after=RETRY_AFTER)
        case DeadlineError():
            return ApiError(503, str(error), "deadline", retry_after=RETRY_AFTER)
        case ChatTemplateRefusal():
            return invalid(str(error), "messages", "chat_template_refusal")
        case ChatTemplateError():
            text = f"The model's chat template fails on these messages: {error.problem}"
            return invalid(text, "messages", "chat_template_error")
        case GrammarFailed():
            return invalid(str(error), code="grammar_failed")
        case UnsupportedError():
            return invalid(str(error), code="unsupported")
        case _:
            return ApiError(500, "The server failed; its log says why.", "internal_error")

"""``/v1/completions``."""

from __future__ import annotations

from aiohttp import web

from mlxcel.server.body import read_body
from mlxcel.server.choice import Prompt
from mlxcel.server.completion_schema import CompletionRequest, PromptText, read_completion
from mlxcel.server.fields import parse_object
from mlxcel.server.flow import respond, unless_gone
from mlxcel.server.job import Job, grammar_of
from mlxcel.server.models import MODEL, check_model
from mlxcel.server.prompts import check_biases, check_ids, check_length, encode
from mlxcel.server.readers import PlainReader
from mlxcel.server.serving import SERVING, Serving
from mlxcel.server.text_answer import TextAnswer


@unless_gone
async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one text or several."""
    serving = request.app[SERVING]
    data = await read_body(request)
    body = await serving.work(len(data), lambda: read_completion(parse_object(data)))
    request[MODEL] = body.generation.model or serving.options.model_id
    check_model(serving, body.generation.model)
    has_schema = body.generation.schema is not None
    job = await serving.work(len(data), lambda: _job(serving, body), hard=has_schema)
    tokenizer = serving.backend.tokenizer
    answer = TextAnswer(serving.options.model_id, tokenizer, body.logprobs)
    return await respond(request, serving, job, answer)


def _job(serving: Serving, body: CompletionRequest) -> Job:
    check_biases(serving, body.generation)
    schema = body.generation.schema
    return Job(
        body.generation,
        tuple(_prompt(serving, text, body.echo) for text in body.prompts),
        lambda prompt: PlainReader(),
        grammar_of(schema, "response_format") if schema is not None else None,
    )


def _prompt(serving: Serving, given: PromptText, echo: bool) -> Prompt:
    if isinstance(given, str):
        return Prompt(tuple(encode(serving, given, "prompt")), given if echo else "")
    check_length(serving, given, "prompt")
    check_ids(serving, given, "prompt")
    text = serving.backend.tokenizer.decode(given) if echo else ""
    return Prompt(given, text)

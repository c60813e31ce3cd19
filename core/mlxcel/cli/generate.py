"""``mlxcel generate``: run a model on this machine, in one stage or several."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxcel.cli.given_flags import record_given
from mlxcel.cli.model_flags import LONGEST_WAIT, add_stage_flags, add_type_flags, check_bounds
from mlxcel.cli.output import JsonOutput, Output, TextOutput
from mlxcel.cli.plugins import add_no_plugin
from mlxcel.cli.progress import LoadingBars
from mlxcel.cli.quality import quality
from mlxcel.cli.tensor_flags import add_rank_flags, add_tensor_flags
from mlxcel.errors import UsageError

if TYPE_CHECKING:
    from mlxcel.engine.model import Model
    from mlxcel.engine.slot import Request


def add_parser(subparsers: Any) -> None:
    """The flags of ``mlxcel generate``."""
    parser = subparsers.add_parser("generate", help="generate text with a model on this machine")
    record_given(parser)
    add_model_flags(parser)
    add_sampling_flags(parser)
    text = parser.add_argument_group("prompt")
    text.add_argument(
        "-p",
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt; - reads standard input; repeat it for a batch",
    )
    text.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="a prompt from a file"
    )
    text.add_argument("--system", metavar="TEXT", help="a system message, through the template")
    template = text.add_mutually_exclusive_group()
    template.add_argument(
        "--chat", action="store_true", help="demand the checkpoint's chat template"
    )
    template.add_argument(
        "--no-chat-template", action="store_true", help="give the prompt to the model as it is"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--verbose", action="store_true", help="print the plan and its quality")
    parser.set_defaults(run=run)


def add_model_flags(
    parser: argparse.ArgumentParser,
    *,
    workers: str = "thread",
    model_action: str | type[argparse.Action] = "store",
    required: bool = True,
) -> None:
    """What says which model runs, and in which stages; ``workers`` run them by default."""
    model = parser.add_argument_group("model and stages")
    model.add_argument(
        "-m", "--model", required=required, type=Path, metavar="DIR", action=model_action
    )
    add_type_flags(model)
    add_stage_flags(model)
    add_tensor_flags(model)
    add_rank_flags(model)
    model.add_argument(
        "--pp-workers",
        default=workers,
        choices=["thread", "process"],
        help=f"what runs a stage; processes are faster ({workers})",
    )
    model.add_argument(
        "--blas",
        default="auto",
        metavar="auto|wheel|PATH",
        help="matrix library of worker processes on Linux CPUs (auto: a system OpenBLAS)",
    )
    model.add_argument(
        "--pp-micro-batch-size",
        default="auto",
        metavar="N",
        help="sequences that go through the stages together (auto: as many groups as stages)",
    )
    model.add_argument(
        "--prefill-chunk-size", type=int, default=512, metavar="N", help="prompt tokens a step"
    )
    model.add_argument(
        "--pp-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest wait for a stage (600)",
    )
    add_no_plugin(parser)
    # For tests: every hand-over between stages goes through the wire format.
    model.add_argument("--pp-wire", action="store_true", help=argparse.SUPPRESS)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """What says how tokens are drawn."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("-n", "--max-tokens", type=int, default=100, metavar="N")
    sampling.add_argument(
        "--ctx-size",
        type=int,
        metavar="N",
        help="tokens of a prompt and its answer together (the model's)",
    )
    sampling.add_argument("--temp", type=float, default=0.0, help="0 is greedy (0)")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0, help="0 is off (0)")
    sampling.add_argument("--min-p", type=float, default=0.0)
    sampling.add_argument("--seed", type=int, help="same seed, same tokens (drawn)")


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, or raises what went wrong."""
    from mlxcel.cli.local_model import open_local_model, run_local_model
    from mlxcel.cli.serve import context_notices
    from mlxcel.engine.generation import Generation
    from mlxcel.engine.pipeline_report import pipeline_report
    from mlxcel.engine.results import collect
    from mlxcel.engine.slot import credits_for, micro_batch_size
    from mlxcel.family.batching import Batching
    from mlxcel.stage.blas import choose_blas

    _check(args)
    blas = choose_blas(args.blas, workers=args.pp_workers)
    model = open_local_model(args, blas)
    requests = _requests(args, model, _prompts(args))
    stages = len(model.plan.stages)
    rows = micro_batch_size(len(requests), stages, micro_batch(args.pp_micro_batch_size))
    for notice in (*model.notices, *context_notices(args, model), blas.notice):
        print(notice, file=sys.stderr)
    bars = LoadingBars()
    credits = credits_for(len(requests), stages, rows)
    with run_local_model(args, model, blas)(credits=credits, on_progress=bars) as pipeline:
        bars.close()
        if args.verbose:
            print(quality(model, pipeline), file=sys.stderr)
        generation = Generation(
            pipeline,
            requests,
            end_tokens=model.tokenizer.eos_ids,
            rows=rows,
            chunk=args.prefill_chunk_size,
            batching=model.batching if rows > 1 else Batching.PADDED,
        )
        output: Output = JsonOutput() if args.json else TextOutput(len(requests))
        results = collect(generation, requests, model.tokenizer, output.text, output.result)
        output.end(results, pipeline_report(model.plan, pipeline.stop(), len(generation.slots)))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse values that mean nothing, naming the flag."""
    chunk, timeout, seed = args.prefill_chunk_size, args.pp_timeout, args.seed or 0
    bounds = [
        ("-n/--max-tokens", args.max_tokens, args.max_tokens >= 1, "1 or more"),
        ("--ctx-size", args.ctx_size, args.ctx_size is None or args.ctx_size >= 1, "1 or more"),
        ("--prefill-chunk-size", chunk, chunk >= 1, "1 or more"),
        ("--temp", args.temp, 0 <= args.temp < float("inf"), "0 or more"),
        ("--top-p", args.top_p, 0 < args.top_p <= 1, "a value above 0 and up to 1"),
        ("--top-k", args.top_k, args.top_k >= 0, "0 (off) or more"),
        ("--min-p", args.min_p, 0 <= args.min_p <= 1, "a value from 0 to 1"),
        ("--seed", seed, -(1 << 63) <= seed < 1 << 63, "an integer of 64 bits"),
        ("--pp-timeout", timeout, 0 < timeout <= LONGEST_WAIT, "seconds, up to a million"),
        ("--pp-size", args.pp_size, args.pp_size is None or args.pp_size >= 1, "1 or more"),
    ]
    check_bounds(bounds)


def micro_batch(text: str) -> int | None:
    """The value of ``--pp-micro-batch-size``; None is auto.

    Raises:
        UsageError: It is neither a number nor auto.
    """
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"--pp-micro-batch-size {text} is neither a number nor auto.",
            "Give a number of sequences, or auto.",
        ) from None


def _prompts(args: argparse.Namespace) -> list[str]:
    """The prompts in the order: -p as given, then --prompt-file."""
    if args.prompt.count("-") > 1:
        raise UsageError("-p - is given twice.", "Standard input can be read once only.")
    prompts = [sys.stdin.read() if text == "-" else text for text in args.prompt]
    for file in args.prompt_file:
        try:
            prompts.append(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--prompt-file {file} cannot be read ({error}).", "Give a UTF-8 text file."
            ) from error
    if not prompts:
        raise UsageError("There is no prompt.", "Give -p TEXT, --prompt-file FILE or -p -.")
    return prompts


def _requests(args: argparse.Namespace, model: Model, prompts: Sequence[str]) -> list[Request]:
    from mlxcel.engine.slot import Request
    from mlxcel.pipeline.operations import Sampling

    seed = secrets.randbits(63) if args.seed is None else args.seed
    sampling = Sampling(args.temp, args.top_p, args.top_k, args.min_p, seed)
    requests = []
    for index, text in enumerate(prompts):
        tokens = _encode(args, model, text)
        if not tokens:
            raise UsageError(f"Prompt {index} is empty.", "Give at least one character.")
        model.check_tokens(tokens)
        most = _room(index, len(tokens), args.max_tokens, args.ctx_size or model.context_size)
        requests.append(Request(index, tuple(tokens), most, sampling))
    return requests


def _room(index: int, tokens: int, wanted: int, context: int | None) -> int:
    """How many tokens a prompt of so many may get: what is wanted, or what the context leaves.

    Raises:
        UsageError: It leaves none.
    """
    if context is None or tokens + wanted <= context:
        return wanted
    if tokens >= context:
        raise UsageError(
            f"Prompt {index} has {tokens} tokens, and the context holds {context}, prompt and "
            f"answer together.",
            "Give a shorter prompt, or a longer --ctx-size if the model can do more.",
        )
    left = context - tokens
    print(
        f"prompt {index}: {left} tokens at most, not {wanted}: the context holds {context}",
        file=sys.stderr,
    )
    return left


def _encode(args: argparse.Namespace, model: Model, text: str) -> list[int]:
    """The token ids of a prompt: through the chat template unless there is none."""
    tokenizer = model.tokenizer
    if args.no_chat_template or not (tokenizer.has_chat_template or args.chat):
        if args.system is not None:
            raise UsageError(
                "--system needs a chat template.",
                "Leave --no-chat-template out, or choose a checkpoint that has one.",
            )
        return tokenizer.encode(text)
    if not tokenizer.has_chat_template:
        raise UsageError(
            f"--chat: {model.checkpoint.path} has no chat template.",
            "Leave --chat out to give the prompt to the model as it is.",
        )
    messages = [{"role": "user", "content": text}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return tokenizer.encode_chat(messages)

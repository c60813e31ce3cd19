"""``mlxcel generate`` as a user runs it, on tiny checkpoints."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from mlxcel.cli.main import run
from mlxcel.testing.tiny import names
from mlxcel.testing.tiny.builder import RECIPES

FIELDS = (
    "index", "text", "tokens", "finish_reason",
    "prompt_tokens", "generation_tokens", "prompt_tps", "generation_tps",
)  # fmt: skip
PROMPTS = ("Hello, world!", "a", "The quick brown fox jumps over it.")


@attrs.frozen
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()[:-1]]

    @property
    def last(self) -> dict[str, Any]:
        last: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return last

    @property
    def tokens(self) -> list[list[int]]:
        assert self.code == 0, self.err
        return [result["tokens"] for result in self.results]


Command = Callable[..., Done]


@pytest.fixture
def generate(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command on a tiny Llama, or on ``model``."""

    def call(*flags: str, model: Path | None = None) -> Done:
        capsys.readouterr()
        code = run(["generate", "-m", str(model or tiny("llama")), *flags])
        return Done(code, *capsys.readouterr())

    return call


def prompts(*texts: str) -> list[str]:
    return [flag for text in texts for flag in ("-p", text)]


RAW = ("--json", "--no-chat-template", "-n", "8")


def test_json(generate: Command) -> None:
    """One object a line per prompt in their order, then one for the stages."""
    done = generate(*RAW, *prompts(*PROMPTS), "--pp-size", "2")
    assert (done.code, len(done.out.splitlines())) == (0, 4)
    for index, (text, result) in enumerate(zip(PROMPTS, done.results, strict=True)):
        assert tuple(result) == FIELDS
        assert (result["index"], result["prompt_tokens"]) == (index, len(text))
        assert (result["generation_tokens"], result["finish_reason"]) == (8, "length")
        assert len(result["tokens"]) == 8
        assert result["prompt_tps"] > 0
        assert result["generation_tps"] > 0
    stages = done.last["stages"]
    assert [(stage["stage"], stage["layers"]) for stage in stages] == [(0, "0-2"), (1, "3-5")]
    for stage in stages:
        assert set(stage) >= {"bytes", "busy", "bubble"}
        assert stage["busy"] + stage["bubble"] == pytest.approx(1)
        assert 0 < stage["busy"] <= 1


def test_json_is_all_there_is_on_stdout(generate: Command) -> None:
    """Notices and the plan go to standard error."""
    done = generate(*RAW, *prompts("abc"), "--verbose", "--no-plugin", "no-such-plugin")
    for line in done.out.splitlines():
        json.loads(line)
    assert "activations: float32 (as stored)" in done.err
    assert done.err.count("no-such-plugin") == 1
    assert "pipeline partition quality: 1 stages" in done.err
    assert "drift=+0.0%" in done.err


def test_text_of_one_prompt(generate: Command) -> None:
    """The text as --json has it, then a line with speeds and bubbles."""
    text = generate(*RAW, *prompts("Hello")).results[0]["text"]
    done = generate("--no-chat-template", "-n", "8", *prompts("Hello"), "--pp-size", "2")
    body, summary = done.out[: len(text)], done.out[len(text) :]
    assert body == text
    assert re.fullmatch(
        r"\nprompt: 5 tokens, [\d.]+ tok/s; generation: 8 tokens, [\d.]+ tok/s; "
        r"bubble: [\d.]+% measured, 50\.0% expected\n",
        summary,
    )


def test_text_of_several_prompts(generate: Command) -> None:
    """Each under its heading, in the order of the prompts, whichever finishes first."""
    texts = [result["text"] for result in generate(*RAW, *prompts(*PROMPTS)).results]
    done = generate("--no-chat-template", "-n", "8", *prompts(*PROMPTS))
    expected = "".join(f"==> prompt {i} <==\n{text}\n" for i, text in enumerate(texts))
    assert done.out.startswith(expected)
    assert done.out.removeprefix(expected).startswith("prompt: 48 tokens")


def test_prompts_from_everywhere(
    generate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-p as given, - from standard input, then the files."""
    file = tmp_path / "prompt.txt"
    file.write_text("from a file", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin!!"))
    done = generate(*RAW, "--prompt-file", str(file), *prompts("abc", "-", "defgh"))
    assert [result["prompt_tokens"] for result in done.results] == [3, 12, 5, 11]


def test_a_file_that_cannot_be_read(generate: Command, tmp_path: Path) -> None:
    """Missing files and files that are no text are named with the flag."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary"):
        done = generate(*RAW, "--prompt-file", str(tmp_path / name))
        assert done.code == 2
        assert f"--prompt-file {tmp_path / name}" in done.err


def test_the_chat_template_is_the_default(generate: Command) -> None:
    """A checkpoint with a template gets its prompts through it; --chat changes nothing then."""
    flags = ("--json", "-n", "4", *prompts("Hello"))
    plain, chat, demanded = (
        generate(*flags, *more) for more in (["--no-chat-template"], [], ["--chat"])
    )
    assert plain.results[0]["prompt_tokens"] == 5
    # <|bos|><|user|>Hello<|eos|><|assistant|>
    assert chat.results[0]["prompt_tokens"] == 1 + 1 + 5 + 1 + 1
    assert demanded.tokens == chat.tokens != plain.tokens


def test_a_system_message(generate: Command) -> None:
    """It stands before the prompt, through the template."""
    done = generate("--json", "-n", "4", *prompts("Hello"), "--system", "Be brief.")
    assert done.results[0]["prompt_tokens"] == 9 + 1 + len("Be brief.") + 1


@pytest.fixture
def no_template(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint without a chat template."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "plain")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    return folder


def test_without_a_template(generate: Command, no_template: Path) -> None:
    """The prompt goes in as it is; what needs a template is refused."""
    done = generate("--json", "-n", "4", *prompts("Hello"), model=no_template)
    assert done.results[0]["prompt_tokens"] == 5
    for flags, reason in ((["--chat"], "--chat: "), (["--system", "x"], "--system needs")):
        done = generate(*prompts("Hello"), *flags, model=no_template)
        assert (done.code, done.out) == (2, "")
        assert reason in done.err


def test_no_template_and_a_system_message(generate: Command) -> None:
    """--no-chat-template leaves no place for --system."""
    done = generate(*prompts("Hello"), "--no-chat-template", "--system", "x")
    assert done.code == 2
    assert "--system needs a chat template" in done.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--pp-size", "7"], "7 stages are more than the 6 layers"),
        (["--pp-size", "3", "--pp-layers", "0-2,3-5"], "--pp-size 3 disagrees with the 2 ranges"),
        (["--pp-layers", "0-3,3-5"], "comes earlier too"),
        (["--pp-layers", "0-1,3-5"], "layer 2 is missing"),
        (["--pp-layers", "0-2"], "layers 3-5 are missing"),
        (["--pp-layers", "0-6"], "no layer 6"),
        (["--pp-layers", "a-b"], "is no range"),
        (["--pp-size", "0"], "--pp-size 0"),
        (["-n", "0"], "--max-tokens 0"),
        (["--temp", "-1"], "--temp -1.0"),
        (["--temp", "nan"], "--temp nan"),
        (["--top-p", "0"], "--top-p 0.0"),
        (["--top-p", "1.5"], "--top-p 1.5"),
        (["--top-k", "-1"], "--top-k -1"),
        (["--min-p", "2"], "--min-p 2.0"),
        (["--seed", str(1 << 64)], "--seed"),
        (["--prefill-chunk-size", "0"], "--prefill-chunk-size 0"),
        (["--pp-timeout", "0"], "--pp-timeout 0"),
        (["--pp-timeout", "inf"], "--pp-timeout inf"),
        (["--pp-micro-batch-size", "0"], "--pp-micro-batch-size 0"),
        (["--pp-micro-batch-size", "many"], "--pp-micro-batch-size many"),
        (["-p", ""], "is empty"),
        (["-p", "-", "-p", "-"], "-p - is given twice"),
    ],
    ids=" ".join,
)
def test_what_can_never_work(generate: Command, flags: list[str], reason: str) -> None:
    """Impossible requests are refused with 2, in one line that names the flag."""
    done = generate("-p", "Hello", "--no-chat-template", *flags)
    assert (done.code, done.out) == (2, "")
    assert reason in done.err
    assert done.err.count("mlxcel: error: ") == 1
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    "flags",
    [["--chat", "--no-chat-template"], ["--dtype", "int8"], ["--pp-balance", "luck"], ["-n", "x"]],
    ids=" ".join,
)
def test_what_cannot_be_parsed(generate: Command, flags: list[str]) -> None:
    """Values that a flag does not have are usage errors."""
    with pytest.raises(SystemExit) as stop:
        generate("-p", "Hello", *flags)
    assert stop.value.code == 2


def test_the_context_is_full(generate: Command) -> None:
    """A prompt gets as many tokens as the context leaves; one that leaves none is refused."""
    done = generate(*RAW, *prompts("x" * 508))
    assert [len(tokens) for tokens in done.tokens] == [4]
    assert done.results[0]["finish_reason"] == "length"
    assert "prompt 0: 4 tokens at most, not 8: the context holds 512" in done.err
    done = generate(*RAW, *prompts("Hello", "x" * 512))
    assert done.code == 2
    assert "Prompt 1 has 512 tokens, and the context holds 512" in done.err


def test_another_context(generate: Command) -> None:
    """``--ctx-size`` counts instead of the model's own, whether it is less or more."""
    done = generate(*RAW, "--ctx-size", "10", *prompts("x" * 7))
    assert [len(tokens) for tokens in done.tokens] == [3]
    done = generate(*RAW, "--ctx-size", "600", *prompts("x" * 512))
    assert [len(tokens) for tokens in done.tokens] == [8]
    assert "--ctx-size 600 is more than the 512 tokens that the model was made for" in done.err


def test_no_prompt(generate: Command) -> None:
    """Without any prompt there is nothing to do."""
    done = generate("--json")
    assert done.code == 2
    assert "There is no prompt" in done.err


def test_a_cut_through_a_group(generate: Command, tiny: Callable[..., Path]) -> None:
    """Ranges that separate a layer from the one whose keys it reads name both, and the way out."""
    done = generate("-p", "x", "--pp-layers", "0-4,5-7", model=tiny("gemma4"))
    assert (done.code, done.out) == (2, "")
    assert "source layer 3 and consumer layer 5" in done.err
    assert "begin a stage at layer 2" in done.err
    assert "activations" not in done.err, "refused before anything loads"


@pytest.mark.parametrize("problem", ["no folder", "no tokenizer", "no family"])
def test_a_model_that_cannot_be_read(
    generate: Command, tiny: Callable[..., Path], tmp_path: Path, problem: str
) -> None:
    """What is wrong with the checkpoint is said in one line with its path."""
    folder = tmp_path / "model"
    flags = []
    if problem != "no folder":
        shutil.copytree(tiny("llama"), folder)
    if problem == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    if problem == "no family":
        flags = ["--no-plugin", "llama"]
    done = generate("-p", "x", *flags, model=folder)
    assert done.code == (2 if problem == "no family" else 1)
    assert str(folder) in done.err or "model_type 'llama'" in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    "flags",
    [
        ["--pp-size", "2"],
        ["--pp-size", "3"],
        ["--pp-size", "6", "--pp-balance", "time"],
        ["--pp-size", "2", "--pp-balance", "time:prefill"],
        ["--pp-layers", "0,1-5"],
        ["--pp-size", "3", "--pp-wire"],
        ["--prefill-chunk-size", "1"],
        ["--pp-size", "2", "--prefill-chunk-size", "4"],
        ["--pp-size", "3", "--pp-micro-batch-size", "1"],
        ["--pp-size", "3", "--pp-micro-batch-size", "16", "--pp-wire"],
        ["--tp-size", "2"],
        ["--pp-size", "2", "--tp-size", "2", "--pp-wire"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("sampling", ["greedy", "drawn"])
def test_the_same_tokens_on_every_split(generate: Command, sampling: str, flags: list[str]) -> None:
    """Stages, chunks, batches and the wire format change nothing in float32, drawn or not."""
    drawn = ["--temp", "0.9", "--top-p", "0.95", "--seed", "42"] if sampling == "drawn" else []
    common = [*RAW, *prompts(*PROMPTS), *drawn]
    assert generate(*common, *flags).tokens == generate(*common).tokens


def test_seeds(generate: Command) -> None:
    """A seed fixes the tokens; another seed, or none, draws others."""
    flags = [*RAW, "-n", "24", *prompts("Hello"), "--temp", "1.5"]
    first, again, other, none, another = (
        generate(*flags, *more).tokens
        for more in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], [], [])
    )
    assert first == again
    assert len({str(tokens) for tokens in (first, other, none, another)}) == 4


def test_filters_reach_the_sampler(generate: Command) -> None:
    """A hot draw through the narrowest filter is greedy."""
    greedy = generate(*RAW, *prompts(*PROMPTS)).tokens
    for narrow in (["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1"]):
        hot = generate(*RAW, *prompts(*PROMPTS), "--temp", "9", "--seed", "1", *narrow)
        assert hot.tokens == greedy


@pytest.mark.parametrize("quantize", [None, "4:32"])
# An untied model without a head is refused, by mlxcel as by mlx-lm.
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in names()
        if name.startswith(("llama", "gemma4"))
        and name != "llama_untied_headless"  # refused: it lacks the head that its config promises
    ],
)
def test_parity_with_mlx_lm(
    generate: Command, tiny: Callable[..., Path], name: str, quantize: str | None
) -> None:
    """One process gives the greedy tokens that mlx-lm gives on the same checkpoint."""
    path = tiny(name, quantize=quantize)
    model, _ = load_model(path, model_config=dict(RECIPES[name].model_config))
    prompt = mx.array(list(PROMPTS[2].encode()))
    expected = [int(token) for token, _ in generate_step(prompt, model, max_tokens=12)]
    done = generate(*RAW, "-n", "12", *prompts(PROMPTS[2]), "--dtype", "float32", model=path)
    [tokens] = done.tokens
    assert tokens == expected[: len(tokens)]
    assert len(tokens) == 12 or expected[len(tokens)] == 257, "only the end token ends it"

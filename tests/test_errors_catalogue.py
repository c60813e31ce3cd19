"""Every row of docs/errors.md is provoked, and says what it promises."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
from aiohttp import web

from mlxcel.cli import fetch_demo_model
from mlxcel.cli.main import run
from mlxcel.cluster.addresses import Address, parse_addresses
from mlxcel.cluster.beacon import Beacon
from mlxcel.cluster.discovery import Found
from mlxcel.pipeline.processes import ProcessPipeline
from mlxcel.testing.survey.model import build

DOCUMENT = Path(__file__).parents[1] / "docs" / "errors.md"
ERROR = "mlxcel: error: "
Q_PROJ = "model.layers.3.self_attn.q_proj"

SAID_BEFORE = (
    "activations:",
    "weights:",
    "decode path:",
    "BLAS:",
    "fetching ",
    "listening on ",
    "waiting for ",
    *("Cluster: ", "TP size: ", "Nodes (", "- "),
)
"""How lines begin that a command prints before it starts the work."""


@attrs.frozen
class Row:
    """One row of the catalogue; ``text`` has <placeholders>."""

    text: str
    exit_code: int

    @property
    def pattern(self) -> re.Pattern[str]:
        """What a line begins with that says the same."""
        parts = re.split(r"<[^>]+>", self.text)
        return re.compile(".+?".join(map(re.escape, parts)))


def rows_of(document: str) -> Iterator[Row]:
    """The rows with four columns whose first is in backticks."""
    for line in document.splitlines():
        if found := re.fullmatch(r"\| `([^`]+)` \| [^|]+ \| [^|]+ \| (\d) \|", line):
            yield Row(found[1], int(found[2]))


ROWS = tuple(rows_of(DOCUMENT.read_text(encoding="utf-8")))


def is_notice(line: str) -> bool:
    notices = [row for row in ROWS if row.exit_code == 0]
    return line.startswith(SAID_BEFORE) or any(row.pattern.match(line) for row in notices)


# How each row is provoked: a function that damages something and returns a command line.


@attrs.frozen
class World:
    """What a provocation may use; ``site`` is a folder on the path to install plugins into."""

    tmp_path: Path
    tiny: Callable[..., Path]
    make_site: Callable[[str], Any]
    monkeypatch: pytest.MonkeyPatch
    sockets: contextlib.ExitStack
    answering: Callable[[Any], str]

    def occupy(self, kind: int, *, listen: bool = False) -> int:
        """The number of a port that another program has until the test is over."""
        sock = self.sockets.enter_context(socket.socket(socket.AF_INET, kind))
        sock.bind(("127.0.0.1", 0))
        if listen:
            sock.listen()
        port: int = sock.getsockname()[1]
        return port

    def copy(self, name: str = "llama", **options: Any) -> Path:
        """A tiny checkpoint that may be damaged."""
        return Path(shutil.copytree(self.tiny(name, **options), self.tmp_path / "model"))

    def altered(
        self,
        name: str = "llama",
        change: Callable[[dict[str, mx.array]], dict[str, mx.array]] = lambda weights: weights,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> Path:
        """A copy with other weights, in one file without an index, and other settings."""
        folder = self.copy(name, **options)
        file = folder / "model.safetensors"
        weights = change(dict(mx.load(str(file))))  # type: ignore[arg-type]
        mx.save_safetensors(str(file), weights, {"format": "mlx"})
        (folder / "model.safetensors.index.json").unlink()
        return configured(folder, **config or {})

    def site(self) -> Any:
        """A site whose plugins worker processes find too."""
        site = self.make_site("site")
        self.monkeypatch.setenv("PYTHONPATH", str(site.path), prepend=":")
        return site


Provocation = Callable[[World], list[str]]
PROVOCATIONS: dict[str, Provocation] = {}


def provokes(text: str) -> Callable[[Provocation], Provocation]:
    def register(function: Provocation) -> Provocation:
        assert text not in PROVOCATIONS, text
        PROVOCATIONS[text] = function
        return function

    return register


def generate(folder: Path, *flags: str) -> list[str]:
    prompt = () if {"-p", "--prompt-file", "--no-prompt"} & set(flags) else ("-p", "hi")
    kept = [flag for flag in flags if flag != "--no-prompt"]
    return ["generate", "-m", str(folder), "-n", "2", *prompt, *kept]


def configured(folder: Path, **settings: Any) -> Path:
    """Change config.json; None removes a setting."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def with_config(world: World, **settings: Any) -> list[str]:
    return generate(configured(world.copy(), **settings))


def with_header(world: World, change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[str]:
    """The weights with an altered header, the index gone."""
    folder = world.altered()
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8 : 8 + length]))).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    return generate(folder)


def index_of(folder: Path, change: Callable[[dict[str, str]], dict[str, str] | None]) -> Path:
    """Rewrite the weight_map of the index."""
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = change(index["weight_map"])
    file.write_text(json.dumps(index))
    return folder


def without(*names: str) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
    return lambda weights: {k: v for k, v in weights.items() if k not in names}


# The model's folder and config.json


@provokes("<path>: does not exist.")
def _(world: World) -> list[str]:
    return generate(world.tmp_path / "nowhere")


@provokes("<path>: does not exist; it looks like a hub's model id")
def _(world: World) -> list[str]:
    return generate(Path("somebody/some-model"))


@provokes("<file>: is not a checkpoint folder.")
def _(world: World) -> list[str]:
    (world.tmp_path / "model.gguf").write_bytes(b"GGUF")
    return generate(world.tmp_path / "model.gguf")


@provokes("<folder>: has no config.json.")
def _(world: World) -> list[str]:
    return generate(world.tmp_path)


@provokes("<file>: cannot be read")
def _(world: World) -> list[str]:
    folder = world.copy()
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").mkdir()
    return generate(folder)


@provokes("<file>: is not JSON")
def _(world: World) -> list[str]:
    folder = world.copy()
    (folder / "config.json").write_text('{"model_type": ')
    return generate(folder)


@provokes("<file>: holds no JSON object.")
def _(world: World) -> list[str]:
    folder = world.copy()
    (folder / "config.json").write_text("[]")
    return generate(folder)


@provokes("<file>: has no model_type, so its architecture is unknown.")
def _(world: World) -> list[str]:
    return with_config(world, model_type=None)


@provokes("<file>: num_hidden_layers <found>, not a count from 1 to 10000.")
def _(world: World) -> list[str]:
    return with_config(world, num_hidden_layers=None)


@provokes("<file>: has no '<field>', which a model of type '<model_type>' needs.")
def _(world: World) -> list[str]:
    return with_config(world, hidden_size=None)


@provokes("<file>: no '<model_type>' model can be built from it")
def _(world: World) -> list[str]:
    return with_config(world, num_attention_heads=0)


@provokes("<file>: asks to build the model with its own program")
def _(world: World) -> list[str]:
    return with_config(world, model_file="model.py")


@provokes("<file>: eos_token_id is <value>, neither a token id nor a list of them.")
def _(world: World) -> list[str]:
    return with_config(world, eos_token_id="</s>")


@provokes("<file>: quantization has the unknown mode '<mode>'")
def _(world: World) -> list[str]:
    return with_config(world, quantization={"mode": "zip4"})


@provokes(
    "<file>: quantization has <bits> bits in groups of <size>, which MLX has no <mode> kernel for."
)
def _(world: World) -> list[str]:
    return with_config(world, quantization={"bits": 7, "group_size": 64})


@provokes("<file>: quantization overrides '<name>' and '<name>' disagree")
def _(world: World) -> list[str]:
    overrides = {"model.layers.0.mlp": {"bits": 4}, "layers.0.mlp": {"bits": 8}}
    return with_config(world, quantization={"bits": 4, "group_size": 64, **overrides})


@provokes("<file>: asks for quantized activations (quantize_activations is true)")
def _(world: World) -> list[str]:
    return with_config(world, quantization={"mode": "mxfp8"}, quantize_activations=True)


@provokes(
    "<file>: the weights are packed by '<tool>' (<tensor> in <file>), which is not read for a "
    "model of type '<model_type>'."
)
def _(world: World) -> list[str]:
    def pack(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
        return {**tensors, f"{Q_PROJ}.weight.absmax": mx.ones((4,))}

    folder = world.altered(change=pack)
    return generate(configured(folder, quantization_config={"quant_method": "bitsandbytes"}))


@provokes("<folder>: its <tool> tensors have group indices (<tensor> in <file>)")
def _(world: World) -> list[str]:
    indices = {f"{Q_PROJ}.g_idx": mx.zeros((64,), mx.int32)}
    folder = world.altered(change=lambda tensors: {**tensors, **indices})
    return generate(configured(folder, quantization_config={"quant_method": "gptq"}))


@provokes("<folder>: its <tool> tensors cannot be repacked for MLX")
def _(world: World) -> list[str]:
    return with_config(world, quantization_config={"quant_method": "awq"})


@provokes("<file>: the compressed-tensors format '<format>' cannot be read")
def _(world: World) -> list[str]:
    settings = {"quant_method": "compressed-tensors", "format": "marlin-24"}
    return with_config(world, quantization_config=settings)


@provokes("<file>: has no quantization settings, but the weight files hold <n> quantized matrices")
def _(world: World) -> list[str]:
    folder = world.copy(quantize="4:32")
    return generate(configured(folder, quantization=None, quantization_config=None))


# Weight files


@provokes("<folder>: holds no model weights in safetensors format.")
def _(world: World) -> list[str]:
    folder = world.copy()
    for file in folder.glob("model.safetensors*"):
        file.unlink()
    return generate(folder)


@provokes("<folder>: lacks <files>. The download is probably incomplete")
def _(world: World) -> list[str]:
    folder = world.copy(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    return generate(folder)


@provokes("<folder>: holds <files>, which is not one complete set of shards.")
def _(world: World) -> list[str]:
    folder = world.copy(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    return generate(folder)


@provokes("<index>: has no weight_map.")
def _(world: World) -> list[str]:
    return generate(index_of(world.copy(), lambda placed: None))


@provokes("<index>: names '<name>', which is no safetensors file of this folder.")
def _(world: World) -> list[str]:
    elsewhere = "../other/model.safetensors"
    return generate(index_of(world.copy(), lambda placed: dict.fromkeys(placed, elsewhere)))


@provokes("<file>: lacks the tensor '<name>' that model.safetensors.index.json places there.")
def _(world: World) -> list[str]:
    more = {"model.layers.9.mlp.up_proj.weight": "model.safetensors"}
    return generate(index_of(world.copy(), lambda placed: placed | more))


@provokes("<file>: holds the tensor '<name>', and so does <file>.")
def _(world: World) -> list[str]:
    folder = world.copy()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shutil.copy(
        folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    )
    return generate(folder)


@provokes("<file>: is cut short by <n> bytes.")
def _(world: World) -> list[str]:
    folder = world.copy()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return generate(folder)


@provokes("<file>: is cut short by at least <n> bytes.")
def _(world: World) -> list[str]:
    folder = world.copy()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    return generate(folder)


@provokes("<file>: is no safetensors file: it claims a header of <n> bytes.")
def _(world: World) -> list[str]:
    folder = world.copy()
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(range(100)))
    return generate(folder)


@provokes("<file>: has a malformed safetensors header")
def _(world: World) -> list[str]:
    def lying(header: dict[str, Any]) -> dict[str, Any]:
        header["model.norm.weight"]["shape"] = [1 << 40]
        return header

    return with_header(world, lying)


@provokes("<file>: is a Git LFS pointer, not the weights.")
def _(world: World) -> list[str]:
    folder = world.copy()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
    (folder / "model.safetensors").write_text(pointer)
    return generate(folder)


@provokes("<file>: MLX cannot read it")
def _(world: World) -> list[str]:
    def four_bits(header: dict[str, Any]) -> dict[str, Any]:
        entry = header["lm_head.weight"]
        entry["dtype"], entry["shape"] = "F4", [entry["shape"][0], 8 * entry["shape"][1]]
        return header

    return with_header(world, four_bits)


@provokes("<folder>: config.json promises <n> layers, but there are no tensors of <layers>.")
def _(world: World) -> list[str]:
    return with_config(world, num_hidden_layers=8)


@provokes("<folder>: config.json says that the output projection is a matrix of its own")
def _(world: World) -> list[str]:
    return generate(world.altered("deepseek_v3", without("lm_head.weight")))


@provokes("<folder>: the stage of <layers> lacks <tensors>.")
def _(world: World) -> list[str]:
    return generate(world.altered(change=without(f"{Q_PROJ}.weight")), "--pp-size", "2")


@provokes("<folder>: <tensor> has shape <shape>, config.json asks for <shape>.")
def _(world: World) -> list[str]:
    return with_config(world, intermediate_size=96)


@provokes("<folder>: <tensors> are not part of a '<model_type>' model as config.json describes it.")
def _(world: World) -> list[str]:
    folder = world.altered("deepseek_v3")
    shutil.copy(world.tiny("llama") / "model.safetensors", folder)
    return generate(folder)


@provokes("<folder>: its tensors are not those of a '<model_type>' model")
def _(world: World) -> list[str]:
    expert = "model.layers.1.mlp.experts.1.up_proj.weight"
    return generate(world.altered("deepseek_v3", without(expert)))


@provokes("<folder>: <module> is packed in a way MLX does not know")
def _(world: World) -> list[str]:
    odd = {f"{Q_PROJ}.scales": mx.zeros((128, 3))}
    return generate(world.altered(change=lambda weights: weights | odd, quantize="4:32"))


# Choosing a family, a plugin or a type

UNSERVED = "no installed family serves model_type '<model_type>' (installed: <names>). "


@provokes(UNSERVED + "Install the package that does: pip install <package>")
def _(world: World) -> list[str]:
    known = {"not_installed": "mlxcel-family-not-installed"}
    world.monkeypatch.setattr("mlxcel.family.choose.known_distributions", lambda: known)
    return with_config(world, model_type="not_installed")


@provokes(UNSERVED + "Install a family plugin that does, or write one")
def _(world: World) -> list[str]:
    return [*with_config(world, model_type="never_heard_of"), "--no-plugin", "generic"]


@provokes(UNSERVED + "<package> would, but cannot be used.")
def _(world: World) -> list[str]:
    return generate(world.copy(), "--no-plugin", "llama")


@provokes("The family '<name>' can be planned but not run yet.")
def _(world: World) -> list[str]:
    world.site().family("alpha")
    module = world.tmp_path / "site" / "fake_family_alpha.py"
    source = module.read_text().replace("    api_version", "    runnable = False\n    api_version")
    module.write_text(source)
    return with_config(world, model_type="alpha")


@provokes("A model of type '<model_type>' cannot be split safely: <reason>.")
def _(world: World) -> list[str]:
    return generate(build("rwkv7", world.tmp_path / "rwkv7"))


UNUSABLE = "family plugin '<name>' of <distribution> cannot be used: "


@provokes(UNUSABLE + "<error>")
def _(world: World) -> list[str]:
    world.site().family("alpha", before="raise ImportError('no such library')")
    return with_config(world, model_type="alpha")


@provokes(UNUSABLE + "it was written for plugin API <version>, this mlxcel has <version>")
def _(world: World) -> list[str]:
    world.site().family("alpha", api_version="99.0")
    return with_config(world, model_type="alpha")


@provokes(UNUSABLE + "it is provided by <a> and <b>; uninstall all but one.")
def _(world: World) -> list[str]:
    site = world.site()
    site.family("alpha")
    site.family("alpha", distribution="another-alpha")
    return with_config(world, model_type="alpha")


@provokes(
    "family plugin '<name>' of <a> and <b> cannot be used: model_type '<model_type>' is claimed by"
)
def _(world: World) -> list[str]:
    site = world.site()
    site.family("alpha", model_types=("shared",))
    site.family("beta", model_types=("shared",))
    return with_config(world, model_type="shared")


@provokes("A plugin placed <n> stages where <n> were asked for.")
def _(world: World) -> list[str]:
    world.site().hooks(
        "placing",
        "@hookimpl\ndef mlxcel_place_stages(profile, stages, balance):\n    return (range(6),)\n",
    )
    return generate(world.copy(), "--pp-size", "2")


@provokes(
    "--dtype <dtype> cannot run this checkpoint: on a CPU, "
    "MLX's gather_mm multiplies unquantized experts in float32 only."
)
def _(world: World) -> list[str]:
    world.monkeypatch.setattr("mlxcel.engine.local._device", lambda: "cpu")
    return generate(world.copy("deepseek_v3"), "--dtype", "bfloat16")


@provokes("--weights dequantized makes float32 weights, not --dtype <dtype>.")
def _(world: World) -> list[str]:
    folder = world.copy(quantize="4:32")
    return generate(folder, "--weights", "dequantized", "--dtype", "bfloat16")


# Tokenizer, chat template and prompt


@provokes("<folder>: there is no tokenizer.json")
def _(world: World) -> list[str]:
    folder = world.copy()
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    return generate(folder)


@provokes("<file>: this is not a tokenizer")
def _(world: World) -> list[str]:
    folder = world.copy()
    (folder / "tokenizer.json").write_text("{")
    return generate(folder)


def with_tokenizer(world: World, change: Callable[[dict[str, Any]], None], *flags: str) -> Any:
    folder = world.copy()
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text())
    change(settings)
    file.write_text(json.dumps(settings))
    return generate(folder, *flags)


@provokes("<file>: makes the token id <id>, but the model knows <n> tokens.")
def _(world: World) -> list[str]:
    def one_more(settings: dict[str, Any]) -> None:
        last = settings["added_tokens"][-1]
        settings["added_tokens"].append({**last, "id": last["id"] + 1, "content": "<new>"})

    return with_tokenizer(world, one_more, "-p", "<new>")


@provokes("the tokenizer's decoder <parts> has a part (<part>) that mlxcel cannot stream.")
def _(world: World) -> list[str]:
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    return with_tokenizer(world, lambda settings: settings.update(decoder=decoder))


def with_template(world: World, template: str, *flags: str) -> list[str]:
    folder = world.copy()
    (folder / "chat_template.jinja").write_text(template)
    return generate(folder, *flags)


@provokes("<file>: chat_template is neither a string nor a list of {name, template}.")
def _(world: World) -> list[str]:
    folder = world.copy()
    (folder / "tokenizer_config.json").write_text('{"chat_template": 3}')
    return generate(folder)


@provokes("<file>: the chat template does not work:")
def _(world: World) -> list[str]:
    return with_template(world, "{% if %}")


@provokes("the model's chat template refuses these messages:")
def _(world: World) -> list[str]:
    template = "{{ raise_exception('I know no\nsystem role') }}"
    return with_template(world, template, "--system", "Be brief.")


def without_template(world: World, *flags: str) -> list[str]:
    folder = world.copy()
    (folder / "tokenizer_config.json").unlink()
    return generate(folder, *flags)


@provokes("--chat: <folder> has no chat template.")
def _(world: World) -> list[str]:
    return without_template(world, "--chat")


@provokes("--system needs a chat template.")
def _(world: World) -> list[str]:
    return without_template(world, "--system", "Be brief.")


@provokes("There is no prompt.")
def _(world: World) -> list[str]:
    return generate(world.copy(), "--no-prompt")


@provokes("Prompt <n> is empty.")
def _(world: World) -> list[str]:
    return without_template(world, "-p", "")


@provokes("Prompt <n> has <n> tokens, and the context holds <n>")
def _(world: World) -> list[str]:
    return without_template(world, "-p", "x" * 512)


@provokes("-p - is given twice.")
def _(world: World) -> list[str]:
    return generate(world.copy(), "-p", "-", "-p", "-")


@provokes("--prompt-file <file> cannot be read")
def _(world: World) -> list[str]:
    return generate(world.copy(), "--prompt-file", str(world.tmp_path / "nowhere.txt"))


# Stages and flags


def with_flags(*flags: str, name: str = "llama") -> Provocation:
    return lambda world: generate(world.tiny(name), *flags)


for _text, _flags in {
    "<n> stages are more than the <n> layers of the model.": ("--pp-size", "7"),
    "--pp-layers <ranges>: layer <n> is missing": ("--pp-layers", "0-1,3-5"),
    "--pp-layers <ranges>: there is no layer <n>.": ("--pp-layers", "0-1,2-6"),
    "--pp-layers <ranges>: stage <n> begins at layer <n>, which comes earlier too.": (
        *("--pp-layers", "0-2,2-5"),
    ),
    "--pp-layers '<text>': '<part>' is no range.": ("--pp-layers", "0-2,x"),
    "--pp-layers '<text>': '<part>' runs backwards.": ("--pp-layers", "0-2,5-3"),
    "--pp-size <n> disagrees with the <n> ranges of --pp-layers": (
        *("--pp-layers", "0-2,3-5", "--pp-size", "3"),
    ),
    "--pp-micro-batch-size <n> leaves a slot without a sequence.": (
        *("--pp-micro-batch-size", "0"),
    ),
    "--pp-micro-batch-size <text> is neither a number nor auto.": (
        *("--pp-micro-batch-size", "many"),
    ),
    "<flag> <value> is out of range.": ("--temp", "-1"),
    "<flag> has no effect: <reason>": ("--tp-workers", "process"),
    "--tp-size <n> cannot share the <parts> of <module>. Legal sizes: <sizes>.": (
        *("--tp-size", "3"),
    ),
    "--allow-mirrored-kv does not go with --tp-size <n>:": (
        *("--tp-size", "2", "--allow-mirrored-kv"),
    ),
    "--tp-workers process does not go with --pp-workers thread:": (
        *("--tp-size", "2", "--tp-workers", "process"),
    ),
}.items():
    provokes(_text)(with_flags(*_flags))

provokes("<n> stages are more than the <n> pieces that this model can be cut into:")(
    with_flags("--pp-size", "6", name="gemma4")
)
provokes("--tp-embedding-mode <mode> and --tp-lm-head-mode <mode> contradict each other:")(
    with_flags("--tp-size", "2", "--tp-lm-head-mode", "vocab_parallel", name="llama_tied")
)


@provokes("A model of type '<model_type>' cannot be split over ranks (--tp-size)")
def _(world: World) -> list[str]:
    return generate(build("gpt2", world.tmp_path / "model"), "--tp-size", "2")


provokes("--pp-layers: a stage that begins at layer <n> divides layers <range>:")(
    with_flags("--pp-layers", "0-4,5-7", name="gemma4")
)


@provokes("--blas <path> needs worker processes: a running process keeps its BLAS.")
def _(world: World) -> list[str]:
    return generate(world.copy(), "--blas", "/some/libopenblas.so.0")


@provokes("--blas <path>: there is no such file.")
def _(world: World) -> list[str]:
    library = str(world.tmp_path / "nowhere.so")
    return generate(world.copy(), "--blas", library, "--pp-workers", "process")


@provokes("--blas <path>: it cannot be loaded")
def _(world: World) -> list[str]:
    (world.tmp_path / "no-library.so").write_text("text")
    library = str(world.tmp_path / "no-library.so")
    return generate(world.copy(), "--blas", library, "--pp-workers", "process")


# Planning for a given memory


def plan(*flags: str, name: str = "llama") -> Provocation:
    return lambda world: ["plan", "-m", str(world.tiny(name)), *flags]


SHORT = "stage <n> (<device>) is <n> bytes short: layers <range> need <n> bytes"

for _text, _flags in {
    f"No division of the layers fits the memory; in the best one {SHORT}": ("--memory", "1KB"),
    SHORT: ("--pp-layers", "0-4,5", "--memory", "1KB,1GB"),
    "--memory gives <n> sizes for <n> stage(s).": ("--memory", "1GB,1GB"),
    "--memory of <n> bytes cannot be.": ("--memory", "0"),
    "--reserve of <n> bytes leaves nothing of --memory <n>.": (
        *("--memory", "1GB", "--reserve", "1GB"),
    ),
    "--reserve needs --memory.": ("--reserve", "1GB"),
    "--sequences needs --context.": ("--sequences", "2"),
    "<flag> '<text>' is no size.": ("--memory", "lots"),
}.items():
    provokes(_text)(plan(*_flags))


@provokes("The family '<name>' cannot be planned from config.json alone.")
def _(world: World) -> list[str]:
    world.site().family("alpha")
    return ["plan", "-m", str(configured(world.copy(), model_type="alpha") / "config.json")]


@provokes("The family '<name>' does not say what its layers keep of a sequence.")
def _(world: World) -> list[str]:
    world.site().family("alpha")
    folder = configured(world.copy(), model_type="alpha")
    return ["plan", "-m", str(folder), "--context", "100"]


# While it runs

FAULTY = """
class Executor:
    def __init__(self, spec):
        self.spec = spec

    def load(self, progress):
        {load}
        return 1

    def run(self, step):
        raise RuntimeError("an executor that cannot run")

    def requests(self, step):
        return ()

    def close(self):
        pass


@hookimpl
def mlxcel_build_executor(spec):
    return Executor(spec) if spec.index == 1 else None
"""


def with_executor(world: World, load: str, *flags: str) -> list[str]:
    """Two stages, the second one with an executor whose ``load`` is this statement."""
    world.site().hooks("faulty", FAULTY.format(load=load))
    return generate(world.copy(), "--pp-size", "2", *flags)


@provokes("stage <n> failed during a step: <cause>")
def _(world: World) -> list[str]:
    return with_executor(world, "pass")


@provokes("stage <n> failed during its work: <cause>")
def _(world: World) -> list[str]:
    return with_executor(world, "raise RuntimeError('an executor that cannot load')")


@provokes("stage <n> (process <pid>) died: <how>")
def _(world: World) -> list[str]:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    return with_executor(world, kill, "--pp-workers", "process")


@provokes("stage <n> (process <pid>) has given no sign of life for <n> s")
def _(world: World) -> list[str]:
    world.monkeypatch.setitem(ProcessPipeline.__init__.__kwdefaults__, "grace", 1.0)
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    return with_executor(world, stop, "--pp-workers", "process")


SLOW_RANK = """
import time

from mlxcel.plugins import Plugins
from mlxcel.stage.executor import FamilyExecutor


class Slow(FamilyExecutor):
    def run(self, step):
        time.sleep(3600)


@hookimpl
def mlxcel_build_executor(spec, collectives):
    family = Plugins.discover().load("family", spec.family)
    return Slow(spec, family, collectives) if spec.rank == 1 else None
"""


@provokes("<what> failed: <cause>. This is a bug in mlxcel")
def _(world: World) -> list[str]:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("a bug")

    world.monkeypatch.setattr("mlxcel.engine.service.Engine", broken)
    world.monkeypatch.setattr("threading.excepthook", lambda args: None)
    return ["serve", "-m", str(world.copy()), "--port", "0", "--pp-workers", "thread"]


@provokes("rank <n> of stage <n> is lost in <what>: <how>")
def _(world: World) -> list[str]:
    world.site().hooks("slow", SLOW_RANK)
    ranks = ["--pp-workers", "process", "--tp-size", "2", "--tp-workers", "process"]
    return generate(world.copy(), *ranks, "--tp-timeout", "1")


CUT_RANK = """
import socket

from mlxcel.plugins import Plugins
from mlxcel.stage.executor import FamilyExecutor


class Cut(FamilyExecutor):
    def run(self, step):
        stream = self.collectives._group._connections[0]._stream
        stream._sock.shutdown(socket.SHUT_RDWR)
        return super().run(step)


@hookimpl
def mlxcel_build_executor(spec, collectives):
    family = Plugins.discover().load("family", spec.family)
    return Cut(spec, family, collectives) if spec.rank == 1 else None
"""


@provokes("the connection between rank <n> and rank <n> of stage <n> broke: <how>")
def _(world: World) -> list[str]:
    world.site().hooks("cut", CUT_RANK)
    ranks = ["--pp-workers", "process", "--tp-size", "2", "--tp-workers", "process"]
    return generate(world.copy(), *ranks)


@provokes("stage <n> runs with <what> <version>, the others with <version>.")
def _(world: World) -> list[str]:
    spawn = ProcessPipeline._spawn

    def differently(self: Any, spec: Any, *sockets: Any) -> Any:
        if spec.index == 1:
            self._environment["MLXCEL_DISABLE_PLUGINS"] = "gemma4"
        return spawn(self, spec, *sockets)

    world.monkeypatch.setattr(ProcessPipeline, "_spawn", differently)
    return generate(world.copy(), "--pp-size", "2", "--pp-workers", "process")


@provokes("<who> did not answer within <n> s while waiting for <what>.")
def _(world: World) -> list[str]:
    hang = "import threading; threading.Event().wait()"
    return with_executor(world, hang, "--pp-workers", "process", "--pp-timeout", "0.5")


def serve(world: World, *flags: str) -> list[str]:
    return ["serve", "-m", str(world.tiny("llama")), "--port", "0", *flags]


@provokes("A stage lacks the cache memory for a single token: <figures>.")
def _(world: World) -> list[str]:
    return serve(world, "--kv-cache-budget", "1")


@provokes("the model's logits are not numbers")
def _(world: World) -> list[str]:
    return with_config(world, rope_theta=0)


@provokes("the output cannot be written")
def _(world: World) -> list[str]:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    world.monkeypatch.setattr("mlxcel.cli.plugins.run", full)
    world.monkeypatch.setattr("mlxcel.cli.main._discard_output", lambda: None)
    return ["plugins"]


@provokes("the server cannot listen on <host>, port <port>: <cause>.")
def _(world: World) -> list[str]:
    return serve(world, "--host", "192.0.2.1")  # kept for documents: nobody has this address


@provokes("--api-key is empty.")
def _(world: World) -> list[str]:
    return serve(world, "--api-key", " ")


@provokes("--api-key-file <file> cannot be read")
def _(world: World) -> list[str]:
    return serve(world, "--api-key-file", str(world.tmp_path / "nowhere"))


@provokes("--api-key-file <file> holds no key.")
def _(world: World) -> list[str]:
    (world.tmp_path / "keys").write_text("\n\n")
    return serve(world, "--api-key-file", str(world.tmp_path / "keys"))


@provokes("malformed wire data: <what>")
def _(world: World) -> list[str]:
    garbage = "import os, sys; os.write(int(sys.argv[1]), bytes([255]) * 64)"
    return with_executor(world, garbage, "--pp-workers", "process")


# Speaking to servers


def asking(world: World, body: str, status: int = 200) -> list[str]:
    """A load on a server that gives this answer to everything."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        models = request.path.endswith("/models") and status == 200
        return web.Response(text='{"data": []}' if models else body, status=status)

    return ["bench", "serve", "--url", world.answering(handler)]


@provokes("<url> cannot be reached: <cause>.")
def _(world: World) -> list[str]:
    port = world.occupy(socket.SOCK_STREAM)  # bound, but nobody listens
    return ["chat", "--url", f"http://127.0.0.1:{port}"]


@provokes("<url> answered with status <n>: <words>")
def _(world: World) -> list[str]:
    return asking(world, '{"error": {"message": "Two\\nlines."}}', status=503)


@provokes("<url> answered with an error amid the answer: <words>")
def _(world: World) -> list[str]:
    return asking(world, 'data: {"error": {"message": "Lost."}}\n\n')


@provokes("<url>: <problem>. Its own log may say why.")
def _(world: World) -> list[str]:
    return asking(world, "data: {}\n\n")


@provokes("<folder> has no chat template.")
def _(world: World) -> list[str]:
    folder = world.copy()
    (folder / "tokenizer_config.json").unlink()
    return ["chat", "-m", str(folder)]


for _text, _flags in {
    "<flag> <url> is no URL.": ("chat", "--url", "localhost:8080"),
    "mlxcel chat needs one model.": ("chat",),
    "There is no server to ask.": ("bench", "serve"),
    "--against <name> needs a model.": (
        *("bench", "serve", "--url", "http://localhost", "--against", "mlx-lm"),
    ),
    "--against and --compare exclude each other.": (
        *("bench", "serve", "-m", "x", "--against", "mlx-lm", "--compare", "http://localhost"),
    ),
    "<flags>: --url is not started here.": (
        *("bench", "serve", "--url", "http://localhost", "--", "--pp-size", "2"),
    ),
    "<flag> <text> is no length.": (
        *("bench", "serve", "--url", "http://localhost", "--prompt-length", "long"),
    ),
}.items():
    provokes(_text)(lambda world, command=_flags: list(command))


# Importing GGUF files and the demo model


def importing(world: World, data: bytes) -> list[str]:
    (world.tmp_path / "model.gguf").write_bytes(data)
    return ["import-gguf", str(world.tmp_path / "model.gguf"), str(world.tmp_path / "made")]


@provokes("<file>: is no GGUF file.")
def _(world: World) -> list[str]:
    return importing(world, b"no GGUF file")


@provokes("<file>: is a malformed GGUF file:")
def _(world: World) -> list[str]:
    return importing(world, b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16)


@provokes("<file> holds the architecture '<name>'.")
def _(world: World) -> list[str]:
    file = world.tmp_path / "model.gguf"
    mx.save_gguf(str(file), {"a": mx.zeros((2, 2))}, {"general.architecture": "mamba"})
    return importing(world, file.read_bytes())


@provokes("<folder> exists and is no earlier import.")
def _(world: World) -> list[str]:
    return ["import-gguf", str(world.tmp_path / "model.gguf"), str(world.copy())]


@provokes("<folder>: cannot be made: <package> could not be downloaded:")
def _(world: World) -> list[str]:
    script = ["sh", "-c", "printf 'no route\nto host' >&2; exit 1"]
    world.monkeypatch.setattr(fetch_demo_model, "_installer", lambda folder: script)
    return ["fetch-demo-model", str(world.tmp_path / "made")]


# Notices


@provokes("<index>: ignored, it is stale: none of the files it names is here")
def _(world: World) -> list[str]:
    return generate(index_of(world.copy(), lambda placed: dict.fromkeys(placed, "a.safetensors")))


@provokes("<folder>: not part of the model, ignored: <files>")
def _(world: World) -> list[str]:
    folder = world.copy()
    shutil.copy(folder / "model.safetensors", folder / "model-q4.safetensors")
    return generate(folder)


@provokes("<index>: does not list <tensors> of its files, used anyway")
def _(world: World) -> list[str]:
    return generate(index_of(world.copy(), lambda placed: dict(list(placed.items())[1:])))


@provokes("<folder>: the weights of <layers> are ignored: config.json describes <n> layers")
def _(world: World) -> list[str]:
    return with_config(world, num_hidden_layers=4)


@provokes(
    "<file>: mlx-lm's model of type '<model_type>' does not read <fields>; what it computes may "
    "differ from the original"
)
def _(world: World) -> list[str]:
    return with_config(world, sliding_window=8)


@provokes("<file>: quantization settings that fit no tensor are ignored: <names>")
def _(world: World) -> list[str]:
    folder = world.copy(quantize="4:32")
    settings = {"bits": 4, "group_size": 32, "model.layers.0.nothing": {"bits": 8}}
    return generate(configured(folder, quantization=settings, quantization_config=None))


@provokes("activations: float32, not <dtype> as stored: <reason>")
def _(world: World) -> list[str]:
    world.monkeypatch.setattr("mlxcel.engine.local._device", lambda: "cpu")
    return generate(world.copy("deepseek_v3", dtype="bfloat16"))


@provokes("prompt <n>: <n> tokens at most, not <n>: the context holds <n>")
def _(world: World) -> list[str]:
    return without_template(world, "-p", "x" * 511)


@provokes("mlxcel: warning: --no-plugin names '<name>', which no installed plugin is called")
def _(world: World) -> list[str]:
    return generate(world.copy(), "--no-plugin", "never_heard_of")


# A cluster

PEERS = "198.51.100.1:19001,198.51.100.2:19001"

CLUSTER_TOML = """
[cluster]
pipeline_parallel_size = 2
[[nodes]]
id = "stage-0"
address = "198.51.100.1:19001"
role = "pipeline_stage"
stage = 0
[[nodes]]
id = "stage-1"
address = "198.51.100.2:19001"
role = "pipeline_stage"
stage = 1
"""


def node(world: World, *flags: str) -> list[str]:
    """A node without a secret, whose files go into a folder of their own."""
    for name in ("MLXCEL_CLUSTER_SECRET", "MLXCEL_CLUSTER_SECRET_FILE"):
        world.monkeypatch.delenv(name, raising=False)
    world.monkeypatch.chdir(world.tmp_path)
    (world.tmp_path / "model").mkdir()
    return ["serve", "-m", "model", "--port", "0", *flags]


def coordinator(world: World, *flags: str, peers: str = PEERS) -> list[str]:
    return node(world, "--pp-auto", "2", "--cluster-peers", peers, *flags)


def checked(world: World, old: str = "", new: str = "", *, name: str = "cluster.toml") -> list[str]:
    """A check of the cluster's file, where ``new`` stands instead of ``old``."""
    assert old in CLUSTER_TOML
    (world.tmp_path / "cluster.toml").write_text(CLUSTER_TOML.replace(old, new, 1))
    return ["cluster", "check", str(world.tmp_path / name)]


def beacons(world: World, *flags: str) -> list[str]:
    """A coordinator that listens for beacons for a moment."""
    wait = "--pp-auto 2 --dry-run --cluster-discovery mdns --cluster-discovery-timeout 0.01"
    command = node(world, *wait.split(), *flags)
    world.monkeypatch.setenv("MLXCEL_CLUSTER_SECRET", "x" * 32)
    return command


def taken(world: World) -> str:
    """The address of a port that another program has."""
    return f"127.0.0.1:{world.occupy(socket.SOCK_STREAM, listen=True)}"


@provokes("<flag> does not go with <what>: <reason>")
def _(world: World) -> list[str]:
    return coordinator(world, "--pp-layers", "0-1,2-3")


@provokes("--pp-auto <n> does not know its peers.")
def _(world: World) -> list[str]:
    return node(world, "--pp-auto", "2")


@provokes("--cluster-peers lists <n> of the <n> peers")
def _(world: World) -> list[str]:
    return coordinator(world, peers="198.51.100.1:19001")


@provokes("--cluster-peers: '<text>' has no port.")
def _(world: World) -> list[str]:
    return coordinator(world, peers="198.51.100.1,198.51.100.2")


@provokes(
    "--cluster-peers: node '<id>' has the loopback address <address>, which node '<id>' at "
    "<address> could not dial."
)
def _(world: World) -> list[str]:
    return coordinator(world, "--dry-run", peers="198.51.100.1:19001,127.0.0.1:19001")


@provokes("--pp-peer with static discovery does not know where to listen.")
def _(world: World) -> list[str]:
    return node(world, "--pp-peer")


@provokes(
    "--cluster-control-addr <address>: nobody can dial it, and no beacon tells the others more."
)
def _(world: World) -> list[str]:
    return node(world, "--pp-peer", "--cluster-control-addr", "0.0.0.0:19001")


@provokes("--port <n> is the port of the cluster's address <address> too.")
def _(world: World) -> list[str]:
    return coordinator(world, "--port", "19000")


@provokes("The cluster's secret cannot be used:")
def _(world: World) -> list[str]:
    return coordinator(world)


@provokes("The cluster's secret of <source> cannot be used: <problem>")
def _(world: World) -> list[str]:
    command = coordinator(world)
    world.monkeypatch.setenv("MLXCEL_CLUSTER_SECRET", "short")
    return command


@provokes("mlxcel: warning: <file> is open to other users of this machine")
def _(world: World) -> list[str]:
    (world.tmp_path / "key").write_text("x" * 32)
    (world.tmp_path / "key").chmod(0o644)
    world.monkeypatch.setattr(
        "mlxcel.cluster.dry_run.find_peers",
        lambda options, say: Found(parse_addresses(PEERS, "")),
    )
    flags = "--pp-auto 2 --cluster-discovery mdns --cluster-secret-file key --dry-run"
    return node(world, *flags.split())


@provokes(
    "the cluster did not come up (connect), nothing was started. <node> @ <address> "
    "(unreachable): nothing listens there."
)
def _(world: World) -> list[str]:
    peers = [f"127.0.0.1:{world.occupy(socket.SOCK_STREAM)}" for _ in range(2)]
    command = coordinator(world, "--cluster-discovery-timeout", "0.1", peers=",".join(peers))
    (world.tmp_path / "model").rmdir()
    world.copy()
    world.monkeypatch.setenv("MLXCEL_CLUSTER_SECRET", "x" * 32)
    return command


@provokes("<file> exists already.")
def _(world: World) -> list[str]:
    (world.tmp_path / "key").touch()
    return ["cluster", "secret", str(world.tmp_path / "key")]


@provokes("<file> cannot be written")
def _(world: World) -> list[str]:
    return coordinator(world, "--dry-run", "--cluster-config-out", "model")


@provokes("<file>: it cannot be read")
def _(world: World) -> list[str]:
    return checked(world, name="other.toml")


@provokes("<file>: it is no TOML:")
def _(world: World) -> list[str]:
    return checked(world, "[cluster]", "[cluster")


@provokes("<file>: <table> has the unknown key '<key>'.")
def _(world: World) -> list[str]:
    return checked(world, "address", "adress")


@provokes("<file>: <table>: '<key>' is <value>.")
def _(world: World) -> list[str]:
    return checked(world, "stage = 1", 'stage = "1"')


@provokes("<file>: <table> has no '<key>'.")
def _(world: World) -> list[str]:
    return checked(world, 'role = "pipeline_stage"\n', "")


@provokes("<file>: <n> nodes hold a stage, where <sizes>: <place> is missing.")
def _(world: World) -> list[str]:
    return checked(world, "pipeline_parallel_size = 2", "pipeline_parallel_size = 3")


@provokes("<file>: '<id>' and '<id>' both have stage <n>.")
def _(world: World) -> list[str]:
    return checked(world, "stage = 1", "stage = 0")


@provokes(
    "<file>: node '<id>' holds a whole stage (role 'pipeline_stage'), where "
    "tensor_parallel_size is <n>."
)
def _(world: World) -> list[str]:
    return checked(world, "[[nodes]]", "tensor_parallel_size = 2\n[[nodes]]")


@provokes("<file>: '<key>': a mesh has two dimensions, stages and their ranks.")
def _(world: World) -> list[str]:
    return checked(world, "[[nodes]]", "expert_parallel_size = 2\n[[nodes]]")


@provokes("<place>: no transport '<name>' is installed")
def _(world: World) -> list[str]:
    return coordinator(world, "--transport-backend", "never_heard_of")


@provokes("<place>: '<role>' is a role of disaggregated serving")
def _(world: World) -> list[str]:
    return checked(world, "pipeline_stage", "prefill")


@provokes("--node-id <id>: <file> has no such node.")
def _(world: World) -> list[str]:
    file = checked(world)[-1]
    return node(world, "--distributed-config", file, "--node-id", "stage-7")


@provokes("<n> of <n> peers announced themselves on UDP port <n> within <n> s.")
def _(world: World) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    return beacons(world, "--cluster-discovery-port", port)


@provokes("UDP port <n> cannot be used: <cause>.")
def _(world: World) -> list[str]:
    return beacons(world, "--cluster-discovery-port", str(world.occupy(socket.SOCK_DGRAM)))


@provokes("this node cannot listen on <address>: <cause>.")
def _(world: World) -> list[str]:
    return coordinator(world, "--dry-run", "--cluster-control-addr", taken(world))


@provokes("<address>, where <node> would listen, cannot be used: no mlxcel peer answers there")
def _(world: World) -> list[str]:
    world.monkeypatch.setattr("mlxcel.cluster.port_probe.HELLO_SECONDS", 0.01)
    return coordinator(world, "--dry-run", peers=f"{taken(world)},{taken(world)}")


@provokes("<address> runs <version>; here it is <version>.")
def _(world: World) -> list[str]:
    beacon = Beacon("demo", Address("198.51.100.1", 19001), "0.0.1", 4)
    world.monkeypatch.setattr(
        "mlxcel.cluster.dry_run.find_peers", lambda options, say: Found((), (beacon,))
    )
    return coordinator(world, "--dry-run")


# The tests


@pytest.fixture
def world(
    tmp_path: Path,
    tiny: Callable[..., Path],
    make_site: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    answering: Callable[[Any], str],
) -> Iterator[World]:
    with contextlib.ExitStack() as sockets:
        yield World(tmp_path, tiny, make_site, monkeypatch, sockets, answering)


def test_every_row_is_provoked_and_every_provocation_has_a_row() -> None:
    """The catalogue and this file list the same texts, each once."""
    texts = [row.text for row in ROWS]
    assert sorted(texts) == sorted(set(texts))
    assert set(texts) == PROVOCATIONS.keys()
    assert len(ROWS) == DOCUMENT.read_text(encoding="utf-8").count("\n| `")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.text)
def test_what_the_catalogue_says_is_what_is_printed(
    row: Row, world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    """A fault is one line as in the catalogue, with its exit code, and nothing else breaks."""
    if row.text.startswith("--blas") and sys.platform != "linux":
        pytest.skip("--blas chooses on Linux only")
    code = run(PROVOCATIONS[row.text](world))
    out, err = capfd.readouterr()
    if row.exit_code == 0:
        assert any(row.pattern.match(line) for line in err.splitlines()), err
        assert out
    else:
        [error] = [line for line in err.splitlines() if not is_notice(line)]
        assert error.startswith(ERROR)
        assert row.pattern.match(error.removeprefix(ERROR)), err
    assert code == row.exit_code, err


def test_a_template_in_a_file_of_its_own_is_no_fault(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    """A chat template that stands in chat_template.jinja only satisfies --chat."""
    folder = world.copy()
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert run(generate(folder, "--chat")) == 0
    assert ERROR not in capfd.readouterr().err


def test_a_workers_error_names_its_stage(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """What goes wrong in a worker process is told as in a thread, behind the stage's number."""
    command = with_config(world, hidden_size=None)
    assert run([*command, "--pp-size", "2", "--pp-workers", "process"]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    text = "has no 'hidden_size', which a model of type 'llama' needs"
    assert re.match(rf"{ERROR}stage [01]: .*/config\.json: {text}", error)

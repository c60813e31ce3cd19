"""The family of all other architectures: what it splits and refuses, and the survey of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxcel.checkpoint.config import read_config
from mlxcel.cli.main import run
from mlxcel.errors import UnsupportedError
from mlxcel.family import Batching, Family, Part, Place
from mlxcel.family.caches import CacheGroup, KVCacheKind, StateCacheKind
from mlxcel.family.choose import choose_family
from mlxcel.plugins import Plugins
from mlxcel.testing.survey.check import survey
from mlxcel.testing.survey.configs import architectures
from mlxcel.testing.survey.finding import Finding, served_by
from mlxcel.testing.survey.model import build
from mlxcel.testing.survey.run import find, findings
from mlxcel.testing.survey.table import row, table
from mlxcel_family_generic.probe import CannotSplit, find_layers, watch

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.fixture
def generic(plugins: Plugins) -> Family:
    return served_by("gpt2", plugins)[1]


# What is split

SPLIT = {
    "gpt2": "padded",  # a table of positions, a tied head
    "gpt_bigcode": "single",  # positions for one sequence only
    "recurrent_gemma": "equal",  # states and windows
    "deepseek_v32": "padded",  # two caches a layer
    "longcat_flash_ngram": "equal",  # a cache of the embedding's own
    "mistral3": "padded",  # layers are told positions; a text_config
}


@pytest.mark.parametrize("architecture", SPLIT)
def test_split(plugins: Plugins, architecture: str) -> None:
    """Cut at every layer, plain and quantized, it is the whole model, in the bytes planned."""
    name = f"generic:{architecture}"
    expected = Finding(architecture, name, "split", SPLIT[architecture])
    assert survey(architecture, plugins) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_survey_in_the_documentation(plugins: Plugins) -> None:
    """docs/families.md says of every architecture of mlx-lm what the survey finds out."""
    found = list(findings(architectures(), plugins))
    assert [finding for finding in found if finding.outcome == "differs"] == []
    assert sum(finding.outcome in ("own", "split") for finding in found) >= 90
    documented = DOCUMENT.read_text(encoding="utf-8").splitlines()
    assert [line for line in table(found).splitlines() if line not in documented] == []


def test_the_survey_knows_every_architecture() -> None:
    """Each has one line in docs/families.md, and nothing else has."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("| architecture |")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines] == list(architectures())


def test_a_family_of_its_own(plugins: Plugins) -> None:
    """What another family serves is not tried here."""
    assert find("qwen3", plugins) == Finding("qwen3", "qwen3", "own")


def test_a_process_that_ends(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture that does not come back is a finding like any other."""
    monkeypatch.setattr("mlxcel.testing.survey.run.SECONDS", 0.01)
    finding = find("phi", plugins)
    assert finding == Finding("phi", "generic:phi", "none", "it took more than 0.01 seconds")
    assert row(finding) == "| phi | `generic:phi` | not tried: it took more than 0.01 seconds |"


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    """mlxcel family survey prints the lines asked for, and refuses names that mlx-lm lacks."""
    assert run(["family", "survey", "--json", "rwkv7"]) == 0
    [finding] = json.loads(capfd.readouterr().out)
    assert finding["outcome"] == "refused"
    assert run(["family", "survey", "no_such_model"]) == 2
    assert "no architecture 'no_such_model'" in capfd.readouterr().err


# What is refused

REFUSED = {
    "afm7": "its layers are not one list",
    "deepseek_v41": "its caches cannot be batched (LayerCache)",
    "gemma3n": "some of its layers share a cache",
    "iquestloopcoder": "parts of layer 0 are used without the others",
    "rwkv7": "layer 0 hands on more than hidden states",
    "talkie": "layer 0 is given more than hidden states, a mask and positions (its argument 2)",
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_refused(plugins: Plugins, architecture: str) -> None:
    """What passes on more than hidden states is refused, with the reason."""
    finding = survey(architecture, plugins)
    assert (finding.outcome, finding.detail) == ("refused", REFUSED[architecture])


@pytest.mark.parametrize("workers", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_generate_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str) -> None:
    """generate names the architecture and the reason, before any weights are read."""
    path = build("rwkv7", tmp_path)
    command = ["generate", "-m", str(path), "-p", "abc", "--pp-size", "2", "--pp-workers", workers]
    assert run(command) == 2
    assert (
        "A model of type 'rwkv7' cannot be split safely: layer 0 hands on"
        in capsys.readouterr().err
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def __call__(self, h: mx.array, extra: object = None, cache: object = None) -> mx.array:
        return h + self.proj(h)


class Toy(nn.Module):
    """A model of three layers; ``between`` is what it does before each of them."""

    def __init__(self, between: Callable[[mx.array, mx.array], tuple[mx.array, object]]) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, 8)
        self.layers = [Block() for _ in range(3)]
        self.between = between

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        h = self.wte(tokens)
        for layer in self.layers:
            h, extra = self.between(h, tokens)
            h = layer(h, extra)
        return self.wte.as_linear(h)


WRONG: dict[str, tuple[Callable[..., tuple[mx.array, object]], str]] = {
    "hidden": (lambda h, tokens: (h, h[:, :, :1] * 2), "more than hidden states"),
    "tokens": (lambda h, tokens: (h, tokens[..., None]), "more than hidden states"),
    "tuple": (lambda h, tokens: (h, (None, h)), "more than hidden states"),
    "object": (lambda h, tokens: (h, object()), "more than hidden states"),
    "between": (lambda h, tokens: (h * 2, None), "hidden states change between layers 0 and 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_must_not_cross(name: str) -> None:
    """Nothing that is made of hidden states or tokens may reach a layer unseen."""
    between, reason = WRONG[name]
    model = Toy(between)
    with pytest.raises(CannotSplit, match=reason):
        watch(model, *find_layers(model), lambda: [])


def test_what_may_cross() -> None:
    """Masks and positions may, as every stage makes them for itself; ends are told apart."""
    model = Toy(lambda h, tokens: (h, (mx.arange(h.shape[1]), 3, "silu")))
    watched = watch(model, *find_layers(model), lambda: [])
    assert watched.before == watched.after == {("", "wte")}
    assert watched.slots == (None, None, None)
    assert watched.h.shape == (1, 3, 8)
    assert isinstance(model.wte, nn.Embedding)


# What is planned


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("h.3.attn.c_attn.weight", Place(Part.LAYER, 3)),
        ("transformer.blocks.1.norm.weight", Place(Part.LAYER, 1)),
        ("model.layers.layers.2.mlp.down_proj.scales", Place(Part.LAYER, 2)),
        ("backbone.layers.0.mixer.A_log", Place(Part.LAYER, 0)),
        ("model.layers.6.mlp.weight", Place(Part.UNUSED)),
        ("h.0.attn.bias", Place(Part.UNUSED)),
        ("h.0.attn.c_attn.bias", Place(Part.LAYER, 0)),
        ("wte.weight", Place(Part.TABLE)),
        ("model.word_embeddings.biases", Place(Part.TABLE)),
        ("wpe.weight", Place(Part.EMBEDDING)),
        ("model.ngram_embeddings.post_projs.0.weight", Place(Part.EMBEDDING)),
        ("ln_f.bias", Place(Part.HEAD)),
        ("model.embedding_norm.weight", Place(Part.HEAD)),
        ("output.weight", Place(Part.HEAD)),
        ("gpt_neox.embed_out.weight", Place(Part.HEAD)),
        ("lm_head.linear.bias", Place(Part.HEAD)),
        ("vision_tower.blocks.0.norm.weight", Place(Part.UNUSED)),
    ],
)
def test_place(tmp_path: Path, generic: Family, name: str, place: Place) -> None:
    """The many names of the same parts."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 6}')
    assert generic.place(name, read_config(tmp_path)) == place


def test_tied_if_there_is_no_head(tmp_path: Path, generic: Family) -> None:
    """The tensors say whether the embedding is the output projection."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 6}')
    config = read_config(tmp_path)
    assert generic.tied(generic.settle(config, ["wte.weight"]))
    assert not generic.tied(generic.settle(config, ["wte.weight", "output.weight"]))


def test_caches_of_the_model(tmp_path: Path, generic: Family) -> None:
    """What a layer keeps is asked of mlx-lm's model; a cache of the embedding is layer 0's."""
    config = read_config(build("longcat_flash_ngram", tmp_path))
    first, second, *_ = generic.caches(config)
    latents = (KVCacheKind(1, 64, 16),) * 2
    assert second == CacheGroup(latents)
    assert isinstance(first, CacheGroup)
    assert first.kinds[:2] == latents
    assert isinstance(first.kinds[2], StateCacheKind)
    assert generic.batching(config) is Batching.EQUAL


def test_caches_of_an_unknown_model(tmp_path: Path, generic: Family) -> None:
    """An architecture that mlx-lm lacks is planned by what its config speaks of."""
    content = {"model_type": "new", "num_hidden_layers": 2, "hidden_size": 64}
    content |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert generic.caches(read_config(tmp_path)) == (KVCacheKind(2, 16, 16),) * 2


def test_caches_of_a_refused_model(tmp_path: Path, generic: Family) -> None:
    """A server learns that a model cannot be split before it starts its stages."""
    config = read_config(build("rwkv7", tmp_path))
    for ask in (generic.caches, generic.batching):
        with pytest.raises(UnsupportedError, match="A model of type 'rwkv7' cannot be split"):
            ask(config)


# The engine


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_bigcode", "recurrent_gemma"])
def test_greedy_parity(
    tmp_path: Path, architecture: str, assert_greedy_parity: Callable[[Path, str], None]
) -> None:
    """generate gives mlx-lm's tokens, whatever batches the architecture takes."""
    assert_greedy_parity(build(architecture, tmp_path), "0-1,2-4,5")


def test_chosen_last(tmp_path: Path, plugins: Plugins) -> None:
    """The wire name tells which architecture it is."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 6}')
    assert choose_family(read_config(tmp_path), plugins)[0] == "generic:gpt2"

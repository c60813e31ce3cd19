"""Whether peers can form one pipeline with their coordinator."""

from __future__ import annotations

import attrs
import pytest

from mlxcel.cluster.agreement import differences, disagreements
from mlxcel.cluster.introduction import Introduction

VERSIONS = {"mlxcel": "1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}
PLUGINS = {"family:llama": "1.0", "family:gemma3": "1.0", "transport:tcp": "1.0"}
USED = {"family:llama": "1.0", "transport:tcp": "1.0"}
OURS = Introduction(
    "coordinator", "coordinator", "c", VERSIONS, PLUGINS, families=("gemma3", "llama")
)
PEER = Introduction(
    "10.0.0.1:1", "peer", "c", {**VERSIONS, "BLAS": "openblas"}, PLUGINS, ("gemma3", "llama")
)


def problems(*peers: Introduction) -> list[tuple[str, str, str]]:
    nodes = [f"stage-{stage}" for stage in range(len(peers))]
    found = disagreements(OURS, peers, nodes, "llama", USED)
    return [(failure.node, failure.reason, failure.text) for failure in found]


def test_equals_agree() -> None:
    """Peers with the same software have nothing against each other."""
    assert problems(PEER, PEER) == []


@pytest.mark.parametrize("name", ["mlxcel", "mlx-lm"])
def test_versions_that_must_be_equal(name: str) -> None:
    """Another version is refused; both are named, with the command that helps."""
    other = attrs.evolve(PEER, versions={**PEER.versions, name: "9.9"})
    [(node, reason, text)] = problems(PEER, other)
    assert (node, reason) == ("stage-1", "version")
    assert f"it has {name} 9.9, the coordinator {VERSIONS[name]}." in text
    assert f"pip install {name}=={VERSIONS[name]}" in text


def test_a_missing_family_names_both_lists() -> None:
    """A pipeline capability mismatch says what each side has."""
    plugins = {key: version for key, version in PLUGINS.items() if key != "family:llama"}
    other = attrs.evolve(PEER, families=("gemma3", "qwen2"), plugins=plugins)
    [(_, reason, text)] = problems(other)
    assert reason == "family"
    assert "pipeline capability mismatch" in text
    assert "'llama'" in text
    assert "[gemma3, qwen2]" in text
    assert "[gemma3, llama]" in text


def test_a_fallback_family_is_known_by_its_own_name() -> None:
    """What serves a model_type behind a colon is one family."""
    peer = attrs.evolve(PEER, families=("generic",))
    assert disagreements(OURS, [peer], ["stage-0"], "generic:phi3", {}) == ()


@pytest.mark.parametrize("version", ["2.0", None])
def test_plugins_in_use_must_be_equal(version: str | None) -> None:
    """Another version of the transport, or none, is refused."""
    plugins = {**PLUGINS, "transport:tcp": version}
    other = attrs.evolve(
        PEER, plugins={key: found for key, found in plugins.items() if found is not None}
    )
    [(_, reason, text)] = problems(other)
    assert reason == "version"
    assert "transport:tcp" in text
    assert "1.0" in text


def test_plugins_not_in_use_may_differ() -> None:
    """Only what the run needs has to agree."""
    other = attrs.evolve(PEER, plugins={**PLUGINS, "family:gemma3": "0.1", "family:x": "3"})
    assert problems(other) == []


def test_all_that_is_wrong_is_told() -> None:
    """Every disagreement of every peer, not only the first."""
    old = attrs.evolve(PEER, versions={**PEER.versions, "mlxcel": "0.9", "mlx-lm": "0.1"})
    assert [node for node, _, _ in problems(old, PEER, old)] == [
        "stage-0",
        "stage-0",
        "stage-2",
        "stage-2",
    ]


def test_what_may_differ_is_said() -> None:
    """MLX, BLAS and device are told with who has which, and nothing if all are alike."""
    assert differences([PEER, PEER]) == ()
    other = attrs.evolve(
        PEER,
        node="10.0.0.2:1",
        device="gpu",
        versions={**VERSIONS, "mlx": "0.33.0", "BLAS": "accelerate"},
    )
    mlx, blas, device = differences([PEER, other])
    assert "mlx: 0.32.4 on 10.0.0.1:1; 0.33.0 on 10.0.0.2:1" in mlx
    assert "BLAS: openblas on 10.0.0.1:1; accelerate on 10.0.0.2:1" in blas
    assert "device: cpu on 10.0.0.1:1; gpu on 10.0.0.2:1" in device

"""What a peer refuses, each with its reason and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from mlxcel.cluster.addresses import Address
from mlxcel.cluster.identity import Checkpoints, identify
from mlxcel.cluster.introduction import Introduction
from mlxcel.cluster.messages import Offer, Refused
from mlxcel.cluster.offers import OwnPlan, Standing, judge_offer
from mlxcel.cluster.topology import Node, Topology
from mlxcel.cluster.topology_toml import emit_topology
from mlxcel.errors import PartitionError
from mlxcel.plugins import Plugins
from mlxcel.tensor.options import TensorParallel

Tiny = Callable[..., Path]

VERSIONS = {"mlxcel": "1", "mlx-lm": "2", "mlx": "3"}
PLUGINS = {"family:llama": "0.1", "transport:tcp": "0.2"}
TOPOLOGY = Topology(
    (
        Node("coordinator", Address("10.0.0.1", 19000), "hybrid"),
        Node("stage-0", Address("10.0.0.2", 19001), "pipeline_stage", 0),
        Node("stage-1", Address("10.0.0.3", 19001), "pipeline_stage", 1),
    ),
    name="c",
    pipeline_parallel_size=2,
)
OURS = Introduction("10.0.0.3:19001", "peer", "c", VERSIONS, PLUGINS, ("llama",), memory=1000)


@pytest.fixture
def standing(tiny: Tiny, plugins: Plugins) -> Standing:
    return Standing(OURS, plugins, Checkpoints([tiny("llama")]))


@pytest.fixture
def offer(tiny: Tiny) -> Offer:
    """The last of two stages; it can be met."""
    identity = identify(tiny("llama"))
    return Offer(
        session="s",
        node="stage-1",
        family="llama",
        stage=1,
        stages=2,
        start=2,
        stop=identity.layers,
        cast=None,
        dequantize=False,
        identity=identity,
        topology=emit_topology(TOPOLOGY),
        digest="d",
        cluster="c",
        versions={"mlxcel": "1", "mlx-lm": "2", "mlx": "other"},
        plugins=PLUGINS,
        bytes=1000,
        transport="tcp",
        credits=4,
        timeout=60.0,
        dials={},
    )


def test_an_offer_that_can_be_met_gives_the_folder(
    offer: Offer, standing: Standing, tiny: Tiny
) -> None:
    """Another version of MLX alone is no obstacle."""
    assert judge_offer(offer, standing) == tiny("llama")


@pytest.mark.parametrize(
    ("changes", "reason", "told"),
    [
        ({"cluster": "x"}, "cluster", "belongs to the cluster 'c', the offer is of 'x'"),
        ({"transport": "pigeon"}, "transport", "'pigeon' cannot be used: it is not installed"),
        (
            {"versions": {"mlxcel": "9", "mlx-lm": "2"}},
            "version",
            "it has mlxcel 1, the coordinator 9. Install the same version",
        ),
        (
            {"versions": {"mlxcel": "1", "mlx-lm": "9"}},
            "version",
            "it has mlx-lm 2, the coordinator 9",
        ),
        (
            {"plugins": {**PLUGINS, "family:llama": "7"}},
            "version",
            "version 0.1 of the plugin family:llama, the coordinator has version 7",
        ),
        (
            {"family": "unheard_of"},
            "family",
            "pipeline capability mismatch: the model needs the family 'unheard_of'; this peer has "
            "[llama], the coordinator [unheard_of]",
        ),
        ({"bytes": 1001}, "memory", "the stage needs 1001 bytes, and 1000 are free"),
        ({"start": 0}, "plan", "cannot be stage 1 of 2"),
        ({"start": 6}, "plan", "cannot be stage 1 of 2"),
        ({"stop": 7}, "plan", "cannot be stage 1 of 2"),
        ({"stage": 2}, "plan", "cannot be stage 2 of 2"),
        ({"dials": {"1-2": "10.0.0.4:1"}}, "plan", "cannot be stage 1 of 2"),
        ({"rank": 1}, "plan", "cannot be stage 1 of 2"),
        ({"tensor": TensorParallel(2)}, "plan", "cannot be rank 0 of 2 of stage 1 of 2"),
        (
            {"tensor": TensorParallel(2), "dials": {"s1r0-s1r1": "10.0.0.4:1"}},
            "plan",
            "does not make 'stage-1' rank 0 of 2 of stage 1 of 2",
        ),
        ({"tensor": TensorParallel(257), "rank": 256}, "plan", "cannot be rank 256 of 257"),
        ({"tensor": TensorParallel(1 << 40)}, "plan", "cannot be rank 0 of 1099511627776"),
        ({"topology": "nonsense"}, "plan", "it is no TOML"),
        ({"node": "stage-0"}, "plan", "does not make 'stage-0' stage 1"),
        ({"node": "stage-7"}, "plan", "does not make 'stage-7' stage 1"),
    ],
)
def test_what_cannot_be_met_is_refused(
    offer: Offer, standing: Standing, changes: dict[str, Any], reason: str, told: str
) -> None:
    """The reason is typed, and the text says what is wrong here and there."""
    refused = judge_offer(attrs.evolve(offer, **changes), standing)
    assert isinstance(refused, Refused)
    assert (refused.session, refused.reason) == ("s", reason)
    assert told in refused.text


def test_another_checkpoint_is_refused(offer: Offer, standing: Standing) -> None:
    """The text names the file that differs."""
    other = attrs.evolve(offer.identity, config="0" * 64)
    refused = judge_offer(attrs.evolve(offer, identity=other), standing)
    assert isinstance(refused, Refused)
    assert refused.reason == "checkpoint"
    assert "config.json differs" in refused.text


def test_a_family_that_does_not_load_is_refused(
    offer: Offer, standing: Standing, site: Any
) -> None:
    """A family that is advertised and raises at its import is told with that error."""
    site.family("broken", before="raise ImportError('no such thing')")
    plugins = Plugins.discover(
        environ={}, entry_points=[*site.entry_points(), *_transports(standing)]
    )
    advertised = attrs.evolve(OURS, families=("broken",))
    refused = judge_offer(
        attrs.evolve(offer, family="broken", plugins={}),
        attrs.evolve(standing, plugins=plugins, introduction=advertised),
    )
    assert isinstance(refused, Refused)
    assert refused.reason == "family"
    assert "no such thing" in refused.text


def _transports(standing: Standing) -> list[Any]:
    return [entry.point for entry in standing.plugins._entries if entry.kind == "transport"]


def test_an_operators_transport_is_kept(offer: Offer, standing: Standing) -> None:
    """A peer that was started for one transport does not take another."""
    refused = judge_offer(offer, attrs.evolve(standing, transport="rdma"))
    assert isinstance(refused, Refused)
    assert (refused.reason, "started for the transport 'rdma'" in refused.text) == (
        "transport",
        True,
    )


def test_unknown_memory_refuses_nothing(offer: Offer, standing: Standing, tiny: Tiny) -> None:
    """Where nobody knows how much is free, the stage is tried."""
    unknown = attrs.evolve(standing, introduction=attrs.evolve(OURS, memory=0))
    assert judge_offer(attrs.evolve(offer, bytes=1 << 60), unknown) == tiny("llama")


def own(**changes: Any) -> OwnPlan:
    return attrs.evolve(OwnPlan("stage-1", TOPOLOGY, lambda offer, folder: "d"), **changes)


def test_a_manual_peer_follows_who_means_the_same(
    offer: Offer, standing: Standing, tiny: Tiny
) -> None:
    """The same TOML, the same node and the same plan are accepted."""
    assert judge_offer(offer, attrs.evolve(standing, own_plan=own())) == tiny("llama")


def failing(offer: Offer, folder: Path) -> str:
    raise PartitionError("The ranges overlap.", "Correct them.")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"node": "stage-0"}, "this node is 'stage-0' by its TOML, and is asked to be 'stage-1'"),
        (
            {"topology": attrs.evolve(TOPOLOGY, transport_backend="rdma")},
            "its TOML has 'transport_backend = \"rdma\"' where the coordinator's has "
            "'transport_backend = \"tcp\"'",
        ),
        ({"digest": lambda offer, folder: "e"}, "comes to other layers than the coordinator"),
        ({"digest": lambda offer, folder: "e"}, "the same --pp-layers and --allow-mirrored-kv"),
        ({"digest": failing}, "The ranges overlap."),
    ],
)
def test_a_manual_peer_refuses_other_plans(
    offer: Offer, standing: Standing, changes: dict[str, Any], told: str
) -> None:
    """Two nodes never run different layers than their files say."""
    refused = judge_offer(offer, attrs.evolve(standing, own_plan=own(**changes)))
    assert isinstance(refused, Refused)
    assert refused.reason == "plan"
    assert told in refused.text

"""What an offer says of the plan, over the wire."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from mlxcel.cluster.control_channel import decode_message, encode_message
from mlxcel.cluster.messages import ModelIdentity, Offer
from mlxcel.cluster.plan_terms import PlanTerms
from mlxcel.errors import WireError

OFFER = Offer(
    session="s",
    node="stage-0",
    family="llama",
    stage=0,
    stages=2,
    start=0,
    stop=5,
    cast=None,
    dequantize=True,
    identity=ModelIdentity("ab" * 32, (), 10),
    topology="",
    digest="cd" * 32,
    cluster="c",
    versions={},
    plugins={},
    bytes=1,
    transport="tcp",
    credits=8,
    timeout=30.0,
    dials={},
)


@pytest.mark.parametrize(
    "terms", [PlanTerms(), PlanTerms("time:prefill", kv_budget=1 << 40, context=1, chunk=7)]
)
def test_terms_arrive_as_they_are(terms: PlanTerms) -> None:
    """All that a node needs to come to the same plan is in the offer."""
    offer = attrs.evolve(OFFER, terms=terms)
    assert decode_message(encode_message(offer)) == offer


@pytest.mark.parametrize(
    "change",
    [{"by": "weight"}, {"kv_budget": -1}, {"kv_budget": "1"}, {"context": 0}, {"chunk": 0}],
)
def test_terms_that_no_plan_has_are_refused(change: dict[str, Any]) -> None:
    """They are malformed before anybody plans with them."""
    message = json.loads(encode_message(OFFER))
    message["terms"] |= change
    with pytest.raises(WireError):
        decode_message(json.dumps(message).encode())

"""``/health`` and ``/metrics`` of a peer, for operators who want to look at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxcel.cluster.peer import Peer


def create_peer_app(peer: Peer) -> web.Application:
    """An application that says how ``peer`` is; it takes no requests for text."""
    registry = CollectorRegistry()
    registry.register(PeerMetrics(peer))

    async def health(request: web.Request) -> web.Response:
        """200 as soon as a coordinator can have it, and while one has."""
        return web.json_response(describe(peer), status=503 if peer.listening is None else 200)

    async def metrics(request: web.Request) -> web.Response:
        """All figures in Prometheus's text format."""
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/metrics", metrics)])
    return app


def describe(peer: Peer) -> dict[str, Any]:
    """What ``/health`` says."""
    offer = peer.state.offer
    body: dict[str, Any] = {
        "status": "arming" if peer.listening is None else peer.state.state,
        "address": None if peer.listening is None else str(peer.listening),
        "coordinator": peer.state.coordinator or None,
    }
    if offer is not None:
        body |= {
            "node": offer.node,
            "stage": offer.stage,
            "rank": offer.rank,
            "layers": f"{offer.start}-{offer.stop - 1}",
        }
    return body


@attrs.frozen(eq=False)
class PeerMetrics(Collector):
    """The figures of one peer, read when they are asked for."""

    peer: Peer

    def collect(self) -> Iterator[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        handshakes = CounterMetricFamily(
            "mlxcel_cluster_handshakes",
            "Connections to this node by what became of them",
            labels=["outcome"],
        )
        for outcome, count in attrs.asdict(self.peer.gate.counts).items():
            handshakes.add_metric([outcome], count)
        yield handshakes
        state = self.peer.state
        yield CounterMetricFamily(
            "mlxcel_peer_sessions", "Stages that this peer has started", value=state.sessions
        )
        yield CounterMetricFamily(
            "mlxcel_peer_broken_links",
            "Stages that ended with a data link that broke or brought forged frames",
            value=state.broken_links,
        )
        stage = GaugeMetricFamily(
            "mlxcel_peer_stage", "The stage that this peer is, -1 while it is none"
        )
        stage.add_metric([], -1 if state.offer is None else state.offer.stage)
        yield stage
        rank = GaugeMetricFamily(
            "mlxcel_peer_rank", "The rank of that stage that this peer is, -1 while it is none"
        )
        rank.add_metric([], -1 if state.offer is None else state.offer.rank)
        yield rank

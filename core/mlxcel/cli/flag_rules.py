"""Which flags of ``mlxcel serve`` go together, and why others do not."""

from __future__ import annotations

from collections.abc import Collection

import attrs

from mlxcel.cluster.options import Mode
from mlxcel.errors import UsageError

LOCAL: tuple[Mode, ...] = ("local",)
COORDINATOR: tuple[Mode, ...] = ("coordinator-auto", "coordinator-manual")
PEER: tuple[Mode, ...] = ("peer-auto", "peer-manual")
AUTO: tuple[Mode, ...] = ("coordinator-auto", "peer-auto")
MANUAL: tuple[Mode, ...] = ("coordinator-manual", "peer-manual")

TITLES: dict[Mode, str] = {
    "local": "a server without a cluster",
    "coordinator-auto": "--pp-auto",
    "coordinator-manual": "a coordinator with --distributed-config",
    "peer-auto": "--pp-peer",
    "peer-manual": "a stage with --distributed-config",
}
_CLUSTER = "Start a cluster with --pp-auto N, --pp-peer or --distributed-config."


@attrs.frozen
class Rule:
    """``flags`` go with ``modes`` only; otherwise ``why`` not, and what to do instead."""

    flags: tuple[str, ...]
    modes: tuple[Mode, ...]
    why: str
    way_out: str


RULES = (
    Rule(
        ("--pp-size",),
        LOCAL,
        "the cluster has as many stages as --pp-auto or its TOML file says",
        "Leave it out.",
    ),
    Rule(
        ("--pp-workers",),
        LOCAL,
        "every stage of a cluster is a process of its peer",
        "Leave it out.",
    ),
    Rule(
        ("--tp-workers",),
        LOCAL,
        "every rank of a cluster is a process of its peer",
        "Leave it out.",
    ),
    Rule(
        (
            "--tp-size",
            "--tp-moe-mode",
            "--tp-embedding-mode",
            "--tp-lm-head-mode",
            "--tp-collectives",
            "--tp-timeout",
        ),
        LOCAL + COORDINATOR,
        "a peer learns from the coordinator what its rank shares out, and with whom",
        "Give it to the coordinator.",
    ),
    Rule(
        ("--pp-layers",),
        LOCAL + MANUAL,
        "the coordinator divides the layers by the memory that the peers report",
        "To divide them by hand, write the cluster's TOML file with --dry-run and start all "
        "nodes with --distributed-config and --node-id.",
    ),
    Rule(
        ("--allow-mirrored-kv",),
        LOCAL + COORDINATOR + ("peer-manual",),
        "the coordinator divides the layers",
        "Give it to the coordinator.",
    ),
    Rule(
        ("--blas",),
        LOCAL + PEER,
        "a coordinator computes nothing",
        "Give it to the peers.",
    ),
    Rule(
        ("--dtype", "--weights", "--pp-balance", "--pp-timeout", "--kv-cache-budget"),
        LOCAL + COORDINATOR,
        "the coordinator decides it for all stages",
        "Give it to the coordinator.",
    ),
    Rule(
        (
            "--pp-micro-batch-size",
            "--prefill-chunk-size",
            "--no-warmup",
            "--parallel",
            "--max-batch-size",
            "--max-queue-depth",
            "--ctx-size",
            "--prefix-cache",
            "--queue-timeout",
            "--drain-timeout",
        ),
        LOCAL + COORDINATOR,
        "requests are the coordinator's business",
        "Give it to the coordinator.",
    ),
    Rule(
        ("--verbose",),
        LOCAL + COORDINATOR,
        "the coordinator tells how the layers were divided",
        "Give it to the coordinator.",
    ),
    Rule(
        ("--alias", "--allowed-origins", "--api-key", "--api-key-file", "--max-body-size"),
        LOCAL + COORDINATOR,
        "a peer serves nothing but /health and /metrics",
        "Give it to the coordinator.",
    ),
    Rule(
        ("--node-id", "--node-role", "--peers"),
        MANUAL,
        "it says which node of a TOML file this is, and there is no --distributed-config",
        "Give both, or neither.",
    ),
    Rule(
        ("--cluster-discovery-timeout",),
        COORDINATOR,
        "only a coordinator waits for peers",
        "Leave it out.",
    ),
    Rule(
        ("--cluster-peers",),
        ("coordinator-auto",),
        "only a coordinator with --pp-auto looks for peers",
        "Leave it out, or see --pp-auto; with --distributed-config the file lists the peers.",
    ),
    Rule(
        ("--cluster-discovery-target",),
        ("peer-auto",),
        "only the beacons of peers have a target",
        "Give it to the peers, with --cluster-discovery mdns.",
    ),
    Rule(
        ("--cluster-name", "--cluster-discovery", "--cluster-discovery-port"),
        AUTO,
        "nothing is discovered there: the TOML file says it all, or there is no cluster",
        "Leave it out, or use --pp-auto and --pp-peer without --distributed-config.",
    ),
    Rule(
        ("--cluster-config-out",),
        AUTO,
        "no TOML file is written there",
        "Leave it out, or use --pp-auto and --pp-peer without --distributed-config.",
    ),
    Rule(
        ("--cluster-control-addr", "--transport-backend"),
        COORDINATOR + PEER,
        "there is nobody to talk to",
        _CLUSTER,
    ),
    Rule(
        ("--cluster-secret-file",),
        COORDINATOR + PEER,
        "there is nobody to talk to",
        _CLUSTER,
    ),
    Rule(
        ("--dry-run",),
        ("coordinator-auto",),
        "it says what --pp-auto would do",
        "To check a TOML file, use `mlxcel cluster check FILE`; to plan, `mlxcel plan`.",
    ),
)


def check_rules(given: Collection[str], mode: Mode) -> None:
    """Refuse flags that mean nothing in ``mode``.

    Raises:
        UsageError: The first that does not belong, with the reason and what to do instead.
    """
    for rule in RULES:
        for flag in rule.flags:
            if flag in given and mode not in rule.modes:
                raise UsageError(
                    f"{flag} does not go with {TITLES[mode]}: {rule.why}.", rule.way_out
                )

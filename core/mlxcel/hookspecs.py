"""Every hook a plugin can implement, on one page.

A plugin module marks its functions with :data:`hookimpl` and is named by an entry point of
the group ``mlxcel.plugins``::

    from mlxcel.hookspecs import hookimpl

    api_version = "1.0"

    @hookimpl
    def mlxcel_observe(event):
        print(event)

A function may leave out arguments that it does not need. The first answer that is not None
wins where a hook is ``firstresult``; mlxcel's own implementation comes last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxcel.observe.events import Event
    from mlxcel.partition.profile import ModelProfile
    from mlxcel.stage.contract import StageExecutor, StageSpec
    from mlxcel.tensor.collectives import Collectives
    from mlxcel.transport.contract import Transport, TransportOptions

PROJECT = "mlxcel"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def mlxcel_build_executor(spec: StageSpec, collectives: Collectives | None) -> StageExecutor | None:
    """Build what runs one stage, or one rank of it.

    Runs: once per worker, in the thread that will run it, before anything is loaded.
    ``collectives`` connect the ranks of the stage where each is a worker of its own, else they
    are None; all ranks have to call them in the same order.
    Returns: an executor for exactly ``spec``'s layers, or None to leave it to the next plugin
    and at last to mlxcel's own.
    Since: plugin API 1.0.
    """


@hookspec(firstresult=True)
def mlxcel_place_stages(
    profile: ModelProfile, stages: int, balance: str, budgets: Sequence[int | None] | None
) -> tuple[range, ...] | None:
    """Decide which layers each of ``stages`` stages gets.

    Runs: once per plan, unless ``--pp-layers`` gives the ranges; nothing is loaded yet.
    ``balance`` is the value of ``--pp-balance``. ``budgets`` are the bytes of weights and KV
    caches that each stage may hold, if they are limited.
    Returns: one range of layers per stage, in order, or None to leave it to the next plugin
    and at last to mlxcel's own balancer. The answer is validated like ranges given by hand.
    Since: plugin API 1.0.
    """


@hookspec(firstresult=True)
def mlxcel_make_transport(name: str, options: TransportOptions) -> Transport | None:
    """Make the transport called ``name``: ``--transport-backend``, or the TOML's
    ``transport_backend``.

    Runs: once in every process that has connections, before the first of them; the plugin of
    the entry point ``name`` in the group ``mlxcel.transports`` is loaded by then, and other
    transports may be.
    Returns: the transport, or None if ``name`` is not the plugin's own.
    Since: plugin API 1.0.
    """


@hookspec
def mlxcel_observe(event: Event) -> None:
    """See what happened: one of the classes in :mod:`mlxcel.observe.events`.

    Runs: after the fact, in the thread where it happened, never inside a forward pass. Every
    observer is called by itself: one that raises is logged once and stops nobody else.
    Skip event classes you do not know; later versions add some. Wrappers are refused here.
    Since: plugin API 1.0.
    """

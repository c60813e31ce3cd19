"""The collectives that a job asks for."""

from __future__ import annotations

from collections.abc import Callable

from mlxcel.errors import RankLost
from mlxcel.pipeline.control import Job
from mlxcel.pipeline.group import RankGroup
from mlxcel.tensor.collectives import Collectives
from mlxcel.tensor.distributed import DistributedCollectives, check_backend
from mlxcel.tensor.ring import RingCollectives

TRANSPORT = "transport"


def make_collectives(
    job: Job, group: RankGroup | None, on_lost: Callable[[RankLost], None]
) -> Collectives | None:
    """What the ranks of ``job``'s stage do together with; None where this worker is all of them.

    Args:
        group: The connections to the other ranks; None where there are none.
        on_lost: Called in another thread when the evaluation of a lazy result hangs: this
            process cannot go on, and has to say so and end.

    Raises:
        UsageError: The backend is not there.
        RankLost: A rank did not come.
    """
    rank = job.spec.rank
    if rank is None or job.spec.tensor.size == 1 or group is None:
        return None
    ours = RingCollectives(group)
    if job.collectives == TRANSPORT:
        return ours
    check_backend(job.collectives)
    ours.barrier()  # with a deadline, and all are about to connect, for which MLX has none
    return DistributedCollectives(
        job.collectives, rank, job.fabric, job.spec.index, job.rank_timeout, on_lost
    )

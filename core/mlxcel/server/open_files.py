"""How many files a process may have open: every connection is one."""

from __future__ import annotations

import contextlib
import resource

WANTED = 4096


def allow_open_files(wanted: int = WANTED) -> None:
    """Let this process open ``wanted`` files at once, or as many as the system lets it.

    Systems begin with few (macOS with 256), which strangers who only connect could use up.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if now == resource.RLIM_INFINITY or now >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))

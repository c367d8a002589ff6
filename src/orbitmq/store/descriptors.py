"""How many files a process may have open, and what a store takes of it.

Connections and files share one number. A quarter of it is kept for the queue files that are read
again and again; the rest is for connections, the log and the index. Both give way when it is used
up all the same: a store then goes on with a single queue file, a server with the connections that
it has, and accepts others when there is room.
"""

from __future__ import annotations

import contextlib
import sys

if sys.platform != "win32":
    import resource

_SHARE = 4
_LEAST = 256
_MOST = 4096
#: More is of no use to anybody, and some systems call the highest possible number no limit.
_HIGHEST_LIMIT = 1 << 20


def queue_files_to_keep() -> int:
    """How many queue files a store keeps open unless it is told."""
    if sys.platform == "win32":
        return _LEAST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(soft // _SHARE, _MOST))


def raise_descriptor_limit() -> None:
    """Let this process open as many files as it may allow itself.

    For the entry of a process that is a server, and for nothing else: whoever shares a process with
    others leaves its limits alone.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HIGHEST_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems have a lower limit than they say.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

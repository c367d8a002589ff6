"""How a pull hears that the progress of its group was reset.

It is told once: whoever pulls is who reports progress. Where that is not so, as in groups on Spark,
whose tasks pull and whose driver reports, pulls say that a reset is to be kept (`keep_reset`). They
are all told of it, and it stays pending, so that no report counts, until whoever reports has pulled
himself. (Apache's broker knows nothing of it, and tells such a group once as well.)
"""

from __future__ import annotations

from orbitmq.wire.headers.pull import PullFlag, PullMessageRequest

#: What the remark says when a pull is sent to where a reset wants its group.
OFFSET_RESET = "OFFSET_RESET"

_COMMIT = int(PullFlag.COMMIT_OFFSET)


def is_there(header: PullMessageRequest, reset: int) -> bool:
    """Whether a pull comes from a client that is where a reset wants it, with nothing unfinished.

    Clients that are told to move stop for ten seconds. One that has just asked for its progress and
    begins there has nothing to move; Apache's broker tells it to all the same. A client that pulls
    there but reports less still has older messages, which it would consume. And who does not report
    does not know.
    """
    if header.queue_offset != reset or header.keep_reset:
        return False
    return not reset or bool(header.sys_flag & _COMMIT and header.commit_offset == reset)

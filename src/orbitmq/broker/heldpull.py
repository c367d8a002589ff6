"""A pull that found nothing and waits: what it asked for, and what it has seen since."""

from __future__ import annotations

from orbitmq.broker.compiledfilters import memory_of
from orbitmq.broker.errors import Refused
from orbitmq.filter.subscription import MessageFilter
from orbitmq.remoting.connection import Connection
from orbitmq.wire.command import Command
from orbitmq.wire.headers.pull import PullMessageRequest

#: So many bytes of a request count for one that waits.
_USUAL_BYTES = 4 * 1024
#: So many of a filter that it brought; what comes with a shorter request is no larger.
_USUAL_FILTER = 16 * 1024
_SHORT_REQUEST = 512


class HeldPull:
    """A pull that waits."""

    __slots__ = (
        "connection",
        "deadline",
        "group",
        "has_waited",
        "header",
        "is_alone",
        "is_answered",
        "is_held",
        "is_put_off",
        "judged",
        "offset",
        "queue_id",
        "refusal",
        "request",
        "rules",
        "since",
        "topic",
        "wanted",
        "weight",
    )

    def __init__(
        self,
        connection: Connection,
        request: Command,
        topic: str,
        queue_id: int,
        group: str,
        offset: int,
        wanted: MessageFilter,
        *,
        rules: int = 0,
        header: PullMessageRequest | None = None,
    ) -> None:
        self.connection = connection
        self.request = request
        #: The request's, if it is kept: it shares its texts with this.
        self.header = header
        self.topic = topic
        self.queue_id = queue_id
        self.group = group
        #: The first message that the filter has not judged.
        self.offset = offset
        self.wanted = wanted
        #: The state of the access rules (`Access.version`) that let it pass.
        self.rules = rules
        #: Why it may not be answered with messages any more.
        self.refusal: Refused | None = None
        #: How many usual ones it counts for.
        size = request.kept_bytes
        self.weight = 1 + size // _USUAL_BYTES
        if size > _SHORT_REQUEST:
            self.weight += memory_of(wanted) // _USUAL_FILTER
        self.since = 0.0
        self.deadline = 0.0
        self.is_held = False
        #: Whether nothing else is to be written with its answer: then that is written at once.
        self.is_alone = False
        #: Whether it has waited for its turn to have its group's expression compiled.
        self.has_waited = False
        #: Whether an answer was given to its connection, which does not count it as open any more.
        self.is_answered = False
        self.is_put_off = False
        #: The message that woke it, if that is the last of its queue and the filter, which looks at
        #: the tag alone, lets it pass; else -1.
        self.judged = -1

    @property
    def key(self) -> tuple[str, int]:
        """The queue that it waits for."""
        return (self.topic, self.queue_id)

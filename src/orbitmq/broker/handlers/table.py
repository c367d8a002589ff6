"""The families that a broker has."""

from __future__ import annotations

from orbitmq.broker.errors import BrokerError
from orbitmq.broker.handlers.assignment import Assigning
from orbitmq.broker.handlers.configuration import Configuration
from orbitmq.broker.handlers.connections import Connections
from orbitmq.broker.handlers.family import Family, MakeFamily, refusing
from orbitmq.broker.handlers.groups import Groups
from orbitmq.broker.handlers.locks import Locking
from orbitmq.broker.handlers.membership import Membership
from orbitmq.broker.handlers.messages import Messages
from orbitmq.broker.handlers.offsets import Offsets
from orbitmq.broker.handlers.pull import Pulling
from orbitmq.broker.handlers.recall import Recalling
from orbitmq.broker.handlers.relaying import Relaying
from orbitmq.broker.handlers.replication import Replication
from orbitmq.broker.handlers.replies import Replying
from orbitmq.broker.handlers.resetting import Resetting
from orbitmq.broker.handlers.send import Sending
from orbitmq.broker.handlers.sendback import SendingBack
from orbitmq.broker.handlers.statistics import Statistics
from orbitmq.broker.handlers.topics import Topics
from orbitmq.broker.handlers.transactions import Transactions
from orbitmq.broker.parts import Parts
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.codes import RequestCode

#: In the order in which they are made.
FAMILIES: tuple[MakeFamily, ...] = (
    Sending,
    Pulling,
    Offsets,
    Membership,
    Assigning,
    Locking,
    SendingBack,
    Transactions,
    Replying,
    Recalling,
    Messages,
    Topics,
    Groups,
    Resetting,
    Relaying,
    Connections,
    Statistics,
    Configuration,
    Replication,
)


#: Answer refusals themselves, and are measured where they are answered: nothing around these.
_SENDS = frozenset(
    {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
    }
)
#: Measured where they are answered.
_PULLS = frozenset({RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE})


def handlers_of(parts: Parts, families: tuple[MakeFamily, ...] = FAMILIES) -> dict[int, Handler]:
    """Make all families, and join what they answer."""
    table: dict[int, Handler] = {}
    for make in families:
        family: Family = make(parts)
        for code, handler in family.handlers().items():
            if code in table:
                raise BrokerError(f"two families answer request code {int(code)}")
            table[int(code)] = _wrapped(parts, int(code), handler)
    return table


def _wrapped(parts: Parts, code: int, handler: Handler) -> Handler:
    """The handler, with what every handler has around it and does not do itself."""
    if code in _SENDS:
        return handler
    handler = refusing(handler)
    return handler if code in _PULLS else parts.latencies.timed(code, handler)

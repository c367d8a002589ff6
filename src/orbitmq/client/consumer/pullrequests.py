"""Pulls as they go over the wire.

Nearly everything in a pull is the same as in the one before, of whatever queue of the topic. It is
encoded once, with gaps for the numbers that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from orbitmq.client.topicroute import MASTER
from orbitmq.wire.codes import RequestCode
from orbitmq.wire.command import Command
from orbitmq.wire.headers.pull import PullFlag, PullMessageRequest
from orbitmq.wire.requesttemplates import RequestTemplate

if TYPE_CHECKING:
    from orbitmq.client.consumer.owned import OwnedQueue
    from orbitmq.client.consumer.progress import ProgressStore
    from orbitmq.client.consumer.pullsettings import PullSettings
    from orbitmq.client.consumer.subscription import Subscription
    from orbitmq.remoting.blocking import Encode
    from orbitmq.remoting.connection import Connection
    from orbitmq.wire.frame import Bytes

_PUSHED: Final = RequestCode.PULL_MESSAGE
_POLLED: Final = RequestCode.LITE_PULL_MESSAGE
_COMMIT: Final = int(PullFlag.COMMIT_OFFSET)
_VARYING: Final = (
    "queue_id",
    "queue_offset",
    "sys_flag",
    "commit_offset",
    "suspend_timeout_millis",
)


class PullRequests:
    """Encodes the pulls of one consumer."""

    def __init__(
        self,
        group: str,
        settings: PullSettings,
        *,
        is_polled: bool = False,
        progress: ProgressStore | None = None,
    ) -> None:
        """With `progress`, pulls carry it for the broker to store; in broadcasting they do not."""
        self._group = group
        self._settings = settings
        self._progress = progress
        self._posts = settings.post_subscription or is_polled
        self._flag = int(PullFlag.SUSPEND)
        if self._posts:
            self._flag |= int(PullFlag.SUBSCRIPTION)
        if is_polled:
            self._flag |= int(PullFlag.LITE_PULL)
        self._code = _POLLED if is_polled else _PUSHED
        #: Brokers that know no pulls but the usual ones: those before 5.0.
        self._old_brokers: set[str] = set()
        #: By topic and broker; each for one version of the subscription.
        self._templates: dict[
            tuple[str, str], tuple[Subscription, RequestTemplate[PullMessageRequest]]
        ] = {}

    def code(self, broker: str) -> RequestCode:
        """Polled pulls have a code of their own where brokers know it: a pool of their own."""
        return _PUSHED if broker in self._old_brokers else self._code

    def not_supported(self, broker: str, code: RequestCode) -> bool:
        """A broker does not know a pull of this code; whether it can be asked in another way."""
        if code is not _POLLED:
            return False
        self._old_brokers.add(broker)
        for key in [key for key in self._templates if key[1] == broker]:
            del self._templates[key]
        return True

    def encoder(
        self,
        owned: OwnedQueue,
        subscription: Subscription,
        broker_id: int,
        connection: Connection,
        hold: float,
    ) -> Encode:
        """What encodes the next pull of a queue from a broker, which may keep it so long."""
        queue = owned.queue
        progress, flag = 0, self._flag
        if self._progress is not None and broker_id == MASTER:
            # A slave would store it nowhere.
            progress = self._progress.read(queue) or 0
            if progress > 0:
                flag |= _COMMIT
        varying = (queue.id, owned.next_offset, flag, progress, round(hold * 1000))
        if connection.prepares:
            code = self.code(queue.broker)
            values = dict(zip(_VARYING, varying, strict=True))
            header = PullMessageRequest(**self._constant(owned, subscription), **values)  # type: ignore[arg-type]  # named as declared

            def prepared(opaque: int) -> Sequence[Bytes]:
                return connection.encoded(Command.request(code, header, opaque=opaque))

            return prepared
        template = self._template(owned, subscription)
        return lambda opaque: template.pieces(opaque, *varying)

    def _template(
        self, owned: OwnedQueue, subscription: Subscription
    ) -> RequestTemplate[PullMessageRequest]:
        key = (owned.queue.topic, owned.queue.broker)
        known = self._templates.get(key)
        if known is not None and known[0] is subscription:
            return known[1]
        constant = self._constant(owned, subscription)
        code = self.code(owned.queue.broker)
        template = RequestTemplate(code, PullMessageRequest, _VARYING, constant=constant)
        self._templates[key] = (subscription, template)
        return template

    def _constant(self, owned: OwnedQueue, subscription: Subscription) -> dict[str, object]:
        settings = self._settings
        return {
            "consumer_group": self._group,
            "topic": owned.queue.topic,
            "broker_name": owned.queue.broker,
            "max_msg_nums": settings.batch_size,
            "max_msg_bytes": settings.batch_bytes,
            # What is sent along needs no version: the broker compares nothing.
            "sub_version": 0 if self._posts and subscription.is_by_tags else subscription.version,
            "subscription": subscription.expression if self._posts else None,
            "expression_type": subscription.type,
        }

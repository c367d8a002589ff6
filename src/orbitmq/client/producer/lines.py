"""Messages that were submitted: which are sent at once, and which wait for which.

What is not ready - the queues of its topic are not known, its broker is not connected - waits, and
with it only what might overtake it on the way to its queue:

* While the queues of a topic are not known, all of its messages wait in one line. Once they are
  known, each is looked at again.
* From then on messages wait for their broker, behind others of their topic that do. A broker that
  cannot be reached does not hold up what is for another one, nor for longer than half of its time
  what may go to another one.
* Queues may be forgotten again meanwhile. What comes then waits for queues, and if there are none
  it is told so at once.

All of this belongs to the loop; other threads only append to what was submitted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from orbitmq.client.producer.core import ProducerCore
from orbitmq.client.producer.publishing import Publisher
from orbitmq.client.producer.results import SendResult
from orbitmq.client.producer.sending import Sending, outcome_at_stop

Submitted: TypeAlias = concurrent.futures.Future[SendResult]

#: A message and its future.
Submission: TypeAlias = tuple[Sending, Submitted]

#: Messages in the order of their submission.
Line: TypeAlias = deque[Submission]

#: A topic and the broker that is waited for; None while its queues are not known.
_Key: TypeAlias = tuple[str, str | None]

#: What may go elsewhere waits for this part of its time, as a first attempt would; then for this
#: part of the rest, and so on, as long as there is nowhere to go and at least so many seconds.
_PATIENCE: Final = 0.5
_LEAST: Final = 0.001


class _WaitingLine:
    """Those that wait for the same, in the order of their submission.

    What is done for the first one ends with its time. Each of the others leaves, and is told, when
    its own time is up, however long those before it may wait; or before that, for another broker.
    """

    def __init__(
        self,
        monotonic: Callable[[], float],
        expire: Callable[[Sending, Submitted], None],
        redirect: Callable[[Submission, str], None],
    ) -> None:
        """`expire` is given who has left so; `redirect`, who is not to go to the broker named."""
        self._monotonic = monotonic
        self._expire = expire
        self._redirect = redirect
        self._members: OrderedDict[Submitted, tuple[Sending, asyncio.TimerHandle]] = OrderedDict()
        #: Those of them that may go to any queue.
        self._free: OrderedDict[Submitted, None] = OrderedDict()
        #: The broker that is being connected to, if the topic has others.
        self.avoidable: str | None = None

    def __len__(self) -> int:
        return len(self._members)

    @property
    def first(self) -> Submission:
        sent, (sending, _) = next(iter(self._members.items()))
        return sending, sent

    def add(self, submission: Submission) -> None:
        sending, sent = submission
        self._members[sent] = sending, self._timer(submission)
        if not sending.is_bound:
            self._free[sent] = None

    def take(self, sent: Submitted) -> Submission:
        sending, timer = self._members.pop(sent)
        self._free.pop(sent, None)
        timer.cancel()
        return sending, sent

    def take_all(self) -> list[Submission]:
        return [self.take(sent) for sent in list(self._members)]

    def redirect_all(self, broker: str) -> None:
        """The broker cannot be reached: those that may go to another one do, in time for it."""
        for sent in list(self._free):
            self._redirect(self.take(sent), broker)

    def _timer(self, submission: Submission) -> asyncio.TimerHandle:
        sending, sent = submission
        left = sending.deadline - self._monotonic()
        call_later = asyncio.get_running_loop().call_later
        if sending.is_bound or left < _LEAST:
            return call_later(left, self._time_is_up, sent)
        return call_later(_PATIENCE * left, self._patience_is_over, sent)

    def _time_is_up(self, sent: Submitted) -> None:
        if sent is not self.first[1]:
            self._expire(*self.take(sent))

    def _patience_is_over(self, sent: Submitted) -> None:
        first = self.first[1]
        if sent is first:
            return
        # There may be nowhere to go, or a callback may want the program to end before its turn.
        sending, _ = self._members[sent]
        self._members[sent] = sending, self._timer((sending, sent))
        broker = self.avoidable
        if broker is not None:
            for each in self._free_until(sent, first):
                self._redirect(self.take(each), broker)

    def _free_until(self, last: Submitted, first: Submitted) -> list[Submitted]:
        """Also those before it, which it would overtake; but not the first of the line."""
        found = []
        for sent in self._free:
            if sent is not first:
                found.append(sent)
            if sent is last:
                break
        return found


class WaitingLines:
    """Begins what was submitted to one producer."""

    def __init__(
        self,
        core: ProducerCore,
        submitted: Line,
        finish: Callable[[Submitted, SendResult | BaseException], None],
    ) -> None:
        """`submitted` is what is to be begun; `finish` is told each outcome."""
        self._core = core
        self._submitted = submitted
        self._finish = finish
        self._monotonic = core.engine.clock.monotonic
        self._lines: dict[_Key, _WaitingLine] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._lines

    def begin_submitted(self) -> None:
        """Send what was submitted, or have it wait."""
        try:
            while self._submitted:
                submission = self._submitted.popleft()
                sending, sent = submission
                try:
                    publisher = self._core.publisher
                    is_ready = publisher.is_ready(sending)
                    if self._lines and (line := self._line_before(sending)) is not None:
                        line.add(submission)
                    elif is_ready:
                        publisher.begin(sending, partial(self._finish, sent))
                    else:
                        self._wait_in_line(publisher, submission)
                except Exception as error:  # noqa: BLE001  # whatever it is: the others are sent
                    self._finish(sent, error)
                except BaseException as error:
                    self._finish(sent, error)
                    raise
        finally:
            if self._submitted:  # a callback or a selector wants the program to end
                self._begin_soon()

    def _line_before(self, sending: Sending) -> _WaitingLine | None:
        """Those that it might overtake."""
        topic, first = sending.draft.topic, sending.first
        line = self._lines.get((topic, None))
        if line is None and first is not None:
            line = self._lines.get((topic, first.broker))
        return line

    def _wait_in_line(self, publisher: Publisher, submission: Submission) -> None:
        """As the first one of a new line."""
        sending = submission[0]
        topic, first = sending.draft.topic, sending.first
        broker = first.broker if first is not None and publisher.knows(topic) else None
        key = topic, broker
        line = _WaitingLine(self._monotonic, partial(self._expire, publisher), self._redirect)
        self._core.engine.spawn(self._serve(publisher, key, line), "connect")
        line.add(submission)
        self._lines[key] = line

    def _expire(self, publisher: Publisher, sending: Sending, sent: Submitted) -> None:
        self._finish(sent, publisher.expired(sending))

    async def _serve(self, publisher: Publisher, key: _Key, line: _WaitingLine) -> None:
        """Make the first message of a line ready, and send it whatever came of that; and so on."""
        topic, broker = key
        try:
            while line and not (broker is None and publisher.knows(topic)):
                sending, sent = line.first
                given_up: str | None = None
                if not publisher.is_ready(sending):
                    found = await publisher.find(sending)
                    if broker is None and publisher.knows(topic):
                        break
                    if not isinstance(found, Exception):
                        queue, others = found
                        line.avoidable = queue.broker if others else None
                        if not await publisher.connect(sending, queue, others, leaves_half=True):
                            given_up = line.avoidable
                        line.avoidable = None
                    elif broker is None and self._has_lines_for_brokers(topic):
                        # To send it is to look again: a queue that is back by then is one that
                        # others wait for, since before it was forgotten.
                        line.take(sent)
                        self._finish(sent, found)
                        continue
                self._begin(line.take(sent))
                if given_up is not None:
                    line.redirect_all(given_up)
        except (asyncio.CancelledError, GeneratorExit):
            for sending, sent in line.take_all():
                self._finish(sent, outcome_at_stop(sending))
            raise
        finally:
            del self._lines[key]
            if line:
                # Their queues are known now; or a callback wants the program to end.
                self._submitted.extendleft(reversed(line.take_all()))
                self._begin_soon()

    def _has_lines_for_brokers(self, topic: str) -> bool:
        return any(each == topic and broker is not None for each, broker in self._lines)

    def _redirect(self, submission: Submission, broker: str) -> None:
        """It is never again in a line: from now on it is sent like any other, until it is told."""
        self._begin(submission, avoid=broker)

    def _begin(self, submission: Submission, avoid: str | None = None) -> None:
        sending, sent = submission
        try:
            publisher = self._core.publisher
            if avoid is not None:
                publisher.pass_by(sending, avoid)
            publisher.begin(sending, partial(self._finish, sent))
        except Exception as error:  # noqa: BLE001  # whatever it is: the others are sent
            self._finish(sent, error)
        except BaseException as error:
            self._finish(sent, error)
            raise

    def _begin_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.begin_submitted)

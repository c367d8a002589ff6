"""Messages that were submitted: which are sent at once, and which wait for which.

What is not ready - the queues of its topic are not known, its broker is not connected - waits, and
with it only what might overtake it on the way to its queue:

* While the queues of a topic are not known, all of its messages wait in one line. Once they are
  known, each is looked at again.
* From then on messages wait for their broker, behind others of their topic that do. A broker that
  cannot be reached does not hold up what is for another one.

All of this belongs to the loop; other threads only append to what was submitted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from orbitmq.client.producer.core import ProducerCore
from orbitmq.client.producer.publishing import Publisher
from orbitmq.client.producer.results import SendResult
from orbitmq.client.producer.sending import Sending, outcome_at_stop

Submitted: TypeAlias = concurrent.futures.Future[SendResult]

#: Messages in the order of their submission, and their futures.
Line: TypeAlias = deque[tuple[Sending, Submitted]]

#: A topic and the broker that is waited for; None while its queues are not known.
_Key: TypeAlias = tuple[str, str | None]


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
        self._lines: dict[_Key, Line] = {}

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
                        line.append(submission)
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

    def _line_before(self, sending: Sending) -> Line | None:
        """Those that it might overtake."""
        topic, first = sending.draft.topic, sending.first
        line = self._lines.get((topic, None))
        if line is None and first is not None:
            line = self._lines.get((topic, first.broker))
        return line

    def _wait_in_line(self, publisher: Publisher, submission: tuple[Sending, Submitted]) -> None:
        """As the first one of a new line."""
        sending = submission[0]
        topic, first = sending.draft.topic, sending.first
        broker = first.broker if first is not None and publisher.knows(topic) else None
        key = topic, broker
        line = deque((submission,))
        self._core.engine.spawn(self._serve(publisher, key, line), "connect")
        self._lines[key] = line

    async def _serve(self, publisher: Publisher, key: _Key, line: Line) -> None:
        """Make the first message of a line ready, and send it whatever came of that; and so on."""
        topic, broker = key
        try:
            while line and not (broker is None and publisher.knows(topic)):
                sending = line[0][0]
                is_given_up = False
                if not publisher.is_ready(sending):
                    found = await publisher.find(sending)
                    if broker is None and publisher.knows(topic):
                        break
                    if found is not None:
                        queue, others = found
                        is_reached = await publisher.connect(
                            sending, queue, others, leaves_half=True
                        )
                        is_given_up = others and not is_reached
                self._begin(line.popleft())
                if is_given_up:
                    self._let_go_elsewhere(line)
        except (asyncio.CancelledError, GeneratorExit):
            given_up = list(line)
            line.clear()
            for sending, sent in given_up:
                self._finish(sent, outcome_at_stop(sending))
            raise
        finally:
            del self._lines[key]
            if line:
                # Their queues are known now; or a callback wants the program to end.
                self._submitted.extendleft(reversed(line))
                self._begin_soon()

    def _let_go_elsewhere(self, line: Line) -> None:
        """Their broker cannot be reached: those that may go to another one do, in time for it."""
        free = [each for each in line if not each[0].is_bound]
        bound = [each for each in line if each[0].is_bound]
        line.clear()
        line.extend(free + bound)
        for sending, _ in free:
            sending.first = None
            self._begin(line.popleft())

    def _begin(self, submission: tuple[Sending, Submitted]) -> None:
        sending, sent = submission
        try:
            self._core.publisher.begin(sending, partial(self._finish, sent))
        except Exception as error:  # noqa: BLE001  # whatever it is: the others are sent
            self._finish(sent, error)
        except BaseException as error:
            self._finish(sent, error)
            raise

    def _begin_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.begin_submitted)

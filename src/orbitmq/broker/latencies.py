"""How long requests take, measured where it costs next to nothing.

What is put is measured by turns: from the beginning of the write that a turn ends with, until its
messages are stored as the flush policy says. All messages of a turn share that time, so that a
turn of a hundred costs two looks at the clock. Figures for people are those of the last minute that
is complete, as RocketMQ's are.

Other requests are measured one by one, from the call of their handler to its answer. What is
answered by tasks or by other parts of the broker, much later, is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from orbitmq.broker.histogram import Histogram
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.remoting.errors import Refused
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command

#: Milliseconds, as in RocketMQ's metrics.
RPC_BOUNDS = (1.0, 3.0, 5.0, 7.0, 10.0, 100.0, 1000.0, 2000.0, 3000.0)
CREATE_BOUNDS = (10.0, 100.0, 1000.0, 3000.0, 5000.0)
#: Milliseconds: finer than RocketMQ's at the lower end, where our times are.
PUT_BOUNDS = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.7),
    *(float(each) for each in range(1, 20)),
    *(float(each) for each in range(20, 50, 2)),
    *(float(each) for each in range(50, 100, 5)),
    *(float(each) for each in range(100, 200, 10)),
    *(float(each) for each in range(200, 500, 50)),
    *(float(each) for each in range(500, 1000, 100)),
    *(float(each) for each in range(1000, 10_001, 1000)),
)
#: The stretches of `putMessageDistributeTime`, and where each ends in milliseconds.
_STRETCHES = (
    ("[<=0ms]", 0.0),
    ("[0~10ms]", 10.0),
    ("[10~50ms]", 50.0),
    ("[50~100ms]", 100.0),
    ("[100~200ms]", 200.0),
    ("[200~500ms]", 500.0),
    ("[500ms~1s]", 1000.0),
    ("[1~2s]", 2000.0),
    ("[2~3s]", 3000.0),
    ("[3~4s]", 4000.0),
    ("[4~5s]", 5000.0),
    ("[5~10s]", 10_000.0),
    ("[10s~]", float("inf")),
)
_WINDOW = 60.0
#: Instead of a request code, for what the broker puts by itself.
OWN = 0

#: Request code, response code, whether it was held before.
CallKey = tuple[int, int, bool]

CREATING = {
    RequestCode.UPDATE_AND_CREATE_TOPIC: "rocketmq_topic_create_execution_time",
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: (
        "rocketmq_consumer_group_create_execution_time"
    ),
}


class PutTimes:
    """Times of puts: since the start by request and answer, and of the last minute."""

    def __init__(self, now: float) -> None:
        self.longest = 0.0  #: since the start, in milliseconds
        self._since = now
        self._tables: dict[tuple[int, int], Histogram] = {}
        self._before = [0] * (len(PUT_BOUNDS) + 1)
        self._last = Histogram(PUT_BOUNDS)

    def note(self, code: int, response: int, milliseconds: float, times: int) -> None:
        """So many messages, sent with this code, were stored in this time."""
        table = self._tables.get((code, response))
        if table is None:
            table = self._tables[code, response] = Histogram(PUT_BOUNDS)
        table.note(milliseconds, times)
        if milliseconds > self.longest:
            self.longest = milliseconds

    def tick(self, now: float) -> None:
        """Begin another minute when one is over."""
        if now - self._since < _WINDOW:
            return
        self._since = now
        every = [sum(counts) for counts in zip(*self._counts(), strict=True)]
        self._last.counts = [
            count - before for count, before in zip(every, self._before, strict=True)
        ]
        self._before = every

    def _counts(self) -> list[list[int]]:
        nothing = [0] * (len(PUT_BOUNDS) + 1)
        return [nothing, *(table.counts for table in self._tables.values())]

    def percentile(self, share: float) -> float:
        """Of the last complete minute, in milliseconds."""
        return self._last.percentile(share)

    def shares(self) -> str:
        """How the last complete minute is spread, as RocketMQ words it."""
        upto = dict(self._last.cumulative())
        words: list[str] = []
        passed = 0
        for name, end in _STRETCHES:
            count = upto.get(end, 0) - passed if end else 0
            words.append(f"{name}:{count}")
            passed += count
        return " ".join(words)

    def calls(self) -> Iterator[tuple[CallKey, Histogram]]:
        """Those of requests, with the bounds of all requests."""
        for (code, response), table in self._tables.items():
            if code != OWN:
                yield (code, response, False), table.coarser(RPC_BOUNDS)


class Latencies:
    """The times of one broker's requests."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic
        self.puts = PutTimes(monotonic())
        self.longest_pull = 0.0
        self._calls: dict[CallKey, Histogram] = {}
        #: By request code and success: how long it took to make topics and groups.
        self.creations: dict[tuple[int, bool], Histogram] = {}

    def stored(self, began: float, codes: list[int], own: int, response: int) -> None:
        """A turn is stored whose write began then: requests of these codes, and puts of our own."""
        milliseconds = (self.monotonic() - began) * 1000
        note = self.puts.note
        if codes:
            first, count = codes[0], len(codes)
            if count == 1 or codes.count(first) == count:
                note(first, response, milliseconds, count)
            else:
                for code, times in Counter(codes).items():
                    note(code, response, milliseconds, times)
        if own:
            note(OWN, response, milliseconds, own)

    def pulled(self, code: int, response: int, seconds: float, *, was_held: bool) -> None:
        """A pull was answered so long after it came."""
        milliseconds = seconds * 1000
        if not was_held and milliseconds > self.longest_pull:
            self.longest_pull = milliseconds
        self.call((code, response, was_held), milliseconds)

    def call(self, key: CallKey, milliseconds: float) -> None:
        """A request took so long."""
        histogram = self._calls.get(key)
        if histogram is None:
            histogram = self._calls[key] = Histogram(RPC_BOUNDS)
        histogram.note(milliseconds)

    def calls(self) -> list[tuple[CallKey, Histogram]]:
        """All requests by code, answer and whether they were held."""
        table = dict(self._calls)
        # Sends that are refused are noted there, those that are stored here.
        table.update(self.puts.calls())
        return list(table.items())

    def timed(self, code: int, handler: Handler) -> Handler:
        """The same handler, measured when it answers at once."""
        monotonic = self.monotonic
        is_creating = code in CREATING

        def handle(connection: Connection, request: Command) -> object:
            began = monotonic()
            try:
                result = handler(connection, request)
            except Refused as refused:
                note(refused.code, began)
                raise
            if type(result) is Command:
                note(result.code, began)
            return result

        def note(response: int, began: float) -> None:
            milliseconds = (monotonic() - began) * 1000
            self.call((code, response, False), milliseconds)
            if is_creating:
                self._created(code, response, milliseconds)

        return handle  # type: ignore[return-value]  # what the handler gives

    def _created(self, code: int, response: int, milliseconds: float) -> None:
        key = (code, response == ResponseCode.SUCCESS)
        histogram = self.creations.get(key)
        if histogram is None:
            histogram = self.creations[key] = Histogram(CREATE_BOUNDS)
        histogram.note(milliseconds)

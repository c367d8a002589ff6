"""Reports the state of queries and pipelines to a console, from a thread of its own.

The console may be away, slow or gone, so nothing here affects a query: the thread sends the newest
report at most twice a second and drops a report that the console does not accept, because the next
one replaces it. It repeats an unchanged report from time to time, so that the console knows that
the driver is alive. Needs no Spark.
"""

from __future__ import annotations

import http.client
import logging
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from orbitmq.clock import Clock, SystemClock
from orbitmq.spark.options import SourceError

log = logging.getLogger(__name__)

#: The variables with the console's address and its token.
CONSOLE_VARIABLE: Final = "ORBITMQ_CONSOLE"
TOKEN_VARIABLE: Final = "ORBITMQ_CONSOLE_TOKEN"  # noqa: S105  # its name

#: Seconds between two rounds with and without changes.
_SOONEST: Final = 0.5
_AGAIN: Final = 15.0
_TIMEOUT: Final = 3.0
#: Of refused reports, the first and every thousandth is logged.
_LOGGED: Final = 1000


class TopicProgress(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A topic in a batch, with Spark's names in JSON. None: not known."""

    topic: str
    num_input_rows: int | None = None
    num_input_bytes: int | None = None  #: of bodies; of a `measured` stream
    input_rows_per_second: float | None = None
    processed_rows_per_second: float | None = None
    lag: int | None = None  #: messages that waited behind the batch when it was planned
    #: How old the last message of the batch was then, 0 without lag; of a `measured` stream.
    lag_seconds: float | None = None


class QueryReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report about a query, in the console's format."""

    state: str  #: running, waiting, failing, failed or stopped
    batch: int | None = None
    rows: int | None = None
    rows_per_second: float | None = None
    input_rows_per_second: float | None = None
    batch_seconds: float | None = None
    group: str | None = None
    topics: tuple[str, ...] = ()
    #: The last batch by topic; empty for a consumer group.
    by_topic: tuple[TopicProgress, ...] = ()
    #: Messages that wait, by `topic@broker:queue`.
    lag: Mapping[str, int] = {}
    #: Since its start: handled, sent back to be delivered again, given up.
    done: int | None = None
    retried: int | None = None
    dead: int | None = None
    #: The share of recent attempts that failed.
    failed_share: float | None = None
    error: str | None = None
    url: str | None = None


class ConsoleLink:
    """Reports of the queries of this process to one console."""

    def __init__(
        self, console: str, *, token: str | None = None, clock: Clock | None = None
    ) -> None:
        """`console` is its address, as in http://localhost:8090. Raises `SourceError`."""
        parts = urllib.parse.urlsplit(console)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SourceError(
                f"the address of a console begins with http:// or https://, got {console!r}"
            )
        self._console = f"{parts.scheme}://{parts.netloc}"
        self._token = token
        self._monotonic = (clock or SystemClock()).monotonic
        # A console is near; what stands between here and the rest of the world does not know it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._failures = 0
        self._news = threading.Condition()
        # Under the condition, which is never held while a console or a query is asked.
        self._watched: dict[str, Callable[[], QueryReport]] = {}
        self._has_news = False
        self._is_over = False
        self._thread: threading.Thread | None = None
        #: The last report that the console accepted, and when. The thread's own.
        self._accepted: dict[str, tuple[bytes, float]] = {}

    def watch(self, name: str, look: Callable[[], QueryReport]) -> None:
        """Report a query from now on; `look` is called by the thread, and must not block."""
        with self._news:
            self._watched[name] = look
            if self._thread is None and not self._is_over:
                self._thread = threading.Thread(
                    target=self._run, name="orbitmq console reports", daemon=True
                )
                self._thread.start()
        self.news()

    def news(self) -> None:
        """Something has changed."""
        with self._news:
            self._has_news = True
            self._news.notify_all()

    def stop(self, timeout: float = 2 * _TIMEOUT) -> None:
        """Send the last reports, and end. May be repeated; waits no longer than `timeout`."""
        with self._news:
            self._is_over = True
            thread, self._thread = self._thread, None
            self._news.notify_all()
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            with self._news:
                self._news.wait_for(lambda: self._has_news or self._is_over, _AGAIN)
                self._has_news = False
                is_over = self._is_over
                watched = dict(self._watched)
            for name, look in watched.items():
                self._report(name, look)
            with self._news:
                # Queries of many small batches have news all the time.
                self._news.wait_for(lambda: self._is_over, 0.0 if is_over else _SOONEST)

    def _report(self, name: str, look: Callable[[], QueryReport]) -> None:
        try:
            body = msgspec.json.encode(look())
        except Exception:
            log.exception("the state of a query could not be read: %s", name)
            return
        known, at = self._accepted.get(name, (b"", float("-inf")))
        if body == known and self._monotonic() - at < _AGAIN:
            return
        try:
            self._post(name, body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._failed(error)
            return
        self._accepted[name] = body, self._monotonic()
        if self._failures:
            log.info("console %s takes reports again", self._console)
            self._failures = 0

    def _post(self, name: str, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(  # noqa: S310  # of http and https only
            f"{self._console}/api/v1/pipelines/{urllib.parse.quote(name, safe='')}",
            data=body,
            headers=headers,
            method="POST",
        )
        with self._opener.open(request, timeout=_TIMEOUT) as answer:
            answer.read()

    def _failed(self, error: Exception) -> None:
        if self._failures % _LOGGED == 0:
            said = str(error)
            if isinstance(error, urllib.error.HTTPError):
                with error:
                    said = f"{said}: {error.read(200).decode(errors='replace')}"
            log.warning("console %s does not take reports: %s", self._console, said)
        elif isinstance(error, urllib.error.HTTPError):
            error.close()
        self._failures += 1

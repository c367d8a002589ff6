"""Peers, what some lines are measured beside: fetched once, before anything is measured.

They stay in `build/`. Where one cannot be fetched the lines that need it say why, and the others
are measured all the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from benchmarks.runner import NotAtHand

ROOT = Path(__file__).parent.parent

#: Is told how far a fetch is, some times a minute.
Tell: TypeAlias = Callable[[str], None]


class NotFetched(Exception):
    """A peer cannot be had, for the reason given."""

    def __init__(self, reason: str, *, is_source_gone: bool = False) -> None:
        """`is_source_gone`: nothing else of the same source can be had now either."""
        super().__init__(reason)
        self.is_source_gone = is_source_gone


@contextmanager
def fetching() -> Iterator[None]:
    """Says in words of the benches what keeps jars from being fetched."""
    # It lives with the tests against Apache.
    from tests.support.maven import Unavailable, Unreachable  # noqa: PLC0415

    try:
        yield
    except Unavailable as error:
        is_source_gone = isinstance(error, Unreachable)
        raise NotFetched(str(error), is_source_gone=is_source_gone) from error


class Peer:
    """Something of others that is fetched to be measured beside."""

    def __init__(
        self, name: str, source: str, places: Sequence[Path], fetch: Callable[[Tell], None]
    ) -> None:
        """It is there when all `places` are. `fetch` makes them, or raises `NotFetched`."""
        self.name = name
        self.source = source
        self.places = places
        self.fetch = fetch
        self.why_not = ""

    def __repr__(self) -> str:
        return f"<Peer {self.name}>"

    @property
    def is_there(self) -> bool:
        return all(place.exists() for place in self.places)

    def check(self) -> None:
        """Raises `NotAtHand` where it is not there."""
        if not self.is_there:
            raise NotAtHand(self.why_not or f"it is not in {self.shown_place}; run: make bench")

    @property
    def shown_place(self) -> str:
        place = self.places[0].parent
        return str(place.relative_to(ROOT) if place.is_relative_to(ROOT) else place)


def fetch_missing(peers: Iterable[Peer]) -> None:
    """Fetch what is not there yet, and say in a line for each source what cannot be had."""
    by_source: dict[str, list[Peer]] = {}
    for peer in dict.fromkeys(peers):
        if not peer.is_there:
            by_source.setdefault(peer.source, []).append(peer)
    for source, missing in by_source.items():
        reasons: dict[str, list[Peer]] = {}
        for place, peer in enumerate(missing):
            try:
                _fetch(peer)
            except NotFetched as error:
                without = missing[place:] if error.is_source_gone else [peer]
                reasons.setdefault(str(error), []).extend(without)
                if error.is_source_gone:
                    break
        for reason, without in reasons.items():
            for peer in without:
                peer.why_not = f"it could not be fetched from {source}: {reason}"
            names = " and ".join(peer.name for peer in without)
            _say(f"measuring without {names}, which cannot be fetched from {source}: {reason}")


def _fetch(peer: Peer) -> None:
    what = f"fetching {peer.name} from {peer.source} into {peer.shown_place}"
    began = time.monotonic()

    def passed() -> str:
        return f"{time.monotonic() - began:.0f} s"

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            peer.fetch(lambda news: status.update(f"{what}: {news}, {passed()}"))
    else:
        _say(what)
        peer.fetch(lambda news: _say(f"{what}: {news}, {passed()}"))
    _say(f"fetched {peer.name} in {passed()}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

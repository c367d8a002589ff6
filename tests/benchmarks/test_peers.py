"""What lines are measured beside is fetched before them, or said to be missing."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.catalogue import BENCHES
from benchmarks.peers import NotFetched, Peer, Tell
from benchmarks.runner import Bench, Sample, Scale

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.runner import Work

NO_WAY = NotFetched("no connection", is_source_gone=True)


def peer_in(folder: Path, name: str, error: NotFetched | None = None) -> Peer:
    place = folder / "stable" / name

    def fetch(tell: Tell) -> None:
        if error is not None:
            raise error
        tell("3 files")
        place.mkdir(parents=True)

    return Peer(name, "the pasture", [place], fetch)


def beside(peer: Peer) -> Bench:
    @contextmanager
    def prepare(_: Scale) -> Iterator[tuple[Work, Work]]:
        peer.check()
        yield lambda: Sample(10, 2.0, 5.0), lambda: Sample(10, 1.0, 1.0)

    return Bench(
        name=f"beside {peer.name}",
        room="peers",
        unit="leaps/s",
        compared_with=peer.name,
        prepare=prepare,
        once_per_round=True,
        peer=peer,
    )


def test_a_peer_that_is_missing_is_fetched_once_and_measured_beside(run, tmp_path):
    lines = [beside(peer_in(tmp_path, "horse"))]

    first, second = run(benches=lines), run(benches=lines)

    (result,) = second.report.results
    assert result.ratio == 0.5
    assert "fetched horse in" in first.err
    assert f"fetching horse from the pasture into {tmp_path / 'stable'}: 3 files" in first.err
    assert "fetch" not in second.err


def test_where_a_source_is_out_of_reach_one_line_says_so_and_the_rest_is_measured(run, tmp_path):
    near = peer_in(tmp_path, "dog")
    near.source = "the yard"
    lines = [
        beside(peer_in(tmp_path, "horse", NO_WAY)),
        beside(peer_in(tmp_path, "cow", AssertionError("not tried"))),  # type: ignore[arg-type]
        beside(near),
    ]

    ran = run(benches=lines)

    horse, cow, dog = ran.report.results
    assert [line for line in ran.err.splitlines() if "without" in line] == [
        "measuring without horse and cow, which cannot be fetched from the pasture: no connection"
    ]
    note = "not at hand: it could not be fetched from the pasture: no connection"
    assert (horse.note, cow.note, dog.ratio) == (note, note, 0.5)


def test_every_line_beside_something_of_others_names_what_is_to_be_fetched():
    words = ("Apache RocketMQ", "C++", "Kafka", "kafka")

    named = {each.name: each.peer is not None for each in BENCHES}
    needed = {each.name: any(word in each.compared_with for word in words) for each in BENCHES}

    assert named == needed
    assert any(needed.values())

"""Offsets as Spark keeps them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.routes import Queue
from orbitmq.spark import options

queues = st.builds(
    Queue,
    topic=st.sampled_from(["orders", "%RETRY%billing", "starting"]),
    broker=st.sampled_from(["broker-a", "broker-b", "10.0.0.1:10911"]),
    id=st.integers(0, 40),
)
positions = st.dictionaries(queues, st.integers(0, 2**63 - 1), max_size=20)


@given(found=positions)
def test_offsets_survive_sparks_log(found):
    offset = json.loads(json.dumps(options.to_json(found)))

    assert options.from_json(offset) == found
    assert not options.is_starting(offset)


@given(found=positions, begins=positions)
def test_the_end_of_a_batch_says_where_it_begins(found, begins):
    here = json.loads(json.dumps(options.starts_here(found)))
    elsewhere = json.loads(json.dumps(options.to_json(found, begins=begins)))

    assert options.from_json(here) == options.from_json(elsewhere) == found
    assert not options.is_starting(here)
    assert not options.is_starting(elsewhere)
    assert (options.stream_start(here), options.new_queue_starts(here)) == (found, {})
    # What is not said, as by versions that said nothing of it, is not made up.
    assert (options.stream_start(elsewhere), options.new_queue_starts(elsewhere)) == (
        begins or None,
        begins,
    )


@given(found=positions, again=positions, begins=positions)
def test_all_that_is_remembered_has_the_shape_of_positions(found, again, begins):
    """Tools read it: topics with queues with numbers, and all that have queues are topics."""
    marks = {queue: options.Mark(offset, 1_700_000_000_000) for queue, offset in found.items()}

    offset = json.loads(json.dumps(options.to_json(found, marks=marks, begins=begins, again=again)))
    here = json.loads(json.dumps(options.starts_here(found, marks=marks)))

    for each in (offset, here):
        assert {topic for topic, queues in each.items() if queues} == {q.topic for q in found}
        assert all(isinstance(at, int) for queues in each.values() for at in queues.values())
        assert options.from_json(each) == found
        assert options.marks_in(each) == marks
    assert (options.new_queue_starts(offset), options.reread_from(offset)) == (begins, again)


def test_ends_of_old_that_say_where_the_batch_began_beside_the_topics_are_understood():
    queue, other = Queue("orders", "broker-a", 0), Queue("orders", "broker-a", 1)
    here = {"orders": {"broker-a:0": 17}, "begins at": "here"}
    elsewhere = {"orders": {"broker-a:0": 17}, "begins at": {"orders": {"broker-a:1": 12}}}

    assert options.from_json(here) == options.from_json(elsewhere) == {queue: 17}
    assert (options.stream_start(here), options.new_queue_starts(here)) == ({queue: 17}, {})
    assert options.stream_start(elsewhere) == options.new_queue_starts(elsewhere) == {other: 12}
    assert not options.marks_in(here)
    assert not options.reread_from(elsewhere)


@pytest.mark.parametrize(
    "note",
    [
        '{"marks":3}',
        '{"marks":{"orders":3}}',
        '{"marks":{"orders":{"broker-a:0":[1]}}}',
        "{",
        "{}x",
    ],
)
def test_a_damaged_note_of_a_checkpoint_is_told_with_its_place(note):
    with pytest.raises(
        options.SourceError, match="folder 'offsets', that this source did not write"
    ):
        options.marks_in({"orders": {"broker-a:0": 17}, note: {}})


@given(found=positions, chance=st.randoms(use_true_random=False))
def test_the_same_positions_are_the_same_text(found, chance):
    """Rule 2: Spark compares texts, and would run empty batches for ever."""
    items = list(found.items())
    chance.shuffle(items)

    assert json.dumps(options.to_json(dict(items))) == json.dumps(options.to_json(found))


@pytest.mark.parametrize("offset", [{"orders": 5}, {"orders": {"0": 5}}, {"orders": {"a:0": None}}])
def test_a_foreign_checkpoint_is_told_apart(offset):
    with pytest.raises(options.SourceError, match="did not write"):
        options.from_json(offset)

"""Members that do not fit together are named, once, and the end of it too."""

from __future__ import annotations

import pytest

from orbitmq.broker.groups import (
    Client,
    ConsumerTable,
    DifferentSubscriptions,
    Disagreements,
    DuplicateClient,
    FindingEvent,
    Variant,
)
from orbitmq.wire.bodies import ConsumerData, SubscriptionData


class Group:
    """A group whose members say things."""

    def __init__(self) -> None:
        self.consumers = ConsumerTable()
        self.disagreements = Disagreements(self.consumers)
        self.now = 0.0

    def beat(
        self, client: str, *said: tuple[str, str] | tuple[str, str, str], channel: str | None = None
    ) -> None:
        self.now += 1.0
        channel = channel or client
        self.consumers.heartbeat(
            channel,
            Client(client, address=channel),
            ConsumerData(
                group_name="g",
                subscription_data_set=tuple(
                    SubscriptionData(
                        topic=entry[0],
                        sub_string=entry[1],
                        expression_type=entry[2] if len(entry) > 2 else "TAG",
                        # Versions differ even among members that agree.
                        sub_version=int(self.now),
                    )
                    for entry in said
                ),
            ),
            now=self.now,
        )

    def check(self) -> tuple[FindingEvent, ...]:
        return self.disagreements.check(self.now)


@pytest.fixture
def group():
    return Group()


def test_members_that_agree_are_not_mentioned(group):
    group.beat("one", ("T", "A || B"), ("U", "*"), ("S", "a > 1", "SQL92"))
    group.beat("two", ("U", ""), ("T", "B||A||A"), ("S", " a > 1", "SQL92"))

    assert group.check() == ()
    assert group.disagreements.open_findings() == ()


def test_different_tags_are_reported_with_both_members(group):
    group.beat("one", ("T", "A"))
    group.beat("two", ("T", "B"))

    finding = DifferentSubscriptions(
        "g", "T", (Variant("A", "TAG", ("one",)), Variant("B", "TAG", ("two",)))
    )
    assert group.check() == (FindingEvent(finding, group.now, is_resolved=False),)
    assert group.disagreements.open_findings("g") == (finding,)
    assert str(finding) == (
        "members of group 'g' subscribe differently to topic 'T': one with TAG 'A', "
        "two with TAG 'B'; messages will be missed until they agree"
    )


def test_a_topic_that_not_everybody_wants_is_reported(group):
    group.beat("one", ("T", "*"), ("U", "*"))
    group.beat("two", ("T", "*"))
    group.beat("three", ("T", "*"))

    (event,) = group.check()

    assert event.finding == DifferentSubscriptions(
        "g", "U", (Variant("*", "TAG", ("one",)), Variant(None, None, ("three", "two")))
    )
    assert "three and 1 more without it" in str(event.finding)


def test_another_language_is_another_subscription(group):
    group.beat("one", ("T", "a"))
    group.beat("two", ("T", "a", "SQL92"))

    assert len(group.check()) == 1


def test_a_finding_is_reported_once_and_its_end_once(group):
    group.beat("one", ("T", "A"))
    group.beat("two", ("T", "B"))
    (began,) = group.check()
    for _ in range(5):
        group.beat("one", ("T", "A"))
        group.beat("two", ("T", "B"))
        assert group.check() == ()

    group.beat("two", ("T", "A"))
    (ended,) = group.check()

    assert ended == FindingEvent(began.finding, began.first_seen, is_resolved=True)
    assert group.check() == ()
    assert group.disagreements.open_findings() == ()


def test_a_finding_goes_on_while_its_members_change(group):
    group.beat("one", ("T", "A"))
    group.beat("two", ("T", "B"))
    (began,) = group.check()

    group.beat("three", ("T", "B"))

    assert group.check() == ()
    (finding,) = group.disagreements.open_findings("g")
    assert isinstance(finding, DifferentSubscriptions)
    assert finding.variants[1].clients == ("three", "two")
    group.consumers.close("one")
    (ended,) = group.check()
    assert ended.is_resolved
    assert ended.first_seen == began.first_seen


def test_a_group_that_is_gone_has_no_findings(group):
    group.beat("one", ("T", "A"))
    group.beat("two", ("T", "B"))
    group.check()

    group.consumers.close("one")
    group.consumers.close("two")

    assert [event.is_resolved for event in group.check()] == [True]


def test_a_member_that_has_not_said_yet_what_it_wants_is_not_blamed(group):
    group.beat("one", ("T", "A"))
    group.consumers.heartbeat(
        "two",
        Client("two"),
        ConsumerData(group_name="g"),
        now=5.0,
        fingerprint=1,
        without_subscriptions=True,
    )

    assert group.check() == ()


def test_a_bad_expression_is_compared_by_its_text(group):
    group.beat("one", ("T", "||"))
    group.beat("two", ("T", "||"))
    assert group.check() == ()

    group.beat("two", ("T", "A"))
    assert len(group.check()) == 1


def test_one_id_on_two_live_connections_is_reported(group):
    group.beat("same", ("T", "*"), channel="10.0.0.1:1")
    group.beat("same", ("T", "*"), channel="10.0.0.2:2")
    assert group.check() == ()
    group.beat("same", ("T", "*"), channel="10.0.0.1:1")
    assert group.check() == ()
    group.beat("same", ("T", "*"), channel="10.0.0.2:2")

    (event,) = group.check()

    assert event.finding == DuplicateClient("g", "same", ("10.0.0.1:1", "10.0.0.2:2"))
    assert "'same' (10.0.0.1:1, 10.0.0.2:2)" in str(event.finding)
    group.beat("same", ("T", "*"), channel="10.0.0.1:1")
    assert group.check() == ()

    group.consumers.close("10.0.0.2:2")
    assert [entry.is_resolved for entry in group.check()] == [True]


def test_a_client_that_reconnects_is_no_duplicate(group):
    group.beat("one", ("T", "*"), channel="old connection")
    group.beat("one", ("T", "*"), channel="old connection")

    for _ in range(4):
        group.beat("one", ("T", "*"), channel="new connection")
        assert group.check() == ()
    group.consumers.close("old connection")
    assert group.check() == ()


def test_groups_in_which_nothing_happened_are_not_looked_at(group, monkeypatch):
    group.beat("one", ("T", "*"))
    group.check()
    looked_at: list[str] = []

    def note(name):
        looked_at.append(name)
        return ()

    monkeypatch.setattr(group.consumers, "members", note)

    group.check()

    assert looked_at == []

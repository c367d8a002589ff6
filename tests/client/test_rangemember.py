"""What a reader of ranges says of itself in heartbeats."""

from __future__ import annotations

from orbitmq.client.engine import Engine
from orbitmq.client.ranges.cluster import RangeMember
from orbitmq.client.ranges.connections import RangeFilter
from orbitmq.client.settings import ClientSettings

EVERYTHING = RangeFilter()


def named(member: RangeMember) -> list[str]:
    return [each.topic for each in member.consumer_data().subscription_data_set]


async def test_topics_are_named_in_the_order_in_which_they_are_asked_for():
    member = RangeMember(Engine(ClientSettings(name_servers=("127.0.0.1:9",))), "readers")
    topics = [f"t{number * 7 % 40}" for number in range(40)]

    member.subscribe([*topics, topics[0]], EVERYTHING)
    first = named(member)
    member.subscribe(["new", *topics[::-2], "newer"], EVERYTHING)

    assert first == topics
    # Those that stay keep their places and versions.
    assert named(member) == [*topics[1::2], "new", "newer"]

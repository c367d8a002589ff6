"""What is wrong, in words."""

from __future__ import annotations

from orbitmq.client.admin import ClusterStatus, GroupSettings, Unreachable
from orbitmq.console.faults import Weight, find_faults, gathered
from orbitmq.console.samples import GroupSample, Snapshot, TopicPart


def group(name: str, lag: int = 0, age: float = 0.0, **fields: object) -> GroupSample:
    rates = (fields.pop("came", 0.0), fields.pop("went", 0.0))
    part = TopicPart("orders", lag, 4, *rates, age)  # type: ignore[arg-type]
    base = {"name": name, "settings": GroupSettings(name), "brokers": ("a",), "parts": (part,)}
    return GroupSample(**base | fields)  # type: ignore[arg-type]


def snapshot(*groups: GroupSample, **fields: object) -> Snapshot:
    base = {
        "at": 0.0,
        "cluster": ClusterStatus((), ()),
        "topics": {},
        "groups": {each.name: each for each in groups},
    }
    return Snapshot(**base | fields)  # type: ignore[arg-type]


def test_a_group_that_is_well_is_no_fault() -> None:
    well = (
        group("done"),
        group("keeping", 5, 1.0, members=2, came=10.0, went=10.0),
        group("draining", 5000, 900.0, members=2, came=10.0, went=100.0),
        group("just-behind", 5, 30.0, members=1, came=20.0, went=10.0),
        group("idle-without-members", members=0),
    )

    assert find_faults(snapshot(*well), (), 0.0) == ()


def test_each_trouble_has_its_kind_its_words_and_a_command() -> None:
    sick = (
        group("hangs", 12, 300.0, members=1, still=240.0),
        group("left", 1, 300.0, members=0),
        group("slow", 700, 300.0, members=2, came=50.0, went=20.0),
        group("off", 3, 10.0, settings=GroupSettings("off", is_enabled=False)),
        group("dies", dead_letters=9, dead_last_hour=2),
        group("odd", is_uniform=False),
    )

    faults = {fault.subject: fault for fault in find_faults(snapshot(*sick), (), 0.0)}

    assert {name: fault.kind for name, fault in faults.items()} == {
        "hangs": "stalled",
        "left": "nobody consumes",
        "slow": "falling behind",
        "off": "paused",
        "dies": "dead letters",
        "odd": "settings differ",
    }
    assert "12 messages wait, the oldest for 5 min, and none was finished for 4 min" in (
        faults["hangs"].text
    )
    assert faults["left"].text.startswith("1 message waits")
    assert "50 come in each second and 20 are finished" in faults["slow"].text
    assert faults["off"].command == "orbitmq group resume off"
    assert faults["dies"].link == "/dead-letters/dies"
    assert all(fault.command for fault in faults.values())


def test_the_worst_comes_first_and_forty_of_one_kind_are_one_line() -> None:
    many = [group(f"left-{number}", 1, 300.0, members=0) for number in range(40)]
    faults = find_faults(snapshot(*many, group("hangs", 1, 300.0, members=1, still=99.0)), (), 0.0)

    kinds = gathered(faults)

    assert faults[0].weight is Weight.BAD
    assert [(kind["kind"], kind["count"]) for kind in kinds] == [
        ("stalled", 1),
        ("nobody consumes", 40),
    ]
    shown = kinds[1]["faults"]
    assert isinstance(shown, list)
    assert len(shown) == 5


def test_a_broker_whose_part_is_missing_is_named() -> None:
    (fault,) = find_faults(snapshot(unreachable=(Unreachable("broker-b", "refused"),)), (), 0.0)

    assert (fault.subject, fault.weight) == ("broker-b", Weight.BAD)
    assert "refused" in fault.text

"""The options that pipelines which read a topic share."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

#: Beside the type of an option: topics that must be there before anything is started.
PRESENT: Final = object()
#: Of an option that names a group whose dead letters are read: one of the two is there before.
LETTERS: Final = object()
Topic: TypeAlias = Annotated[str, "The topic to read; several with commas between them.", PRESENT]
Group: TypeAlias = Annotated[
    str | None, "The group whose progress is reported; by default named after the pipeline."
]
Tags: TypeAlias = Annotated[str | None, "Only messages with one of these tags, as in a || b."]
Start: TypeAlias = Annotated[
    str, "Where the first run begins: earliest, latest, group, or an ISO time with its zone."
]
Most: TypeAlias = Annotated[int | None, "Messages that one batch takes at most."]


def wanted(start: str, tags: str | None, max_per_batch: int | None) -> dict[str, str]:
    """The same as options of the source, which checks them."""
    options = {}
    if start.lower() in ("earliest", "latest", "group"):
        options["startingOffsets"] = start
    else:
        options |= {
            "startingTimestamp": start,
            # Nothing that young yet is where such a stream may well begin.
            "startingOffsetsByTimestampStrategy": "latest",
        }
    if tags is not None:
        options["subExpression"] = tags
    if max_per_batch is not None:
        options["maxOffsetsPerTrigger"] = str(max_per_batch)
    return options


def named_after(pipeline: str, topic: str, group: str | None) -> str:
    """The group of a pipeline that was given none; a name that brokers take."""
    return group or f"{pipeline}-{topic.replace(',', '-').replace('%', '_')}"

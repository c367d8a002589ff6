"""Pages of the log that were lost with the power, and how they are known.

Pages that were not flushed come to the disk in any order, each as a whole or not at all. Nothing
but zeros lies behind the end of our log, because what is cut or taken back is wiped; and every
write ends with a record. So a page that was lost is zero from the end of some record on, to its own
end. A record that begins before a lost page and reaches into it finds all of that page zero.

What such a record looks like depends on the first of its bytes that is in the page:

    size, magic code      it is none: the magic code has a zero where none belongs (of the size
                          alone the first bytes can be in a lost page, and they are zeros anyway)
    the rest of its head  its parts do not add up to its size: the length of the body lies in the
                          page, and that of the topic, which is never zero
    body                  its checksum does not match, or the bytes were zeros anyway
    topic, properties     nothing is wrong: no checksum covers them, in Apache's log neither

The last line is what `first_torn` looks for. Zeros that were never lost must not be taken for it:
a record may be acknowledged though no checkpoint says yet that it was flushed, and when only the
process died, everything that was written is there.

    a topic               has no zeros, and is never empty
    a length of 0         says that there are no properties: nothing of them can be lost
    properties            may have zeros, but never so many in a row that a page is full of them
                          (the last byte of their length may be one of these), and none at the end

The store sees to the last line: see `distinct`. Apache's broker does not. There, a record is taken
for torn that is whole if it has a page of zeros in its properties, or is the last one, lacks the
separator at its end (which 4.9 leaves out), and ends in zeros that begin with a page. Nothing is
cut in a log that was closed properly, nor anything that is known to be flushed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from orbitmq.message.errors import RecordRefused
from orbitmq.message.properties import ITEM_END
from orbitmq.message.record import check_record

if TYPE_CHECKING:
    from orbitmq.message.scan import Bools, RecordArrays

#: What a disk, or the kernel, writes as a whole.
PAGE: Final = 4096
_TOO_MANY_ZEROS: Final = bytes(PAGE - 1)
_ITEM_END: Final = ITEM_END.encode()
_SIZE_FIELD: Final = 4


# ---- good records that are not whole


def first_torn(view: memoryview, records: RecordArrays, is_doubtful: Bools) -> int | None:
    """The row of the first record whose topic or properties lie in a lost page.

    The records are valid, one behind the other, and lie in the file `view`. Only those that are
    doubtful can be torn: the others were flushed.
    """
    rows = np.flatnonzero(is_doubtful)
    if not len(rows):
        return None
    octets = np.frombuffer(view, np.uint8)
    ends = records.ends
    begin = int(records.starts[rows[0]])
    edges = np.arange(begin - begin % PAGE + PAGE, int(ends[rows[-1]]), PAGE)
    edges = edges[octets[edges] == 0]
    # The record that a page begins in, or before which it begins.
    owners = np.searchsorted(records.starts, edges, "left") - 1
    is_inside = is_doubtful[owners] & (edges < ends[owners])
    edges, owners = edges[is_inside], owners[is_inside]
    # A length and a text that are not zero: the topic's, and the properties' if there are any.
    topic_at, properties_at = records.topic_at[owners], records.properties_at[owners]
    is_in_topic = edges < topic_at + records.topic_sizes[owners]
    has_properties = properties_at < ends[owners]
    is_unguarded = (edges + PAGE >= topic_at) & (is_in_topic | has_properties)
    for edge, owner in zip(
        edges[is_unguarded].tolist(), owners[is_unguarded].tolist(), strict=True
    ):
        if not octets[edge : edge + PAGE].any():
            return int(owner)
    return None


def distinct(properties: bytes) -> bytes:
    """Properties that have zeros, so that they cannot be taken for lost ones.

    The separator that may be missing at the end is added. A page full of zeros is refused.
    """
    if _TOO_MANY_ZEROS in properties:
        raise RecordRefused(
            f"properties with {len(_TOO_MANY_ZEROS)} zeros (U+0000) in a row could not be told "
            "from a page that a disk has lost; put such data into the body"
        )
    return properties if properties.endswith(_ITEM_END) else properties + _ITEM_END


# ---- bad records


def has_lost_page(view: memoryview, at: int, end: int) -> bool:
    """Whether a page that was never written explains why no record begins at `at`.

    Such a page is zero from where it was last written on, which is not before `at`, to its end.
    A good record was found at `end`; the zeros that its size begins with may be of a lost page.
    """
    size_field = bytes(view[end : end + _SIZE_FIELD])
    zeros_end = end + len(size_field) - len(size_field.lstrip(b"\0"))
    page_end = at - at % PAGE + PAGE
    if page_end <= zeros_end and not any(view[at:page_end]):
        # A record begins with its size: zeros where it should be say that it was not written.
        if page_end - at >= _SIZE_FIELD:
            return True
        if _was_record(view, at, end, page_end - at):
            return True
    return any(
        not any(view[page : page + PAGE]) for page in range(page_end, zeros_end - PAGE + 1, PAGE)
    )


def _was_record(view: memoryview, at: int, end: int, lost: int) -> bool:
    """Whether all that a record in `[at, end)` lacks is the `lost` first bytes of its size."""
    size_field = (end - at).to_bytes(_SIZE_FIELD, "big")
    if not any(size_field[:lost]) or view[at + lost : at + _SIZE_FIELD] != size_field[lost:]:
        return False
    record = size_field + bytes(view[at + _SIZE_FIELD : end])
    return check_record(record, 0, len(record)) == len(record)

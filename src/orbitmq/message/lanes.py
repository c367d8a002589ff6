"""Records of different sizes, walked in many places at once.

To walk from record to record takes one step after the other, because only the size of a record
tells where the next one is. But several walks can be made side by side, each step of all of them
in one operation on arrays, if there are places to begin at. Those are guessed: at regular distances
the next magic code is looked for. That a guess was right is known afterwards, and for certain: the
first walk begins where a record does; if it comes to the very place where the second has begun,
that is the beginning of a record too, and with it all that the second walk has found; and so on. A
walk that passes the place of the next one (there was a magic code inside of a body) is the last
that counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from orbitmq.message.record import MAGIC_V1, MAGIC_V2, MIN_RECORD_SIZE

if TYPE_CHECKING:
    from orbitmq.message.scan import Int64s

#: Records of a lane. A step costs some microseconds however many lanes there are, and to look for a
#: beginning costs as much as some steps.
LANE: Final = 16
#: With fewer lanes it is faster to go record by record.
LEAST_LANES: Final = 8

_MAGIC_AT: Final = 4
#: The first bytes of both magic codes, and rare enough.
_MARK: Final = b"\xda\xa3"


def walk_lanes(view: memoryview, at: int, stop: int, size: int) -> Int64s:
    """Where records begin, from `at` on, as far as that can be said; `size` is about that of one.

    All of them end within `stop`. None, where too few lanes can be made.
    """
    distance = LANE * size
    # Behind the last beginning there is room for all that is looked at.
    count = (stop - at) // distance - 1
    if count < LEAST_LANES:
        return np.empty(0, np.int64)
    begins = _beginnings(view, at, distance, count, min(2 * size, distance))
    goals = np.append(begins[1:], at + count * distance)
    return _walked(_numbers(view), begins, goals, stop)


def _beginnings(view: memoryview, at: int, distance: int, count: int, width: int) -> Int64s:
    """Where lanes begin: at the first place, and wherever a magic code is soon found."""
    shape, strides = (count - 1, width), (distance, 1)
    place = at + distance + _MAGIC_AT
    is_mark = np.ndarray(shape, np.uint8, view, place, strides) == _MARK[0]
    is_mark &= np.ndarray(shape, np.uint8, view, place + 1, strides) == _MARK[1]
    marks = is_mark.argmax(axis=1)
    found = marks + np.arange(at + distance, at + count * distance, distance)
    magics = _numbers(view)[found + _MAGIC_AT]
    # A lane that finds nothing begins at a place without a magic code, most likely.
    is_start = (magics == MAGIC_V1) | (magics == MAGIC_V2)
    return np.concatenate(([at], found[is_start]))


def _walked(sizes_at: npt.NDArray[Any], begins: Int64s, goals: Int64s, stop: int) -> Int64s:
    """The records that all lanes came by, up to the first lane that misses its goal."""
    at = begins
    places, counting = [], []
    for _ in range(4 * LANE):
        sizes = sizes_at[np.minimum(at, stop - 4)].astype(np.int64)
        goes_on = (at < goals) & (sizes >= MIN_RECORD_SIZE) & (at + sizes <= stop)
        if not goes_on.any():
            break
        places.append(at)
        counting.append(goes_on)
        at = np.where(goes_on, at + sizes, at)
    if not places:
        return np.empty(0, np.int64)
    misses = at[:-1] != goals[:-1]
    lanes = int(misses.argmax()) + 1 if misses.any() else len(at)
    by_lane, counts = np.array(places).T[:lanes], np.array(counting).T[:lanes]
    return by_lane[counts]


def _numbers(view: memoryview) -> npt.NDArray[Any]:
    """One number beginning at every byte."""
    return np.ndarray((len(view) - 3,), ">i4", view, strides=(1,))

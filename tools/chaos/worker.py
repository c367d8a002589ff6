"""Producers and consumers as processes: `python -m tools.chaos.worker ROLE OPTIONS`.

Each writes its history before and after what it does, says `ready` when it is at work, and ends in
order on SIGTERM.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import msgspec

from tools.chaos.fates import die_with_parent, tell_where_when_asked
from tools.chaos.readers import consume, pull
from tools.chaos.senders import produce, produce_later, transact
from tools.chaos.work import Options, Worker

ROLES: dict[str, Callable[[Worker], None]] = {
    "produce": produce,
    "produce-later": produce_later,
    "transact": transact,
    "consume": consume,
    "pull": pull,
}


if __name__ == "__main__":
    die_with_parent()
    tell_where_when_asked()
    ROLES[sys.argv[1]](Worker(msgspec.convert(json.loads(sys.argv[2]), Options)))

"""Sets going what a broker does with parked messages by itself: alarms, files, who wakes whom."""

from __future__ import annotations

from collections.abc import Callable

from orbitmq.broker.alarms import Alarm
from orbitmq.broker.configfile import ConfigDisk
from orbitmq.broker.delays import Delays
from orbitmq.broker.destinations import Destinations
from orbitmq.broker.parts import Parts
from orbitmq.broker.timers import Timers
from orbitmq.broker.transactionchecks import TransactionChecks


def begin_delivering(parts: Parts, disk: ConfigDisk | None = None) -> None:
    """Give the broker delay levels, timers and transactions; a slave only keeps them."""
    parts.destinations = Destinations(parts.store, parts.topics, parts.clock)
    parts.delays = Delays(parts, disk=disk)
    parts.timers = Timers(parts, disk=disk)
    parts.transactions = TransactionChecks(parts)
    if parts.settings.is_slave:
        return
    for deliverer in (parts.delays, parts.timers):
        alarm = Alarm(parts.loop, parts.clock, deliverer.step)
        deliverer.wake = _after_the_write(parts, alarm)
        parts.background.add(alarm)
        parts.background.every(parts.settings.delays.save_interval, deliverer.file.save_soon)
        parts.on_stop(deliverer.file.close)
    alarm = Alarm(parts.loop, parts.clock, parts.transactions.step)
    parts.transactions.wake = alarm.soon
    parts.background.add(alarm)


def _after_the_write(parts: Parts, alarm: Alarm) -> Callable[[], None]:
    """Wakes an alarm when what is being put now can be read."""
    is_due = False

    def wake() -> None:
        nonlocal is_due
        if not is_due:
            is_due = True
            parts.loop.call_soon(look)

    def look() -> None:
        nonlocal is_due
        is_due = False
        parts.turns.finish()
        if parts.turns.is_sync:
            # Nothing is visible before the flush, not even to us.
            parts.store.when_flushed(parts.store.statistics().log_end, lambda _: alarm.soon())
        else:
            alarm.soon()

    return wake

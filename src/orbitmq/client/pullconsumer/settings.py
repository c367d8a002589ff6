"""How a consumer that is polled fetches ahead and commits."""

from __future__ import annotations

from dataclasses import dataclass, field

from orbitmq.client.checks import Fields
from orbitmq.client.consumer.pullsettings import PullSettings

MIB = 1024 * 1024


def _pulls() -> PullSettings:
    # Apache's brokers give 32 messages whatever is asked; ours gives more, and arrays like many.
    return PullSettings(batch_size=1024, batch_bytes=MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollSettings:
    """Numbers and seconds of polling."""

    #: Commit what earlier polls returned, by itself. Off: what `commit` says, and nothing else; a
    #: group without progress then begins by `consume_from` again until something is committed.
    auto_commit: bool = True
    auto_commit_interval: float = 5.0
    max_messages: int = 500  #: of one poll that names no number
    timeout: float = 5.0  #: of a poll that names none
    #: Fetched ahead and not returned yet; a queue above either is not pulled until it is polled.
    max_cached_messages: int = 5000  #: per queue
    max_cached_bytes: int = 16 * MIB  #: per queue
    max_cached_bytes_in_all: int = 256 * MIB  #: of all queues
    pull: PullSettings = field(default_factory=_pulls)

    def __post_init__(self) -> None:
        fields = Fields(self, "poll")
        fields.switches("auto_commit")
        fields.durations("auto_commit_interval")
        fields.durations("timeout", least=0)
        fields.whole("max_messages", "max_cached_messages")
        fields.whole("max_cached_bytes", "max_cached_bytes_in_all")
        fields.kinds(pull=PullSettings)

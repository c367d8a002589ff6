"""Everything about a consumer that can be set, put together and checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

from orbitmq.client.checks import kind, switch
from orbitmq.client.consumer.allocation import Averagely, Strategy, strategy_named
from orbitmq.client.consumer.flowcontrol import FlowSettings
from orbitmq.client.consumer.locks import LockSettings
from orbitmq.client.consumer.pullsettings import PullSettings
from orbitmq.client.consumer.rebalancesettings import RebalanceSettings
from orbitmq.client.consumer.settings import ConsumeSettings
from orbitmq.client.consumer.starting import Beginning, ConsumeFrom
from orbitmq.client.consumer.starting import consume_from as beginning
from orbitmq.client.errors import SettingError
from orbitmq.client.names import check_group
from orbitmq.wire.bodies.membership import MessageModel

if TYPE_CHECKING:
    from orbitmq.client.consumer.assignmentnews import AssignmentListener
    from orbitmq.client.consumer.progress import ProgressStore

S = TypeVar("S")

#: Apache's clients refuse it: it is what a group is called that has no name yet.
_NO_GROUP: Final = "DEFAULT_CONSUMER"
_MODELS: Final = {model.value.lower(): model for model in MessageModel}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Everything about a consumer but its group, its handlers and its client."""

    model: MessageModel = MessageModel.CLUSTERING
    ordered: bool = False
    consume_from: ConsumeFrom = ConsumeFrom.LAST
    strategy: Strategy = field(default_factory=Averagely)
    #: The application's own; None: the broker, or a local file for broadcasting.
    progress: ProgressStore | None = None
    #: Begin at the end of a young topic as well, where brokers say that a group begins at 0.
    strict_last: bool = False
    consume: ConsumeSettings = field(default_factory=ConsumeSettings)
    flow: FlowSettings = field(default_factory=FlowSettings)
    pull: PullSettings = field(default_factory=PullSettings)
    rebalance: RebalanceSettings = field(default_factory=RebalanceSettings)
    locks: LockSettings = field(default_factory=LockSettings)
    on_assignment: AssignmentListener | None = None

    @property
    def is_broadcasting(self) -> bool:
        return self.model is MessageModel.BROADCASTING


def checked_options(
    *,
    model: str,
    ordered: bool,
    consume_from: Beginning,
    strategy: Strategy | str,
    progress: ProgressStore | None,
    strict_last: bool,
    workers: int | None,
    batch_size: int | None,
    max_retries: int | None,
    consume: ConsumeSettings | None,
    flow: FlowSettings | None,
    pull: PullSettings | None,
    rebalance: RebalanceSettings | None,
    locks: LockSettings | None,
    on_assignment: AssignmentListener | None,
) -> ConsumerOptions:
    """What a user gave. Raises `SettingError`; numbers given by themselves win over `consume`."""
    changes = {"workers": workers, "batch_size": batch_size, "max_retries": max_retries}
    given = {name: value for name, value in changes.items() if value is not None}
    return ConsumerOptions(
        model=_model(model),
        ordered=switch(ordered, "ordered"),
        consume_from=beginning(consume_from),
        strategy=strategy_named(strategy),
        progress=progress,
        strict_last=switch(strict_last, "strict_last"),
        consume=replace(_object(consume, "consume", ConsumeSettings), **given),
        flow=_object(flow, "flow", FlowSettings),
        pull=_object(pull, "pull", PullSettings),
        rebalance=_object(rebalance, "rebalance", RebalanceSettings),
        locks=_object(locks, "locks", LockSettings),
        on_assignment=on_assignment,
    )


def checked_group(group: str) -> str:
    """The name of a group of consumers. Raises `SettingError`."""
    if check_group(group) == _NO_GROUP:
        raise SettingError(f"group {_NO_GROUP} is reserved; give your consumers a name")
    return group


def _object(given: S | None, name: str, wanted: type[S]) -> S:
    """Settings as they were given, or the usual ones."""
    return wanted() if given is None else kind(given, name, wanted)


def _model(model: str) -> MessageModel:
    try:
        return _MODELS[model.lower()]
    except (KeyError, AttributeError):
        raise SettingError(
            f"model must be one of {', '.join(sorted(_MODELS))}, got {model!r}"
        ) from None

"""Administration: what operators, the command line and the console do with a cluster."""

from orbitmq.client.admin.admin import (
    Admin,
    AdminSettings,
    AsyncAdmin,
    AsyncDeadLetters,
)
from orbitmq.client.admin.cluster import BrokerStatus, ClusterStatus, NameServerStatus, RuntimeInfo
from orbitmq.client.admin.config import AsyncConfig
from orbitmq.client.admin.deadletters import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetterSummary,
    ExportFormat,
    Pile,
    ResendOutcome,
    ResendReport,
    ResendResult,
    ResendTo,
)
from orbitmq.client.admin.groups import (
    AsyncGroups,
    GroupDetails,
    GroupProgress,
    GroupSettings,
    GroupState,
    GroupSummary,
    QueueProgress,
    TopicLag,
)
from orbitmq.client.admin.members import (
    AsyncConsumers,
    ClientConnection,
    DirectResult,
    Finding,
    FindingKind,
    GroupSubscription,
    Members,
    OwnedQueueInfo,
    RunningInfo,
    TopicConsumption,
    Variant,
)
from orbitmq.client.admin.messages import AsyncMessages, BodyForm, Fate, Page, Track, shown_body
from orbitmq.client.admin.requests import BrokerNode, Listing, Unreachable
from orbitmq.client.admin.resets import (
    AsyncProgress,
    QueueMove,
    QueueOutcome,
    ResetFailed,
    ResetPlan,
    ResetReport,
    ResetTo,
)
from orbitmq.client.admin.topics import (
    AsyncTopics,
    Permission,
    QueueStatus,
    Rate,
    Route,
    RouteBroker,
    Topic,
    TopicKind,
    TopicOnBroker,
    TopicRates,
    TopicStatus,
)
from orbitmq.client.errors import (
    AdminError,
    BadRequest,
    BrokerNotFound,
    ConsumerNotOnline,
    GroupNotFound,
    MessageNotFound,
    NotEffective,
    QueueNotFound,
    TopicExists,
    TopicNotFound,
)
from orbitmq.errors import NotSupported, PartlyDone

__all__ = [  # noqa: RUF022  grouped by subject
    # Faces
    "Admin",
    "AdminSettings",
    "AsyncAdmin",
    "AsyncConfig",
    "AsyncConsumers",
    "AsyncDeadLetters",
    "AsyncGroups",
    "AsyncMessages",
    "AsyncProgress",
    "AsyncTopics",
    # Lists
    "Listing",
    "Unreachable",
    # Cluster
    "BrokerNode",
    "BrokerStatus",
    "ClusterStatus",
    "NameServerStatus",
    "RuntimeInfo",
    # Topics
    "Permission",
    "QueueStatus",
    "Rate",
    "Route",
    "RouteBroker",
    "Topic",
    "TopicKind",
    "TopicOnBroker",
    "TopicRates",
    "TopicStatus",
    # Groups
    "GroupDetails",
    "GroupProgress",
    "GroupSettings",
    "GroupState",
    "GroupSummary",
    "QueueProgress",
    "TopicLag",
    # Progress
    "QueueMove",
    "QueueOutcome",
    "ResetPlan",
    "ResetReport",
    "ResetTo",
    # Clients
    "ClientConnection",
    "DirectResult",
    "Finding",
    "FindingKind",
    "GroupSubscription",
    "Members",
    "OwnedQueueInfo",
    "RunningInfo",
    "TopicConsumption",
    "Variant",
    # Messages
    "BodyForm",
    "Fate",
    "Page",
    "Track",
    "shown_body",
    # Dead letters
    "DeadLetter",
    "DeadLetterFilter",
    "DeadLetterSummary",
    "ExportFormat",
    "Pile",
    "ResendOutcome",
    "ResendReport",
    "ResendResult",
    "ResendTo",
    # Errors
    "AdminError",
    "BadRequest",
    "BrokerNotFound",
    "ConsumerNotOnline",
    "GroupNotFound",
    "MessageNotFound",
    "NotEffective",
    "NotSupported",
    "PartlyDone",
    "QueueNotFound",
    "ResetFailed",
    "TopicExists",
    "TopicNotFound",
]

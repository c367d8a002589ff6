"""Administration: what operators, the command line and the console do with a cluster."""

from orbitmq.client.admin.admin import (
    AdminSettings,
    AsyncAdmin,
    AsyncDeadLetters,
)
from orbitmq.client.admin.bodies import BodyForm, shown_body
from orbitmq.client.admin.browsing import Page
from orbitmq.client.admin.cluster import BrokerStatus, ClusterStatus, NameServerStatus
from orbitmq.client.admin.configuration import AsyncConfig
from orbitmq.client.admin.deadletters import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetterSummary,
    Pile,
)
from orbitmq.client.admin.errors import (
    AdminError,
    BadRequest,
    BrokerNotFound,
    ConsumerNotOnline,
    GroupNotFound,
    MessageNotFound,
    NotEffective,
    NotSupported,
    PartlyDone,
    QueueNotFound,
    TopicExists,
    TopicNotFound,
)
from orbitmq.client.admin.exporting import ExportFormat
from orbitmq.client.admin.groups import AsyncGroups
from orbitmq.client.admin.groupvalues import (
    GroupDetails,
    GroupProgress,
    GroupSettings,
    GroupState,
    GroupSummary,
    QueueProgress,
    TopicLag,
)
from orbitmq.client.admin.listing import Listing, Unreachable
from orbitmq.client.admin.members import AsyncConsumers
from orbitmq.client.admin.membervalues import (
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
from orbitmq.client.admin.messages import AsyncMessages
from orbitmq.client.admin.resending import ResendOutcome, ResendReport, ResendResult, ResendTo
from orbitmq.client.admin.resetplan import (
    QueueMove,
    QueueOutcome,
    ResetFailed,
    ResetPlan,
    ResetReport,
    ResetTo,
)
from orbitmq.client.admin.resetting import AsyncProgress
from orbitmq.client.admin.runtime import RuntimeInfo
from orbitmq.client.admin.sync import Admin
from orbitmq.client.admin.topics import AsyncTopics
from orbitmq.client.admin.topicvalues import (
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
from orbitmq.client.admin.topology import BrokerNode
from orbitmq.client.admin.tracking import Fate, Track

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

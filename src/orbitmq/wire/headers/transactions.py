"""Messages that come back: failed ones, and half messages of transactions."""

from __future__ import annotations

from orbitmq.wire.headers.base import Header, Int32, Int64, RequestHeader


class ConsumerSendBackRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """CONSUMER_SEND_MSG_BACK: deliver this message again later."""

    #: Place in the commit log.
    offset: Int64
    group: str
    #: Negative: to the dead letters; 0: the broker chooses by the number of attempts.
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None


class EndTransactionRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """END_TRANSACTION: what became of a half message."""

    producer_group: str
    #: Queue offset of the half message.
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    #: See `codes.TransactionState`.
    commit_or_rollback: Int32
    msg_id: str
    from_transaction_check: bool = False
    topic: str | None = None
    transaction_id: str | None = None


class CheckTransactionStateRequest(RequestHeader, frozen=True, kw_only=True, gc=False):
    """CHECK_TRANSACTION_STATE: the broker asks what became of a half message."""

    tran_state_table_offset: Int64
    commit_log_offset: Int64
    topic: str | None = None
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


class ResumeCheckHalfMessageRequest(Header, frozen=True, kw_only=True, gc=False):
    """RESUME_CHECK_HALF_MESSAGE: a half message that was given up is asked about again."""

    topic: str | None = None
    msg_id: str | None = None

"""What a slave copies besides messages, and how replication stands (43, 45, 60, 61, 402, 907)."""

from __future__ import annotations

from collections.abc import Mapping

from orbitmq.broker.parts import Parts
from orbitmq.broker.progress import encode_progress
from orbitmq.broker.replication.following import Following
from orbitmq.broker.replication.serving import Serving
from orbitmq.broker.timerfile import TIMER_PROGRESS, apache_checkpoint
from orbitmq.clock import milliseconds
from orbitmq.remoting.connection import Connection
from orbitmq.remoting.dispatch import Handler
from orbitmq.wire.bodies.base import Body, encode_body
from orbitmq.wire.bodies.membership import RequestModes
from orbitmq.wire.bodies.offsets import TimerMetrics, TimingCount
from orbitmq.wire.bodies.stats import HAClientInfo, HAConnectionInfo, HARuntimeInfo
from orbitmq.wire.bodies.topics import DataVersion
from orbitmq.wire.codes import RequestCode, ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.versions import Gate

#: Exceptions to the order of delivery that fit into the header of an answer.
_FEW_LATE = 1000


class Replication:
    """Answers from the tables that slaves keep a copy of."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def handlers(self) -> Mapping[int, Handler]:
        return {
            RequestCode.GET_ALL_CONSUMER_OFFSET: self.consumer_offsets,
            RequestCode.GET_ALL_DELAY_OFFSET: self.delay_offsets,
            RequestCode.GET_TIMER_CHECK_POINT: self.timer_progress,
            RequestCode.GET_TIMER_METRICS: self.timer_counts,
            RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: self.request_modes,
            RequestCode.GET_BROKER_HA_STATUS: self.status,
        }

    def consumer_offsets(self, _: Connection, request: Command) -> Command:
        table = self._parts.progress.body(wall=self._parts.clock.now())
        if _reads_bare_keys(request):
            return _answer(request, table)
        # Slaves ask every few seconds, and the table may be long: the fast writer.
        return request.answer(ResponseCode.SUCCESS, body=encode_progress(table))

    def delay_offsets(self, _: Connection, request: Command) -> Command:
        return _answer(request, self._parts.delays.offsets())

    def timer_progress(self, _: Connection, request: Command) -> Command:
        """Which timer messages have been delivered, for slaves of either kind."""
        progress, read_ms = self._parts.timers.progress()
        extra: dict[str, str] = {}
        if len(progress.late) <= _FEW_LATE:
            # Else the checkpoint alone has to do: after a take-over more is delivered twice.
            extra = {TIMER_PROGRESS: encode_body(progress).decode()}
        body = apache_checkpoint(progress, read_ms)
        return request.answer(ResponseCode.SUCCESS, body=body, extra=extra)

    def timer_counts(self, _: Connection, request: Command) -> Command:
        """How many timer messages wait, by topic."""
        now_ms = milliseconds(self._parts.clock.now())
        waiting = self._parts.timers.counts.waiting
        counts = {
            topic: TimingCount(count=count, time_stamp=now_ms)
            for topic, count in waiting.items()
            if count
        }
        version = DataVersion(counter=len(counts), state_version=0, timestamp=now_ms)
        return _answer(request, TimerMetrics(data_version=version, timing_count=counts))

    def request_modes(self, _: Connection, request: Command) -> Command:
        """Every group pulls, so there is nothing to say about any."""
        return _answer(request, RequestModes())

    def status(self, _: Connection, request: Command) -> Command:
        replication = self._parts.replication
        if replication.following is not None:
            return _answer(request, self._as_slave(replication.following))
        return _answer(request, self._as_master(replication.serving))

    def _as_master(self, serving: Serving | None) -> HARuntimeInfo:
        replicas = () if serving is None else serving.replicas
        return HARuntimeInfo(
            master=True,
            master_commit_log_max_offset=self._parts.store.statistics().log_end,
            in_sync_slave_nums=0 if serving is None else serving.in_sync,
            ha_connection_info=tuple(
                HAConnectionInfo(
                    addr=str(replica.address),
                    slave_ack_offset=replica.acknowledged or 0,
                    diff=replica.behind,
                    in_sync=replica.is_in_sync,
                    transferred_byte_in_second=round(replica.bytes_per_second),
                    transfer_from_where=replica.position,
                )
                for replica in replicas
            ),
        )

    def _as_slave(self, following: Following) -> HARuntimeInfo:
        clock = self._parts.clock
        heard = following.heard_at
        ago = None if heard is None else clock.monotonic() - heard
        return HARuntimeInfo(
            ha_client_runtime_info=HAClientInfo(
                activated=following.is_connected,
                master_addr=None if following.address is None else str(following.address),
                max_offset=self._parts.store.mirroring.written,
                last_read_timestamp=0 if ago is None else milliseconds(clock.now() - ago),
            )
        )


def _reads_bare_keys(request: Command) -> bool:
    return request.version < Gate.STANDARD_JSON


def _answer(request: Command, body: Body) -> Command:
    encoded = encode_body(body, bare_integer_keys=_reads_bare_keys(request))
    return request.answer(ResponseCode.SUCCESS, body=encoded)

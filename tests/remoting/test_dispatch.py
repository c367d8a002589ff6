"""Which answer a request gets: from its handler, its errors, or nobody."""

from __future__ import annotations

import asyncio
import logging

from orbitmq.remoting.dispatch import Dispatcher
from orbitmq.remoting.settings import Refused
from orbitmq.wire.codes import DEFAULT_LIMITS, RequestCode, ResponseCode
from orbitmq.wire.command import Command, command_pieces
from orbitmq.wire.headers import GetRouteInfoRequest
from tests.support.remoting import RawPeer, serving, until

CODE = 10


async def _answer_of(handler: object, request: Command | None = None) -> Command:
    async with serving({CODE: handler}) as server, RawPeer.connected(server.address) as peer:  # type: ignore[dict-item]  # any handler
        return await peer.ask(request or Command.request(CODE, opaque=3))


async def test_a_handler_may_answer_with_a_command_its_pieces_or_from_a_coroutine():
    def command(_, request):
        return request.answer(0, remark="a command")

    def pieces(_, request):
        return command_pieces(request.answer(0, remark="pieces"))

    def frozen_pieces(_, request):
        return tuple(command_pieces(request.answer(0, remark="frozen pieces")))

    async def coroutine(_, request):
        await asyncio.sleep(0)
        return request.answer(0, remark="a coroutine")

    handlers = (command, pieces, frozen_pieces, coroutine)
    remarks = [(await _answer_of(handler)).remark for handler in handlers]

    assert remarks == ["a command", "pieces", "frozen pieces", "a coroutine"]


async def test_a_refusal_is_the_answer_with_its_code_and_remark():
    def refuse(_, __):
        raise Refused(ResponseCode.NO_PERMISSION, "not you")

    async def refuse_later(_, __):
        raise Refused(ResponseCode.SYSTEM_BUSY, "not now")

    now, later = await _answer_of(refuse), await _answer_of(refuse_later)

    assert (now.code, now.remark, now.opaque) == (ResponseCode.NO_PERMISSION, "not you", 3)
    assert (later.code, later.remark) == (ResponseCode.SYSTEM_BUSY, "not now")


async def test_a_missing_field_is_named_in_the_answer(caplog):
    def route(_, request):
        return request.answer(0, remark=request.header(GetRouteInfoRequest).topic)

    answer = await _answer_of(route)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "'topic'" in (answer.remark or "")
    # It is the peer's fault: nothing for the log.
    assert "request failed" not in caplog.text


async def test_a_failing_handler_is_logged_and_answered_and_others_go_on(caplog):
    def fail(_, __):
        raise ZeroDivisionError("one over nothing")

    async def fail_later(_, __):
        raise ZeroDivisionError("one over nothing, later")

    handlers = {CODE: fail, 11: fail_later, 12: lambda _, r: r.answer(0)}
    async with serving(handlers) as server, RawPeer.connected(server.address) as peer:
        with caplog.at_level(logging.ERROR):
            now = await peer.ask(Command.request(CODE, opaque=1))
            later = await peer.ask(Command.request(11, opaque=2))
        fine = await peer.ask(Command.request(12, opaque=3))

    assert (now.code, now.remark) == (1, "ZeroDivisionError: one over nothing")
    assert (later.code, later.remark) == (1, "ZeroDivisionError: one over nothing, later")
    assert fine.code == 0
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info is not None for record in errors] == [True, True]


async def test_an_answer_that_does_not_fit_a_frame_becomes_an_error():
    def huge(_, request):
        return request.answer(0, body=bytes(DEFAULT_LIMITS.frame))

    answer = await _answer_of(huge)

    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert f"a frame may have {DEFAULT_LIMITS.frame} bytes" in (answer.remark or "")


async def test_what_stands_before_all_handlers_may_refuse():
    def only_routes(_, request):
        if request.code != RequestCode.GET_ROUTEINFO_BY_TOPIC:
            raise Refused(ResponseCode.NO_PERMISSION, "no signature")

    dispatcher = Dispatcher(
        {CODE: lambda _, r: r.answer(0), 105: lambda _, r: r.answer(0)}, before=only_routes
    )
    async with serving(dispatcher) as server, RawPeer.connected(server.address) as peer:
        refused = await peer.ask(Command.request(CODE, opaque=1))
        unknown = await peer.ask(Command.request(4711, opaque=2))
        allowed = await peer.ask(Command.request(105, opaque=3))

    assert [refused.code, unknown.code, allowed.code] == [16, 16, 0]


async def test_coroutines_still_running_are_cancelled_at_the_stop():
    cancelled = asyncio.Event()

    async def never(_, __):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return

    dispatcher = Dispatcher({CODE: never})
    async with serving(dispatcher) as server, RawPeer.connected(server.address) as peer:
        await peer.send(Command.request(CODE, opaque=1))
        await until(lambda: dispatcher.running == 1)
        assert [each.open_requests for each in server.connections] == [1]
        await dispatcher.stop()

        assert cancelled.is_set()
        assert dispatcher.running == 0
        assert [each.open_requests for each in server.connections] == [0]

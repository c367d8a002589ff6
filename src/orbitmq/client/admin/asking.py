"""Asking many servers at once, but never too many.

A cluster may have thousands of groups and an answer for each: requests of one admin share a limit,
so that a listing neither floods a broker nor waits for one answer after the other. Every request is
counted, which is how tests keep listings honest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from orbitmq.client.admin.errors import PartlyDone
from orbitmq.client.engine import Engine
from orbitmq.client.errors import ClientError
from orbitmq.remoting.address import Address
from orbitmq.remoting.errors import RemotingError
from orbitmq.wire.bodies.base import Body, decode_body
from orbitmq.wire.codes import ResponseCode
from orbitmq.wire.command import Command
from orbitmq.wire.errors import WireError
from orbitmq.wire.frame import Bytes
from orbitmq.wire.headers.base import Header

B = TypeVar("B", bound=Body)
K = TypeVar("K")
T = TypeVar("T")

SUCCESS = frozenset({int(ResponseCode.SUCCESS)})

#: What asking a server may raise: it refused, could not be reached, or answered nonsense.
Failed = (ClientError, RemotingError, WireError)


class Asking:
    """The requests of one admin."""

    def __init__(self, engine: Engine, *, at_once: int, timeout: float) -> None:
        self.engine = engine
        self.clock = engine.clock
        self.timeout = timeout
        #: How many requests were made so far.
        self.requests = 0
        self._free = asyncio.Semaphore(at_once)

    async def ask(
        self,
        where: Address,
        code: int,
        header: Header | None = None,
        *,
        body: Bytes = b"",
        extra: Mapping[str, str] | None = None,
        accept: frozenset[int] = SUCCESS,
        timeout: float | None = None,  # noqa: ASYNC109  # the protocol's, which names the request
    ) -> Command:
        """One question, and its answer if the code is acceptable. Raises `BrokerRefused`."""
        async with self._free:
            self.requests += 1
            return await self.engine.ask(
                where,
                code,
                header,
                body=body,
                extra=extra,
                accept=accept,
                timeout=self.timeout if timeout is None else timeout,
            )

    async def told(
        self,
        kind: type[B],
        where: Address,
        code: int,
        header: Header | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> B:
        """The body of an answer."""
        answer = await self.ask(where, code, header, timeout=timeout)
        return decode_body(kind, answer.body or b"{}")

    async def ask_name_server(
        self,
        code: int,
        header: Header | None = None,
        *,
        accept: frozenset[int] = SUCCESS,
    ) -> Command:
        """One question to whichever name server answers."""
        async with self._free:
            self.requests += 1
            return await self.engine.ask_name_server(
                code, header, timeout=self.timeout, accept=accept
            )

    @property
    def name_servers(self) -> tuple[Address, ...]:
        """All of them, for what every one has to be told."""
        return self.engine.settings.addresses

    # Many at once.

    async def all(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """The results in order. The first failure ends the rest, and is raised."""
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def each(
        self, keys: Iterable[K], work: Callable[[K], Coroutine[Any, Any, T]]
    ) -> Outcomes[K, T]:
        """Do something for every key; what failed for one does not keep it from the others."""

        async def tried(key: K) -> T | Failure:
            try:
                return await work(key)
            except Failed as error:
                return Failure(error)

        order = tuple(keys)
        done: dict[K, T] = {}
        failed: dict[K, Exception] = {}
        for key, result in zip(order, await self.all(map(tried, order)), strict=True):
            if isinstance(result, Failure):
                failed[key] = result.error
            else:
                done[key] = result
        return Outcomes(done, failed)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in the place of a result."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Outcomes(Generic[K, T]):
    """What came of doing something for several keys."""

    done: Mapping[K, T]
    failed: Mapping[K, Exception]

    def check(self, what: str, name: Callable[[K], str] = str) -> Mapping[K, T]:
        """What was done, if it was done everywhere; the failure itself when it is the only key."""
        if not self.failed:
            return self.done
        if not self.done and len(self.failed) == 1:
            raise next(iter(self.failed.values()))
        failed = [(name(key), str(error)) for key, error in self.failed.items()]
        raise PartlyDone(what, map(name, self.done), failed)


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and see it end."""
    left: list[Awaitable[Any]] = []
    for task in tasks:
        if not task.done():
            task.cancel()
        left.append(task)
    await asyncio.gather(*left, return_exceptions=True)

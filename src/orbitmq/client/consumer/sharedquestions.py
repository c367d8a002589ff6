"""Questions that several have at the same time, asked once.

Each topic of a consumer wants to know who is in the group, and what the others hold; and none of
these answers depends on the topic. But not every answer will do for everybody: whoever has claimed
a queue needs one to a question that was sent *after* the claim (see `handover`). So questions are
numbered as they are sent, and whoever asks says how many had been sent (`sent`) by the time that
matters to him: a later one is shared, whether it was answered already or not, and an earlier one is
asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeAlias, TypeVar, cast

from orbitmq.client.errors import NotRunning
from orbitmq.errors import OrbitError

V = TypeVar("V")
#: Runs a coroutine in the background, under a name.
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]

#: So many answers are kept; members come and go.
_MOST = 256


class SharedQuestions:
    """What was asked last about each subject. Belongs to the event loop."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        #: By subject: the number of its last question, and who waits for the answer.
        self._asked: dict[Hashable, tuple[int, asyncio.Task[Any]]] = {}
        #: How many questions were sent so far.
        self.sent = 0

    async def answer(
        self, subject: Hashable, after: int, ask: Callable[[], Coroutine[Any, Any, V]]
    ) -> V:
        """The answer to a question about `subject` that was none of the first `after`.

        An error is an answer as well. Whoever is cancelled leaves the question to the others.
        """
        number, task = self._asked.get(subject, (0, None))
        if task is None or number <= after:
            task = self._spawn(_outcome(ask), f"ask about {subject}")
            self.sent += 1
            self._asked.pop(subject, None)
            self._asked[subject] = (self.sent, task)
            if len(self._asked) > _MOST:
                del self._asked[next(iter(self._asked))]
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and not (current and current.cancelling()):
                # Not we are ended, but the client that was to ask.
                raise NotRunning("this client", was_stopped=True) from None
            raise
        if isinstance(outcome, OrbitError):
            raise outcome
        return cast("V", outcome)


async def _outcome(ask: Callable[[], Coroutine[Any, Any, V]]) -> V | OrbitError:
    try:
        return await ask()
    except OrbitError as error:
        return error

"""Chunks as one record batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orbitmq.client.pullconsumer.errors import ArrowMissing

if TYPE_CHECKING:
    from orbitmq.client.pullconsumer.chunks import Chunk

_TAGS = "tags"


def chunks_to_arrow(
    chunks: Sequence[Chunk], columns: Sequence[str] | None = None, *, null_bad_bodies: bool = False
) -> Any:
    """A `pyarrow.RecordBatch` of all messages; no object is made per message.

    Raises `MessageError` for a damaged body, unless those are to be null, and `ArrowMissing`.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  # an extra

        from orbitmq.message.arrow import messages_to_arrow  # noqa: PLC0415  # needs the extra
    except ModuleNotFoundError as missing:
        raise ArrowMissing from missing
    batches = [
        _batch(messages_to_arrow, broker, some, columns, null_bad_bodies)
        for (broker, _), some in _alike(chunks).items()
    ]
    if len(batches) == 1:
        return batches[0]
    if not batches:
        return messages_to_arrow(b"", broker_name="", columns=columns)
    # Record batches of one schema become one: `concat_batches` is younger than our oldest pyarrow.
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches() or [batches[0]]
    return joined


def _alike(chunks: Sequence[Chunk]) -> dict[tuple[str, frozenset[str]], list[Chunk]]:
    """Chunks that are decoded together: of one broker, and with the same tags to look for."""
    groups: dict[tuple[str, frozenset[str]], list[Chunk]] = {}
    for chunk in chunks:
        key = (chunk.owned.queue.broker, chunk.subscription.tags.tags)
        groups.setdefault(key, []).append(chunk)
    return groups


def _batch(
    messages_to_arrow: Any,
    broker: str,
    chunks: Sequence[Chunk],
    columns: Sequence[str] | None,
    null_bad_bodies: bool,
) -> Any:
    from orbitmq.message.arrow import BadBody  # noqa: PLC0415  # as above

    tags = chunks[0].subscription.tags
    wanted = columns
    if not tags.matches_all and columns is not None and _TAGS not in columns:
        wanted = [*columns, _TAGS]
    batch = messages_to_arrow(
        [chunk.body for chunk in chunks],
        broker_name=broker,
        columns=wanted,
        bad_body=BadBody.NULL if null_bad_bodies else BadBody.RAISE,
    )
    if tags.matches_all:
        return batch
    batch = _with_tags(batch, tags.tags)
    return batch if wanted is columns else batch.select(list(columns or ()))


def _with_tags(batch: Any, tags: frozenset[str]) -> Any:
    """The rows whose tag is one of these: a broker compares hashes, and hashes collide."""
    import pyarrow as pa  # noqa: PLC0415  # as above
    import pyarrow.compute as pc  # noqa: PLC0415

    matching = pc.is_in(batch.column(_TAGS), value_set=pa.array(sorted(tags), pa.string()))
    return batch if pc.all(matching).as_py() in (True, None) else batch.filter(matching)

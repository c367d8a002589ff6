"""Dead letters in files: JSON lines for tools and people, Parquet for Spark and notebooks.

Both have the same columns. In JSON a body that is text is `body`; any other is `body_base64`. A
file appears under its name when it is whole.
"""

from __future__ import annotations

import asyncio
import base64
import enum
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec

from orbitmq.client.admin.deadletters import (
    AsyncDeadLetterReading,
    DeadLetter,
    DeadLetterFilter,
)
from orbitmq.client.admin.errors import AdminError, BadRequest

#: Letters that are written at once.
CHUNK = 1000


class ExportFormat(enum.StrEnum):
    """What a file is written as."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class AsyncDeadLetterExporting:
    """Writes dead letters to files."""

    def __init__(self, letters: AsyncDeadLetterReading) -> None:
        self._letters = letters

    async def export(
        self,
        group: str,
        path: Path | str,
        where: DeadLetterFilter | None = None,
        *,
        format: ExportFormat | str | None = None,  # noqa: A002  # what users call it
    ) -> int:
        """Write the letters that a filter means to a file; how many there were.

        The format is told by the file's ending unless it is given. Parquet needs pyarrow: `pip
        install 'orbitmq[arrow]'`. A file of that name is replaced.
        """
        target = Path(path)
        chosen = _format(target, format)
        partial = target.with_name(target.name + ".part")
        # Files are slow at times; the loop has other things to do meanwhile.
        file = await asyncio.to_thread(_open, chosen, partial)
        count = 0
        try:
            async for letters in _chunks(self._letters.list(group, where)):
                count += len(letters)
                await asyncio.to_thread(file.write, letters)
        except BaseException:
            await asyncio.to_thread(_discard, file, partial)
            raise
        await asyncio.to_thread(_finish, file, partial, target)
        return count


class _File(Protocol):
    def write(self, letters: Sequence[DeadLetter]) -> None: ...

    def close(self) -> None: ...


def _format(path: Path, given: ExportFormat | str | None) -> ExportFormat:
    wanted = given or {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(
        path.suffix.lower()
    )
    try:
        return ExportFormat(wanted or "")
    except ValueError:
        raise BadRequest(
            f"a file is written as one of {', '.join(ExportFormat)}; {path.name!r} does not say "
            f"which{'' if given is None else f', and {given!r} is none of them'}"
        ) from None


def _open(chosen: ExportFormat, path: Path) -> _File:
    try:
        if chosen is ExportFormat.JSONL:
            return _JsonLines(path)
        return _Parquet(path, _arrow())
    except OSError as error:
        raise AdminError(f"{path} cannot be written: {error}") from error


def _finish(file: _File, partial: Path, target: Path) -> None:
    file.close()
    partial.replace(target)


def _discard(file: _File, partial: Path) -> None:
    file.close()
    partial.unlink(missing_ok=True)


async def _chunks(letters: AsyncIterator[DeadLetter]) -> AsyncGenerator[list[DeadLetter], None]:
    chunk: list[DeadLetter] = []
    async for letter in letters:
        chunk.append(letter)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _row(letter: DeadLetter) -> dict[str, Any]:
    """The columns of a letter, without its body."""
    message = letter.message
    return {
        "group": letter.group,
        "id": message.msg_id,
        "unique_id": message.unique_id,
        "offset_id": letter.id,
        "topic": letter.topic,
        "origin_id": letter.origin_id,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "resent_times": letter.resent_times,
        "died_at": letter.died_at,
        "born_at": message.born_at,
        "tags": message.tags,
        "keys": list(message.keys),
        "broker": message.queue.broker,
        "queue_id": message.queue.id,
        "queue_offset": message.queue_offset,
        "properties": dict(message.properties),
    }


class _JsonLines:
    """One JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, letters: Sequence[DeadLetter]) -> None:
        lines = []
        for letter in letters:
            row = _row(letter)
            body = letter.message.body
            try:
                row["body"] = body.decode()
            except UnicodeDecodeError:
                row["body_base64"] = base64.b64encode(body).decode()
            lines.append(msgspec.json.encode(row))
        self._file.write(b"\n".join(lines) + b"\n")

    def close(self) -> None:
        self._file.close()


class _Parquet:
    """Columns."""

    def __init__(self, path: Path, arrow: ModuleType) -> None:
        import pyarrow.parquet as parquet  # noqa: PLC0415  # an extra

        text = arrow.string()
        self._arrow = arrow
        self._schema = arrow.schema(
            [
                ("group", text),
                ("id", text),
                ("unique_id", text),
                ("offset_id", text),
                ("topic", text),
                ("origin_id", text),
                ("reason", text),
                ("attempts", arrow.int32()),
                ("resent_times", arrow.int32()),
                ("died_at", arrow.timestamp("us", tz="UTC")),
                ("born_at", arrow.timestamp("us", tz="UTC")),
                ("tags", text),
                ("keys", arrow.list_(text)),
                ("broker", text),
                ("queue_id", arrow.int32()),
                ("queue_offset", arrow.int64()),
                ("properties", arrow.map_(text, text)),
                ("body", arrow.binary()),
            ]
        )
        self._writer = parquet.ParquetWriter(path, self._schema)

    def write(self, letters: Sequence[DeadLetter]) -> None:
        rows = []
        for letter in letters:
            row = _row(letter)
            for name in ("died_at", "born_at"):
                row[name] = round(row[name] * 1_000_000)
            row["properties"] = list(row["properties"].items())
            row["body"] = letter.message.body
            rows.append(row)
        self._writer.write_table(self._arrow.Table.from_pylist(rows, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _arrow() -> ModuleType:
    try:
        import pyarrow as pa  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise AdminError(
            "Parquet files need pyarrow; install it: pip install 'orbitmq[arrow]'"
        ) from error
    module: ModuleType = pa
    return module

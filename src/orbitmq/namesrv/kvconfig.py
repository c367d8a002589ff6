"""Texts by namespace and key, kept in RocketMQ's `kvConfig.json`.

A change is on the disk before it is visible or answered. Requests that change something come from
administrators, a few in a day, so the loop may wait for the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import field

from orbitmq.namesrv.errors import FileUnusable
from orbitmq.namesrv.files import read_file, replace_file
from orbitmq.wire.bodies.base import Body, decode_body, encode_body
from orbitmq.wire.errors import BodyError

#: The namespace in which brokers and clients look for the queues of ordered topics.
ORDER_TOPICS = "ORDER_TOPIC_CONFIG"

Tables = dict[str, dict[str, str]]


class KvConfigFile(Body, frozen=True, kw_only=True):
    """The content of `kvConfig.json`."""

    config_table: Tables = field(default_factory=dict)


class KvConfig:
    """The tables, and the file that holds them; without a path they live in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._tables: Tables = {}

    def load(self) -> None:
        """Take over what the file holds. Raises `FileUnusable`."""
        content = read_file(self._path) if self._path is not None else None
        if not content or self._path is None:
            return
        try:
            self._tables = decode_body(KvConfigFile, content).config_table
        except BodyError as error:
            raise FileUnusable(self._path, f"{error.problem}; repair or remove it") from error

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value. Raises `FileUnusable`, and then nothing has changed."""
        self._adopt({**self._tables, namespace: {**self._tables.get(namespace, {}), key: value}})

    def delete(self, namespace: str, key: str) -> None:
        """Remove a value, if it is there. Raises `FileUnusable`, and then nothing has changed."""
        table = self._tables.get(namespace)
        if table is not None and key in table:
            rest = {name: value for name, value in table.items() if name != key}
            self._adopt({**self._tables, namespace: rest})

    def get(self, namespace: str, key: str) -> str | None:
        return self._tables.get(namespace, {}).get(key)

    def table(self, namespace: str) -> Mapping[str, str] | None:
        """All values of a namespace; None when it was never used."""
        return self._tables.get(namespace)

    def _adopt(self, tables: Tables) -> None:
        if self._path is not None:
            replace_file(self._path, encode_body(KvConfigFile(config_table=tables)))
        self._tables = tables

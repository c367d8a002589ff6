"""Progress in a file: Java's format, whole at every moment, and never taken for what it is not."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.client.consumer.progress import (
    LocalFileProgress,
    ProgressFileError,
    merge_positions,
    progress_path,
    read_positions,
)
from orbitmq.client.routes import Queue

QUEUE = Queue("T", "b", 0)

#: As written by Java clients: 4.9.7, 5.5.0, and one that puts its keys into quotes.
WRITTEN_BY_JAVA = {
    "4.9.7": b"""{
\t"offsetTable":{{
\t\t\t"brokerName":"b",
\t\t\t"queueId":0,
\t\t\t"topic":"T"
\t\t}:5,{
\t\t\t"brokerName":"b",
\t\t\t"queueId":1,
\t\t\t"topic":"%RETRY%g"
\t\t}:7
\t}
}""",
    "5.5.0": b"""{
\t"offsetTable":{
\t\t{
\t\t\t"brokerName":"b",
\t\t\t"queueId":0,
\t\t\t"topic":"T"
\t\t}:5,
\t\t{
\t\t\t"brokerName":"b",
\t\t\t"queueId":1,
\t\t\t"topic":"%RETRY%g"
\t\t}:7
\t}
}""",
    "quoted": rb"""{"offsetTable":{
        "{\"brokerName\":\"b\",\"queueId\":0,\"topic\":\"T\"}":5,
        "{\"brokerName\":\"b\",\"queueId\":1,\"topic\":\"%RETRY%g\"}":7}}""",
}
FOUND = {QUEUE: 5, Queue("%RETRY%g", "b", 1): 7}


@pytest.fixture
def path(tmp_path):
    return progress_path("g", "10.0.0.1@DEFAULT", tmp_path)


def backup(path: Path) -> Path:
    return path.with_name("offsets.json.bak")


def test_the_file_is_where_java_keeps_it():
    assert progress_path("g", "10.0.0.1@DEFAULT") == (
        Path.home() / ".rocketmq_offsets" / "10.0.0.1@DEFAULT" / "g" / "offsets.json"
    )


@pytest.mark.parametrize("version", WRITTEN_BY_JAVA)
def test_what_java_wrote_is_read(path, version):
    path.parent.mkdir(parents=True)
    path.write_bytes(WRITTEN_BY_JAVA[version])

    assert read_positions(path) == FOUND


def test_we_write_what_java_5_5_writes(path):
    merge_positions(path, {QUEUE: 5})
    merge_positions(path, FOUND)

    # The order of a hash table is nobody's promise; ours is sorted.
    entries = re.findall(rb"\t\t\{.*?\}:\d", path.read_bytes(), re.DOTALL)
    of_java = re.findall(rb"\t\t\{.*?\}:\d", WRITTEN_BY_JAVA["5.5.0"], re.DOTALL)
    assert sorted(entries) == sorted(of_java)
    assert len(path.read_bytes()) == len(WRITTEN_BY_JAVA["5.5.0"])
    assert read_positions(backup(path)) == {QUEUE: 5}


@given(
    positions=st.dictionaries(
        st.builds(
            Queue,
            st.text(st.characters(codec="utf-8"), max_size=20),
            st.text(st.characters(codec="utf-8"), max_size=20),
            st.integers(0, 2**31 - 1),
        ),
        st.integers(0, 2**63 - 1),
        max_size=20,
    )
)
def test_whatever_is_written_is_read(tmp_path_factory, positions):
    path = tmp_path_factory.mktemp("progress") / "offsets.json"

    merge_positions(path, positions)

    assert read_positions(path) == positions


async def test_positions_survive_a_restart_and_other_queues_stay(path):
    first = LocalFileProgress(path)
    await first.load()
    assert await first.fetch(QUEUE) is None
    first.update(QUEUE, 3)
    first.update(Queue("T", "b", 1), 9)
    await first.persist([QUEUE, Queue("T", "b", 1)])
    first.close()

    second = LocalFileProgress(path)
    await second.load()
    assert second.positions() == {QUEUE: 3, Queue("T", "b", 1): 9}
    second.update(QUEUE, 4)
    await second.persist([QUEUE])

    assert await second.fetch(QUEUE) == 4
    assert read_positions(path) == {QUEUE: 4, Queue("T", "b", 1): 9}


@pytest.mark.parametrize("damage", [b"", b'{"offsetTable":{{"brokerN', b"\xff\xfe", b"[1,2]", None])
def test_the_backup_of_a_damaged_or_missing_file_is_used(path, damage, caplog):
    merge_positions(path, {QUEUE: 1})
    merge_positions(path, {QUEUE: 2})
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)

    assert read_positions(path) == {QUEUE: 1}
    assert ("a backup of progress is used" in caplog.text) == (damage is not None)


async def test_damage_without_a_backup_is_an_error_and_is_not_overwritten(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{")
    progress = LocalFileProgress(path)

    with pytest.raises(ProgressFileError, match=r"offsets\.json: is damaged"):
        await progress.load()
    progress.update(QUEUE, 1)
    for work in (progress.fetch(QUEUE), progress.persist([QUEUE])):
        with pytest.raises(ProgressFileError):
            await work

    assert path.read_bytes() == b"{"


async def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    progress = LocalFileProgress(tmp_path / "file" / "g" / "offsets.json")
    progress.update(QUEUE, 1)

    with pytest.raises(ProgressFileError, match=r"offsets\.json: cannot be"):
        await progress.persist([QUEUE])


_WRITES_FOR_EVER = """
import sys
from pathlib import Path
from orbitmq.client.consumer.progress import merge_positions
from orbitmq.client.routes import Queue
path = Path(sys.argv[1])
for number in range(1, 1_000_000):
    merge_positions(path, {Queue("T", "b", place): number for place in range(50)})
    if number == 1:
        print("begun", flush=True)
"""


@pytest.mark.feature("G2")
def test_the_file_is_whole_after_kill_9(path):
    chance = random.Random(7)
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITES_FOR_EVER, str(path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(chance.random() * 0.05)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(30)
        writer.stdout.close()

        found = read_positions(path)
        assert len(found) == 50
        assert len(set(found.values())) == 1
        merge_positions(path, found)
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "offsets.json",
        "offsets.json.bak",
    ]

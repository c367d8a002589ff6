"""`orbitmq archive`: writing, listing and checking an archive."""

from __future__ import annotations

import os

import pytest

from orbitmq.archive import Location
from tests.support.command import run
from tests.support.store import write_log


@pytest.mark.feature("T7")
def test_a_data_folder_is_archived_once_and_can_be_checked(tmp_path):
    data, folder = tmp_path / "broker-a", tmp_path / "archive"
    write_log(data)

    first = run("archive", "run", str(data), "--to", str(folder))
    second = run("archive", "run", str(data), "--to", str(folder))
    listed = run("archive", "list", str(folder))
    checked = run("archive", "verify", str(folder))

    *files, last = first.stdout.splitlines()
    assert files[0].startswith("log file 0: 39 messages of 1 topics, 8.0 KiB as ")
    assert last.startswith(f"{len(files)} log files of broker-a archived, 0 were before")
    assert second.stdout.startswith(f"0 log files of broker-a archived, {len(files)} were before")
    assert listed.stdout.splitlines()[1].split()[:3] == ["orders", "broker-a", "2"]
    assert checked.stdout.endswith(f" of {len(files)} log files are whole\n")
    assert {ran.returncode for ran in (first, second, listed, checked)} == {0}


def test_what_is_wrong_with_an_archive_is_named(tmp_path):
    data, folder = tmp_path / "broker-a", tmp_path / "archive"
    write_log(data)
    run("archive", "run", str(data), "--to", str(folder))
    one, two, *_ = sorted(folder.rglob("*.parquet"))
    one.unlink()
    two.write_bytes(two.read_bytes()[:-1])
    entry = sorted((folder / "_log" / "broker-a").glob("*.json"))[3]
    entry.unlink()

    ran = run("archive", "verify", str(folder))

    assert ran.returncode == 1
    assert f"{one.relative_to(folder)}: is missing" in ran.stdout
    assert f"{two.relative_to(folder)}: its bytes are not those that were written" in ran.stdout
    assert f"the log of broker-a from {int(entry.stem)} to " in ran.stderr
    assert "belongs to no entry" in ran.stderr
    assert "3 problems in the archive" in ran.stderr


def test_one_process_writes_the_archive_of_a_broker(tmp_path):
    data, folder = tmp_path / "broker-a", tmp_path / "archive"
    write_log(data)
    held = Location(str(folder)).lock("broker-a")

    refused = run("archive", "run", str(data), "--to", str(folder))
    assert held is not None
    held.release()
    ran = run("archive", "run", str(data), "--to", str(folder))

    said = f"process {os.getpid()} writes the archive of broker broker-a in {folder} already"
    assert said in refused.stderr
    assert (refused.returncode, ran.returncode) == (1, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "{here}", "--to", "{here}/archive"), "it has no folder 'commitlog'"),
        (("run", "{here}", "--to", "nowhere://archive"), "it has no folder 'commitlog'"),
        (("run", "{here}/a b", "--to", "{here}/archive"), "give its name with --broker"),
        (("list", "{here}/nothing"), "holds no archive; write one with: orbitmq archive run"),
        (("verify", "nowhere://archive"), "'nowhere://archive' is no place for an archive"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, words, said):
    ran = run("archive", *(word.format(here=tmp_path) for word in words))

    assert ran.returncode in (1, 2)
    assert said in ran.stderr
    assert len(ran.stderr.splitlines()) == 1

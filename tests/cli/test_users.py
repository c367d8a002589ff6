"""The users of the console: `orbitmq user`."""

from __future__ import annotations

import json
import stat

import pytest

from orbitmq.console.roles import Role
from orbitmq.console.users import Users

PASSWORD = "correct horse battery"  # noqa: S105


@pytest.fixture
def file(tmp_path):
    return tmp_path / "folder" / "users.json"


def test_users_are_added_listed_changed_and_removed(cli, file):
    where = {"ORBITMQ_CONSOLE_USERS": str(file)}
    typed = f"{PASSWORD}\n".encode()
    for name, role in (("ada", "admin"), ("rob", "reader")):
        added = cli.run(
            *("user", "add", name, "--role", role, "--password-file", "-"), stdin=typed, env=where
        )
        assert added.stdout.startswith(f"user {name} added as {role}: may ")
        assert PASSWORD not in added.stdout + added.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    changed = cli.run("user", "role", "rob", "operator", "--json", env=where)
    listed = cli.run("user", "list", "--users", str(file)).stdout
    assert json.loads(changed.stdout) == {"name": "rob", "role": "operator"}
    assert [each.split() for each in listed.splitlines()[1:]] == [
        ["ada", "admin"],
        ["rob", "operator"],
    ]

    secret = file.with_name("secret.txt")
    secret.write_text("another password\n")
    cli.run("user", "password", "rob", "--password-file", str(secret), env=where)
    assert Users(file).check("rob", "another password") is not None
    assert Users(file).check("ada", PASSWORD) is not None

    removed = cli.run("user", "remove", "rob", env=where)
    assert removed.stdout == "user rob removed; the user's sessions have ended\n"
    assert list(Users(file).all) == ["ada"]


@pytest.mark.parametrize(
    ("words", "typed", "said", "code"),
    [
        (
            ("list",),
            "",
            "users.json cannot be used: it is not there; make it with: orbitmq user",
            1,
        ),
        (("remove", "ada"), "", "it is not there", 1),
        (("add", "ada", "--password-file", "-"), "short", "8 to 1024 characters, got 5", 2),
        (("add", "ada"), "", "give --password-file FILE", 2),
        (("add", "a b", "--password-file", "-"), PASSWORD, "a user's name has 1 to 64", 2),
        (("add", "ada", "--role", "king", "--password-file", "-"), PASSWORD, "operator", 2),
        (("add", "ada", "--password-file", "nowhere.txt"), "", "nowhere.txt cannot be read", 1),
    ],
)
def test_what_cannot_be_done_is_said(cli, file, words, typed, said, code):
    answer = cli.run("user", *words, "--users", str(file), stdin=typed.encode())

    assert said in " ".join(answer.stderr.split())
    assert answer.returncode == code
    assert not file.exists()


def test_an_unknown_user_is_answered_with_those_who_are_there(cli, file):
    Users(file).add("ada", Role.ADMIN, PASSWORD)

    answer = cli.run("user", "role", "bob", "reader", "--users", str(file))

    assert "there is no user 'bob'; there are: ada" in answer.stderr
    assert answer.returncode == 1

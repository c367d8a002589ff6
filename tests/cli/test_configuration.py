"""The settings in force: who wins, who is named, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli.main import SettingRefused
from orbitmq.cli.settings import DEFAULT, SECTIONS, Configuration
from orbitmq.namesrv.settings import NameServerSettings

Flags = Mapping[str, tuple[str, str]]


def load(
    *words: str,
    flags: Flags | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Configuration:
    return Configuration.load(flags or {}, words, env or {}, file)


def origin(configuration: Configuration, path: str) -> tuple[object, str]:
    (row,) = [row for row in configuration.rows() if row.setting == path]
    return row.value, row.origin


@pytest.fixture
def file(tmp_path):
    return tmp_path / "orbitmq.toml"


# Who wins.


def test_without_anything_the_defaults_of_the_rooms_hold():
    configuration = load()

    assert configuration.broker == BrokerSettings(root=configuration.broker.root)
    assert configuration.name_server == NameServerSettings()
    assert {row.origin for row in configuration.rows()} == {DEFAULT}


def test_a_flag_beats_the_environment_which_beats_the_file(file):
    file.write_text("[broker]\nport = 1\nname = 'from-file'\ncluster = 'from-file'\n")
    env = {"ORBITMQ_BROKER_PORT": "2", "ORBITMQ_BROKER_NAME": "from-env"}

    configuration = load(flags={"broker.port": ("3", "--port")}, env=env, file=file)

    assert configuration.broker.server.port == 3
    assert configuration.broker.name == "from-env"
    assert configuration.broker.cluster == "from-file"
    assert origin(configuration, "broker.port") == (3, "--port")
    assert origin(configuration, "broker.name") == ("from-env", "ORBITMQ_BROKER_NAME")
    assert origin(configuration, "broker.cluster") == ("from-file", str(file))
    assert origin(configuration, "broker.broker_id") == (0, DEFAULT)


def test_every_default_passes_through_every_origin_unchanged(file):
    """What `config show` prints can be given back, whatever the type."""
    words = {}
    for row in load().rows():
        if row.value is None:
            text = "none"
        elif isinstance(row.value, bool):
            text = str(row.value).lower()
        elif isinstance(row.value, list):
            text = ",".join(str(each) for each in row.value)
        else:
            text = str(row.value)
        if ".tls." not in row.setting:
            words[row.setting] = text

    again = load(*(f"{path}={text}" for path, text in words.items()))

    assert again.broker == SECTIONS["broker"]
    assert again.name_server == SECTIONS["namesrv"]
    assert [row.value for row in again.rows()] == [row.value for row in load().rows()]


def test_what_was_given_can_be_handed_to_another_process_by_its_environment():
    given = load("broker.port=7", "broker.store.delay_levels=1,2.5", "broker.advertised=none")

    handed = load(env=given.as_environment())

    assert handed.broker == given.broker


# What is refused, and how.


def refusal(*words: str, env: Mapping[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(SettingRefused) as caught:
        list(load(*words, env=env, file=file).rows())
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "broker.store.flush.policy=now",
            "broker.store.flush.policy must be async or sync, got 'now' (from --set)",
        ),
        ("broker.port=70000", "must be 0 to 65535, got 70000 (broker.port comes from --set)"),
        ("broker.prt=1", "did you mean broker.port"),
        ("broker.flush.policy=sync", "did you mean broker.store.flush.policy"),
        ("broker.port", "as in broker.port=0; got 'broker.port'"),
        (
            "broker.tls.certificate=c.pem",
            "broker.tls.certificate (from --set) needs broker.tls.key as well",
        ),
        (
            {"ORBITMQ_BROKER_PORT": "x"},
            "broker.port must be a whole number, got 'x' (from ORBITMQ_BROKER_PORT)",
        ),
        ({"ORBITMQ_BROKER_PORT": "tcp://10.0.0.1:10911"}, "enableServiceLinks: false"),
        ({"ORBITMQ_CONFIG": "nowhere.toml"}, "the file nowhere.toml cannot be read: No such file"),
        (
            b"[broker]\nport = 'high'\n",
            "broker.port must be a whole number, got 'high' (from FILE)",
        ),
        (b"[broker]\nprot = 1\n", "'broker.prot' in FILE is not known; did you mean "),
        (b"[broker", "the file FILE is not TOML"),
        (b"\xff\xfe", "the file FILE is not TOML"),
        (b"broker = 5\n", "the setting 'broker'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_origin_and_what_is_allowed(file, given, said):
    match given:
        case bytes():
            file.write_bytes(given)
            refused = refusal(file=file)
        case dict():
            refused = refusal(env=given)
        case _:
            refused = refusal(given)

    assert said.replace("FILE", str(file)) in refused


def test_values_that_contradict_each_other_name_all_who_gave_them():
    said = refusal(
        "broker.store.retention.full_ratio=0.5",
        env={"ORBITMQ_BROKER_STORE_RETENTION_EXPIRED_RATIO": "0.6"},
    )

    assert "broker.store.retention.full_ratio comes from --set" in said
    assert "comes from ORBITMQ_BROKER_STORE_RETENTION_EXPIRED_RATIO" in said


def test_a_slip_in_a_variable_is_refused_and_the_variables_of_others_are_not():
    assert "did you mean ORBITMQ_BROKER_PORT" in refusal(env={"ORBITMQ_BROKR_PORT": "1"})
    assert "ORBITMQ_BROKER_PROT" in refusal(env={"ORBITMQ_BROKER_PROT": "1"})

    theirs = {"ORBITMQ_HELM_RELEASE": "x", "BROKER_PORT": "1", "ORBITMQ_NAME_SERVERS_OF_APP": "y"}
    assert load(env=theirs).broker == load().broker


def test_a_secret_is_never_shown(file):
    file.write_text(
        "[broker.tls]\ncertificate = 'c'\nkey = 'k'\nkey_password = 'hunter2'\nmode = 'enforcing'\n"
    )

    value, _ = origin(load(file=file), "broker.tls.key_password")
    file.write_text("[broker.tls]\nkey_password = 12345678\n")
    said = refusal(file=file)

    assert value == "(hidden)"
    assert "12345678" not in said

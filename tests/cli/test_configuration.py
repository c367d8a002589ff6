"""The settings in force: who wins, who is named, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from orbitmq.broker.settings import BrokerSettings
from orbitmq.cli.main import SettingRefused
from orbitmq.cli.settings import DEFAULT, SECTIONS, Configuration, all_settings, by_variable
from orbitmq.namesrv.settings import NameServerSettings
from orbitmq.remoting.tls import TlsMode
from orbitmq.store.settings import FlushPolicy

Flags = Mapping[str, tuple[str, str]]


def load(
    *words: str,
    flags: Flags | None = None,
    env: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Configuration:
    return Configuration.load(flags or {}, words, env or {}, file)


def origin(configuration: Configuration, path: str) -> tuple[object, str]:
    (row,) = [row for row in configuration.rows() if row.path == path]
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


def test_any_setting_can_be_given_in_every_way(file):
    file.write_text('[broker.store.flush]\npolicy = "sync"\n')

    in_file = load(file=file)
    in_environment = load(env={"ORBITMQ_BROKER_STORE_FLUSH_POLICY": "sync"})
    by_word = load("broker.store.flush.policy=sync")

    for configuration in (in_file, in_environment, by_word):
        assert configuration.broker.store.flush.policy is FlushPolicy.SYNC


def test_the_environment_may_name_the_file_and_a_flag_another(file, tmp_path):
    other = tmp_path / "other.toml"
    file.write_text("[broker]\nport = 1\n")
    other.write_text("[broker]\nport = 2\n")
    env = {"ORBITMQ_CONFIG": str(file)}

    assert load(env=env).broker.server.port == 1
    assert load(env=env, file=other).broker.server.port == 2


def test_every_setting_has_a_variable_of_its_own():
    assert len(by_variable()) == len(all_settings())
    assert "ORBITMQ_NAMESRV_PORT" in by_variable()
    assert "ORBITMQ_BROKER_SERVER_CONNECTION_LIMITS_FRAME" in by_variable()


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
        if ".tls." not in row.path:
            words[row.path] = text

    again = load(*(f"{path}={text}" for path, text in words.items()))

    assert again.broker == SECTIONS["broker"]
    assert again.name_server == SECTIONS["namesrv"]
    assert [row.value for row in again.rows()] == [row.value for row in load().rows()]


def test_what_was_given_can_be_handed_to_another_process_by_its_environment():
    given = load("broker.port=7", "broker.store.delay_levels=1,2.5", "broker.advertised=none")

    handed = load(env=given.as_environment())

    assert handed.broker == given.broker


def test_tls_is_made_when_its_settings_are_given():
    configuration = load(
        "broker.tls.certificate=c.pem", "broker.tls.key=k.pem", "broker.tls.mode=enforcing"
    )

    tls = configuration.broker.server.tls
    assert tls is not None
    assert (tls.certificate, tls.key, tls.mode) == (Path("c.pem"), Path("k.pem"), TlsMode.ENFORCING)


# What is refused, and how.


def refusal(*words: str, env: Mapping[str, str] | None = None, file: Path | None = None) -> str:
    with pytest.raises(SettingRefused) as caught:
        list(load(*words, env=env, file=file).rows())
    return str(caught.value)


def test_a_wrong_value_names_itself_its_origin_and_what_is_allowed(file):
    file.write_text("[broker]\nport = 'high'\n")

    assert refusal("broker.store.flush.policy=now") == (
        "broker.store.flush.policy must be async or sync, got 'now' (from --set)"
    )
    assert refusal(env={"ORBITMQ_BROKER_PORT": "x"}) == (
        "broker.port must be a whole number, got 'x' (from ORBITMQ_BROKER_PORT)"
    )
    assert refusal(file=file) == f"broker.port must be a whole number, got 'high' (from {file})"


def test_a_value_that_its_class_refuses_names_its_origin_too():
    said = refusal(env={"ORBITMQ_BROKER_PORT": "70000"})

    assert "must be 0 to 65535, got 70000" in said
    assert "broker.port comes from ORBITMQ_BROKER_PORT" in said


def test_values_that_contradict_each_other_name_all_who_gave_them():
    said = refusal(
        "broker.store.retention.full_ratio=0.5",
        env={"ORBITMQ_BROKER_STORE_RETENTION_EXPIRED_RATIO": "0.6"},
    )

    assert "broker.store.retention.full_ratio comes from --set" in said
    assert "comes from ORBITMQ_BROKER_STORE_RETENTION_EXPIRED_RATIO" in said


def test_an_unknown_setting_is_refused_with_the_nearest_known(file):
    file.write_text("[broker]\nprot = 1\n")

    assert "did you mean broker.port" in refusal("broker.prt=1")
    assert "did you mean broker.store.flush.policy" in refusal("broker.flush.policy=sync")
    said = refusal(file=file)
    assert f"'broker.prot' in {file} is not known" in said
    assert "broker.port" in said


def test_a_slip_in_a_variable_is_refused_and_the_variables_of_others_are_not():
    assert "did you mean ORBITMQ_BROKER_PORT" in refusal(env={"ORBITMQ_BROKR_PORT": "1"})
    assert "ORBITMQ_BROKER_PROT" in refusal(env={"ORBITMQ_BROKER_PROT": "1"})

    theirs = {"ORBITMQ_HELM_RELEASE": "x", "BROKER_PORT": "1", "ORBITMQ_NAME_SERVERS_OF_APP": "y"}
    assert load(env=theirs).broker == load().broker


def test_the_variables_that_kubernetes_makes_for_services_are_explained():
    said = refusal(env={"ORBITMQ_BROKER_PORT": "tcp://10.0.0.1:10911"})

    assert "enableServiceLinks: false" in said


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]", "0.0.0.0:10911"])  # noqa: S104
def test_an_address_that_nobody_can_send_to_is_not_advertised(address):
    said = refusal(f"broker.advertised={address}")

    assert "broker.advertised" in said
    assert "an address that clients can reach" in said


def test_a_certificate_without_its_key_is_refused():
    said = refusal("broker.tls.certificate=c.pem")

    assert said == "broker.tls.certificate (from --set) needs broker.tls.key as well"


def test_a_secret_is_never_shown(file):
    file.write_text(
        "[broker.tls]\ncertificate = 'c'\nkey = 'k'\nkey_password = 'hunter2'\nmode = 'enforcing'\n"
    )

    value, _ = origin(load(file=file), "broker.tls.key_password")
    file.write_text("[broker.tls]\nkey_password = 12345678\n")
    said = refusal(file=file)

    assert value == "(hidden)"
    assert "12345678" not in said


@pytest.mark.parametrize("content", [b"[broker", b"\xff\xfe", b"[broker]\nport = 1\nport = 2\n"])
def test_a_file_that_is_not_toml_is_refused(file, content):
    file.write_bytes(content)

    assert f"the file {file} is not TOML" in refusal(file=file)


def test_a_file_that_is_not_there_is_refused(file):
    assert f"the file {file} cannot be read: No such file" in refusal(file=file)


def test_a_value_where_a_section_should_be_is_refused(file):
    file.write_text("broker = 5\n")

    assert "the setting 'broker'" in refusal(file=file)


def test_a_word_without_a_value_is_refused():
    assert "as in broker.port=0; got 'broker.port'" in refusal("broker.port")

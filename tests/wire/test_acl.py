"""Who signed a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.wire.codes import Gate, RequestCode, Serialization
from orbitmq.wire.command import (
    Command,
    Credentials,
    access_key_of,
    decode_command,
    encode_command,
    is_signed_by,
    sign,
    signature,
    signed_content,
)
from orbitmq.wire.frame import Frame, FrameReader
from orbitmq.wire.headers import PullMessageRequest
from tests.support.wire import texts

KEYS = Credentials(access_key="AK", secret_key="SK123456")  # noqa: S106  # of the test vectors
PULL = Command.request(
    RequestCode.PULL_MESSAGE,
    PullMessageRequest(
        consumer_group="group",
        topic="topic",
        queue_id=1,
        queue_offset=2,
        max_msg_nums=32,
        sys_flag=0,
        commit_offset=0,
        suspend_timeout_millis=15000,
        sub_version=0,
    ),
    opaque=1,
)


def test_a_text_has_the_signature_that_java_makes_of_it():
    assert signature(b"RocketMQ", "12345678") == "IUc8rrO/0gDch8CjObLQsW2rsiA="


def test_a_pull_is_signed_over_its_values_in_the_order_of_their_names():
    signed = sign(PULL, KEYS)

    assert signed_content(signed.ext_fields, b"", signed.version) == b"AK0group32120150000topic"
    assert signed.ext_fields["Signature"] == "iVfe09TwSmlR2AgJGycSUv+O5qk="
    assert signed.ext_fields["AccessKey"] == "AK"
    assert signed.header(PullMessageRequest) == PULL.header(PullMessageRequest)


def test_the_body_is_signed_as_well():
    heartbeat = sign(Command.request(RequestCode.HEART_BEAT, opaque=1, body=b"{}"), KEYS)

    assert heartbeat.ext_fields["Signature"] == "zH9AIjhZDSJGLP8EXZo27Tq5S4g="


@given(
    fields=st.dictionaries(texts, texts, max_size=4),
    body=st.binary(max_size=20),
    serialization=st.sampled_from(Serialization),
    token=st.none() | st.text(min_size=1, max_size=5),
)
def test_what_was_signed_is_recognised_on_the_other_side(fields, body, serialization, token):
    keys = Credentials(access_key="AK", secret_key="ü" * 9, security_token=token)
    request = Command.request(11, opaque=1, body=body, extra=fields, serialization=serialization)

    (frame,) = FrameReader().feed(encode_command(sign(request, keys)))
    command = decode_command(frame)

    assert access_key_of(command) == "AK"
    assert is_signed_by(command, "ü" * 9)
    assert not is_signed_by(command, "ü" * 8)


@pytest.mark.parametrize("name", ["topic", "AccessKey", "queueId"])
def test_a_changed_value_is_noticed(name):
    signed = sign(PULL, KEYS)

    changed = signed.with_fields({**signed.ext_fields, name: "other"})

    assert is_signed_by(signed, KEYS.secret_key)
    assert not is_signed_by(changed, KEYS.secret_key)


def test_a_request_without_a_signature_or_with_an_odd_one_is_not_signed():
    assert not is_signed_by(PULL, KEYS.secret_key)
    assert not is_signed_by(PULL.with_fields({"Signature": "é\ud800"}), KEYS.secret_key)
    assert access_key_of(PULL) is None


def test_a_cpp_client_without_credentials_has_no_name():
    header = (
        b'{"code":105,"extFields":{"AccessKey":"","OnsChannel":"ALIYUN",'
        b'"Signature":"jW7rhIvpAszTCy0Qv8KjsWFjWlw=","topic":"G_30950"},"flag":0,'
        b'"language":"CPP","opaque":0,"remark":"","version":63}\n'
    )

    command = decode_command(Frame(0, header))

    assert access_key_of(command) is None
    assert is_signed_by(command, "")


@pytest.mark.parametrize(
    ("version", "content"),
    [(Gate.UNSIGNED_UNIQUE_KEY_QUERY, b"AKk"), (Gate.UNSIGNED_UNIQUE_KEY_QUERY + 1, b"AKtruek")],
)
def test_old_clients_do_not_sign_the_mark_of_a_query_by_unique_key(version, content):
    fields = {"AccessKey": "AK", "_UNIQUE_KEY_QUERY": "true", "key": "k", "Signature": "s"}

    assert signed_content(fields, b"", version) == content


def test_secrets_do_not_show_in_logs():
    shown = repr(Credentials(access_key="AK", secret_key="hidden", security_token="hidden"))  # noqa: S106

    assert "AK" in shown
    assert "hidden" not in shown

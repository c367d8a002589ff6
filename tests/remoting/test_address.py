"""Addresses as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitmq.remoting.settings import Address, AddressError, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:9876", Address("localhost", 9876)),
        (" 127.0.0.1:10911 ", Address("127.0.0.1", 10911)),
        ("[::1]:9876", Address("::1", 9876)),
        ("[fe80::1%eth0]:0", Address("fe80::1%eth0", 0)),
        ("broker-a.example:65535", Address("broker-a.example", 65535)),
    ],
)
def test_a_host_and_a_port_make_an_address(text, address):
    assert parse_address(text) == address


def test_the_port_may_be_left_out_where_there_is_a_default():
    assert parse_address("localhost", default_port=9876) == Address("localhost", 9876)
    assert parse_address("[::1]", default_port=9876) == Address("::1", 9876)
    assert parse_address("localhost:1", default_port=9876) == Address("localhost", 1)
    # It would be somebody's 0.0.38.148, and is a port or a count that was put into the wrong place.
    with pytest.raises(AddressError, match="a number alone is no address: write host:port"):
        parse_address("9876", default_port=9876)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "host:port"),
        (":9876", "host:port"),
        ("local host:9876", "host:port"),
        ("http://localhost:9876", "has no scheme: write localhost:9876"),
        ("localhost", "needs a port, as in localhost:9876"),
        ("localhost:", "a port must be a number"),
        ("localhost:65536", "from 0 to 65535, got '65536'"),
        ("localhost:-1", "a port must be a number"),
        ("localhost:٣", "a port must be a number"),  # a digit, but not one of ours
        ("localhost:" + "9" * 5000, "a port must be a number"),
        ("::1:9876", "brackets"),
        ("[::1", r"\[address\]:port"),
        ("[::1]9876", r"\[address\]:port"),
        ("[localhost]:9876", r"\[address\]:port"),
    ],
)
def test_what_names_no_address_is_refused_with_what_is_allowed(text, problem):
    with pytest.raises(AddressError, match=problem):
        parse_address(text)


@settings(deadline=None)
@given(
    host=st.sampled_from(["localhost", "10.0.0.1", "::1", "2001:db8::7", "a-b.c"]),
    port=st.integers(0, 65535),
)
def test_an_address_is_read_back_as_it_was_written(host, port):
    address = Address(host, port)

    assert parse_address(str(address)) == address


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_nothing_but_the_declared_error_comes_out_of_any_text(text):
    try:
        address = parse_address(text)
    except AddressError:
        return

    assert address.host
    assert 0 <= address.port <= 65535

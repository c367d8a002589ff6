"""The numbers of the protocol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitmq.wire import codes
from orbitmq.wire.bodies import LanguageName


@pytest.mark.parametrize(
    ("release", "ordinal"),
    [
        ((3, 0, 11), 37),
        ((3, 1, 8), 63),
        ((3, 2, 6), 79),
        ((3, 4, 9), 121),
        ((3, 5, 8), 137),
        ((4, 0, 0), 213),
        ((4, 1, 0), 233),
        ((4, 4, 0), 293),
        ((4, 5, 2), 317),
        ((4, 6, 1), 335),
        ((4, 7, 1), 355),
        ((4, 9, 3), 399),
        ((4, 9, 4), 401),
        ((4, 9, 8), 409),
        ((5, 0, 0), 413),
        ((5, 1, 4), 441),
        ((5, 3, 3), 479),
        ((5, 4, 0), 493),
        ((5, 9, 9), 611),
        ((3, 1, 8, True), 62),
        ((3, 0, 7, True), 28),
        ((4, 1, 0, True), 232),
    ],
)
def test_releases_have_the_ordinals_that_apache_gave_them(release, ordinal):
    assert codes.ordinal_of(codes.Release(*release)) == ordinal
    assert codes.release_of(ordinal) == codes.Release(*release)


@given(st.integers(16, codes.HIGHER_VERSION - 1))
def test_every_ordinal_from_3_0_1_on_belongs_to_one_release(ordinal):
    release = codes.release_of(ordinal)

    assert release is not None
    assert codes.ordinal_of(release) == ordinal


@pytest.mark.parametrize("ordinal", [-1, 0, 15, codes.HIGHER_VERSION, 10_000])
def test_other_ordinals_belong_to_none(ordinal):
    assert codes.release_of(ordinal) is None


def test_an_unknown_release_is_refused_by_name():
    with pytest.raises(codes.WireError, match=r"3\.3\.0"):
        codes.ordinal_of(codes.Release(3, 3, 0))


def test_gates_stand_at_their_releases():
    assert str(codes.release_of(codes.OUR_VERSION)) == "5.3.3"
    assert str(codes.release_of(codes.Gate.STANDARD_JSON)) == "4.9.4"
    assert str(codes.release_of(codes.Gate.UNSIGNED_UNIQUE_KEY_QUERY)) == "4.9.3"
    assert str(codes.release_of(codes.Gate.SQL_SUBSCRIPTIONS)) == "4.1.0-SNAPSHOT"
    assert str(codes.release_of(codes.Gate.CLIENT_TELLS_STATE)) == "3.1.8-SNAPSHOT"
    assert str(codes.release_of(codes.Gate.BEFORE_GO_AWAY)) == "5.3.1"


def test_codes_of_both_kinds_have_their_numbers():
    assert (codes.RequestCode.SEND_MESSAGE_V2, codes.RequestCode.POP_MESSAGE) == (310, 200050)
    assert (codes.ResponseCode.PULL_OFFSET_MOVED, codes.ResponseCode.RPC_TIME_OUT) == (21, -1006)
    assert len(codes.RequestCode.__members__) == len(set(codes.RequestCode)) == 153
    assert len(codes.ResponseCode.__members__) == len(set(codes.ResponseCode)) == 66


def test_languages_have_one_order_by_name_and_by_number():
    assert [language.name for language in codes.Language] == [name.value for name in LanguageName]
    assert [int(language) for language in codes.Language] == list(range(14))

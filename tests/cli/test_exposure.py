"""Which addresses may be listened on without a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orbitmq.broker.settings import BrokerSettings, HttpSettings
from orbitmq.cli.errors import Exposed
from orbitmq.cli.exposure import check_broker, check_exposure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_the_loopback_needs_no_word(host: str) -> None:
    check_exposure("broker.host", host, is_accepted=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "198.51.100.7", "2001:db8::1"])  # noqa: S104
def test_what_others_reach_needs_one(host: str) -> None:
    with pytest.raises(Exposed, match="--insecure"):
        check_exposure("broker.host", host, is_accepted=False)

    check_exposure("broker.host", host, is_accepted=True)


def test_the_pages_of_a_broker_count_when_they_are_served() -> None:
    wide = HttpSettings(host="198.51.100.7")
    settings = BrokerSettings(root=Path("here"), http=wide)

    check_broker(settings, is_accepted=False)
    with pytest.raises(Exposed, match=r"broker\.http\.host"):
        check_broker(replace(settings, http=replace(wide, port=0)), is_accepted=False)

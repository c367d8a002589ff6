"""Who a client is."""

from __future__ import annotations

import os

import pytest

from orbitmq.client.engine import Engine, ProcessCheck, make_client_id, own_ip
from orbitmq.client.errors import UsedAfterFork
from orbitmq.client.settings import ClientSettings


@pytest.mark.feature("A17")
def test_clients_of_one_process_have_distinct_ids_by_default():
    settings = ClientSettings(name_servers=("localhost:9876",))

    ids = {Engine(settings).client_id for _ in range(100)}

    assert len(ids) == 100
    for client_id in ids:
        ip, _, instance = client_id.partition("@")
        assert ip == own_ip()
        assert instance.startswith(f"{os.getpid()}#")


def test_a_stable_id_is_the_same_after_a_restart():
    settings = ClientSettings(client_ip="10.0.0.7")

    assert make_client_id(settings, stable=True) == "10.0.0.7@DEFAULT"


def test_the_parts_of_an_id_can_be_chosen():
    settings = ClientSettings(client_ip="10.0.0.7", instance="worker-3", unit="north")

    assert make_client_id(settings) == "10.0.0.7@worker-3@north"
    assert make_client_id(settings, stable=True) == "10.0.0.7@worker-3@north"


def test_what_is_started_belongs_to_the_process_that_it_is_started_in(monkeypatch):
    check = ProcessCheck("the producer", from_start=True)
    made_in = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: made_in + 1)
    check()

    assert check.begin(), "it was made in another"
    assert check.is_same
    check()

    monkeypatch.setattr(os, "getpid", lambda: made_in)
    for use in (check, check.begin):
        with pytest.raises(UsedAfterFork):
            use()


def test_use_in_another_process_is_refused(monkeypatch):
    check = ProcessCheck("the producer")
    check()
    made_in = os.getpid()

    monkeypatch.setattr(os, "getpid", lambda: made_in + 1)

    assert not check.is_same
    with pytest.raises(UsedAfterFork, match="the producer belongs to process") as refused:
        check()
    assert (refused.value.belongs_to, refused.value.used_in) == (made_in, made_in + 1)

"""`orbitmq cluster show`."""

from __future__ import annotations


def test_brokers_and_name_servers_are_shown(cluster, cli):
    record = cli.record("cluster", "show")
    text = cli.text("cluster", "show")

    assert record["is_healthy"]
    assert [each["broker"] for each in record["brokers"]] == ["broker-a", "broker-b"]
    assert [each["address"] for each in record["brokers"]] == list(cluster.broker_addresses)
    assert all(each["is_up"] and each["is_orbitmq"] for each in record["brokers"])
    (server,) = record["name_servers"]
    assert server == {
        "address": cluster.name_server,
        "is_up": True,
        "brokers": ["broker-a", "broker-b"],
        "problem": None,
    }
    assert "broker-a" in text
    assert cluster.name_server in text


def test_a_name_server_that_is_down_is_named_and_the_command_fails(cluster, cli):
    servers = ("--name-server", cluster.name_server, "--name-server", "127.0.0.1:1")

    record = cli.record("cluster", "show", *servers, code=1)
    text = cli.run("cluster", "show", *servers)

    assert not record["is_healthy"]
    assert [each["is_up"] for each in record["name_servers"]] == [True, False]
    assert "cannot connect" in record["name_servers"][1]["problem"]
    assert "! 127.0.0.1:1: " in text.stdout

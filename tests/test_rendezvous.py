"""The processes of a group wait for each other: real sockets on loopback, each process a thread."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.cluster import ClusterDescription
from trainer.errors import WorldFailure
from trainer.rendezvous import wait_for_peers


def free_addresses(number):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    addresses = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    for each in sockets:
        each.close()
    return addresses


def workers(addresses, **more):
    return [
        ClusterDescription(workers=addresses, task_type="worker", task_index=i, **more) for i in range(len(addresses))
    ]


def gather(descriptions, timeout_secs=10.0, delays=None):
    """Lets each process come after its delay; returns when each was let go, or what it raised."""

    def come(description, delay):
        time.sleep(delay)
        try:
            wait_for_peers(description, timeout_secs)
        except WorldFailure as failure:
            return failure
        return time.monotonic()

    with ThreadPoolExecutor(len(descriptions)) as pool:
        return list(pool.map(come, descriptions, delays or [0.0] * len(descriptions)))


def listens(address):
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize("delays", [[0, 0, 0, 0], [0, 0.5, 1.0, 0.2], [1.0, 0, 0, 0]])
def test_all_are_let_go_after_the_last_has_come_and_the_ports_are_free(delays):
    addresses = free_addresses(4)
    start = time.monotonic()
    gone = gather(workers(addresses), delays=delays)
    assert all(isinstance(at, float) and at - start >= max(delays) for at in gone), gone
    assert not any(listens(address) for address in addresses)


def test_the_missing_are_named_with_their_addresses_and_nobody_else_is():
    addresses = free_addresses(4)
    here = workers(addresses)
    for failure in gather([here[0], here[2]], timeout_secs=1.5):
        assert isinstance(failure, WorldFailure)
        assert f"worker 1 ({addresses[1]}): nothing listens on its port" in str(failure)
        assert f"worker 3 ({addresses[3]}): nothing listens on its port" in str(failure)
        assert "2 of 4 processes did not come" in str(failure)
        assert f"({addresses[0]})" not in str(failure)
        assert f"({addresses[2]})" not in str(failure)


def test_a_missing_leader_is_named():
    addresses = free_addresses(3)
    for failure in gather(workers(addresses)[1:], timeout_secs=1.0):
        assert f"1 of 3 processes did not come. worker 0 ({addresses[0]}): nothing listens" in str(failure)


def test_a_name_that_does_not_resolve_is_said_to():
    (address,) = free_addresses(1)
    here = workers((address, "no-such-host.invalid:2222"))[0]
    with pytest.raises(WorldFailure, match=r"worker 1 \(no-such-host.invalid:2222\): its name does not resolve"):
        wait_for_peers(here, 0.5)


def test_a_process_started_twice_is_told_who_holds_its_address():
    here = workers(free_addresses(2))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(wait_for_peers, here[1], 6.0)
        time.sleep(0.3)
        with pytest.raises(WorldFailure, match=r"worker 1 .* was started twice: process \d+ on "):
            wait_for_peers(here[1], 6.0)
        wait_for_peers(here[0], 6.0)  # the first one is not harmed
        first.result()


def test_a_port_of_another_program_is_said_to_be_taken():
    here = workers(free_addresses(2))
    port = int(here[0].address.split(":")[1])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(WorldFailure, match=rf"worker 0 .*port {port} is taken"),
    ):
        wait_for_peers(here[0], 0.5)


def test_a_port_that_is_let_go_soon_is_waited_for():
    here = workers(free_addresses(2))
    predecessor = socket.create_server(("127.0.0.1", int(here[0].address.split(":")[1])))
    threading.Timer(0.6, predecessor.close).start()
    assert all(isinstance(at, float) for at in gather(here))


def test_another_program_at_a_peers_address_is_not_taken_for_the_peer():
    addresses = free_addresses(2)
    with socket.create_server(("127.0.0.1", int(addresses[1].split(":")[1]))) as stranger:

        def talk():
            while True:
                try:
                    connection, _ = stranger.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=talk, daemon=True).start()
        with pytest.raises(WorldFailure, match=r"worker 1 .*its port belongs to another program"):
            wait_for_peers(workers(addresses)[0], 1.0)
        stranger.shutdown(socket.SHUT_RDWR)


def test_a_peer_with_another_description_is_not_let_in():
    addresses = free_addresses(3)
    lone, other = workers(addresses[:2])[0], workers(addresses)[1]
    first, second = gather([lone, other], timeout_secs=1.5)
    assert f"worker 1 ({addresses[1]}): is there with another description of the cluster (process" in str(first)
    assert f"worker 0 ({addresses[0]}): is there with another description of the cluster (process" in str(second)


def serve_like_tensorflow(address):
    """Greets as every HTTP/2 server does."""
    server = socket.create_server(("127.0.0.1", int(address.split(":")[1])))

    def talk():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + b"\x00\x03\x00\x00\x00\x64")
                connection.recv(4096)

    threading.Thread(target=talk, daemon=True).start()
    return server


def with_servers(addresses):
    given = {"chief": addresses[0], "workers": addresses[1:3], "parameter_servers": addresses[3:]}
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    return [ClusterDescription(**given, task_type=kind, task_index=i) for kind, i in tasks]


def test_a_worker_that_comes_back_alone_joins_a_parameter_server_group_at_work():
    addresses = free_addresses(4)
    chief, worker = with_servers(addresses)[0], with_servers(addresses)[2]
    with serve_like_tensorflow(chief.address) as server:
        wait_for_peers(worker, 3.0)
        server.shutdown(socket.SHUT_RDWR)


def test_a_new_chief_finds_workers_and_servers_that_were_back_before_it():
    addresses = free_addresses(4)
    servers = [serve_like_tensorflow(address) for address in addresses[1:]]
    wait_for_peers(with_servers(addresses)[0], 3.0)
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def test_a_synchronous_worker_does_not_join_a_group_at_work():
    addresses = free_addresses(2)
    with serve_like_tensorflow(addresses[0]) as server:
        with pytest.raises(WorldFailure, match=r"worker 0 .*an earlier group is still training there"):
            wait_for_peers(workers(addresses)[1], 1.0)
        server.shutdown(socket.SHUT_RDWR)


def test_chief_workers_and_parameter_servers_wait_for_each_other():
    assert all(isinstance(at, float) for at in gather(with_servers(free_addresses(4)), delays=[0.5, 0, 0, 0.2]))


def test_an_evaluator_waits_for_nobody():
    wait_for_peers(ClusterDescription(workers=("no-such-host.invalid:1",), task_type="evaluator", task_index=0), 60.0)


def test_waiting_is_reported(monkeypatch):
    monkeypatch.setattr("trainer.rendezvous._REPORT_EVERY_SECS", 0.3)
    addresses = free_addresses(2)
    heard = []
    with pytest.raises(WorldFailure):
        wait_for_peers(workers(addresses)[0], 1.0, report=heard.append)
    assert heard[0] == f"worker 0 waits for worker 1 ({addresses[1]}): nothing listens on its port"


def test_a_process_that_dies_while_waiting_and_comes_back_is_counted_once():
    here = workers(free_addresses(3))
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(wait_for_peers, here[0], 15.0)
        with pytest.raises(WorldFailure):  # gives up while worker 2 is missing
            wait_for_peers(here[1], 0.6)
        again = pool.submit(wait_for_peers, here[1], 15.0)
        wait_for_peers(here[2], 15.0)
        again.result()
        leader.result()

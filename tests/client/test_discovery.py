"""Engines that are looked up: what entries stand for, and a pool whose engines come and go."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dns.asyncresolver
import dns.message
import dns.rrset
import pytest

from inferengine.client import AsyncClient, Client, EnginePool
from inferengine.client.discovery import EngineDiscovery
from inferengine.config import Config, engine_addresses
from inferengine.errors import ConfigError
from tests.client.engine_process import engine_processes
from tests.client.test_pool import client_of, output_of, read_ids, submit, until


def look_up(*entries: str) -> list[str]:
    return asyncio.run(EngineDiscovery(entries).look_up())


@contextmanager
def name_server(records: list[str]) -> Iterator[int]:
    """Yield a name server on UDP that answers every SRV query with `records`, "PRIORITY WEIGHT PORT TARGET"; its
    port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                data, peer = server.recvfrom(4096)
                if data == b"end":
                    return
                query = dns.message.from_wire(data)
                reply = dns.message.make_response(query)
                if records:
                    reply.answer.append(dns.rrset.from_text(query.question[0].name, 5, "IN", "SRV", *records))
                server.sendto(reply.to_wire(), peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.sendto(b"end", server.getsockname())
            thread.join(10)


@pytest.fixture
def use_name_server(monkeypatch: pytest.MonkeyPatch):
    def use(port: int) -> None:
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], port
        monkeypatch.setattr(dns.asyncresolver, "default_resolver", resolver)

    return use


# -- entries -----------------------------------------------------------------------------------------------------------


def test_addresses_stand_for_themselves_and_need_no_watch() -> None:
    entries = ["tcp://10.0.0.1:5555", "ipc:///run/a.sock"]
    assert look_up(*entries) == entries
    assert not EngineDiscovery(entries).is_dynamic


def test_a_name_stands_for_each_of_its_addresses() -> None:
    assert "tcp://127.0.0.1:5555" in look_up("dns+tcp://localhost:5555")


def test_an_ipv6_address_is_in_brackets() -> None:
    assert look_up("dns+tcp://[::1]:5555") == ["tcp://[::1]:5555"]


def test_srv_records_name_hosts_and_ports(use_name_server) -> None:
    with name_server(["0 0 5555 localhost.", "0 0 6555 localhost."]) as port:
        use_name_server(port)
        found = look_up("srv+tcp://_wire._tcp.engines.example")
    assert {"tcp://127.0.0.1:5555", "tcp://127.0.0.1:6555"} <= set(found)


def test_a_service_without_records_has_no_engine(use_name_server) -> None:
    with name_server([]) as port:
        use_name_server(port)
        assert look_up("srv+tcp://_wire._tcp.engines.example") == []


def test_a_file_has_an_address_in_each_line(tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("# two of them\ntcp://10.0.0.1:5555\n\nipc:///run/b.sock  # local\n")
    assert look_up(f"file:{tmp_path}/engines") == ["tcp://10.0.0.1:5555", "ipc:///run/b.sock"]


def test_what_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "engines"
    file.write_text("tcp://10.0.0.1:5555\n")
    discovery = EngineDiscovery([f"file:{file}"])

    async def main() -> None:
        assert await discovery.look_up() == ["tcp://10.0.0.1:5555"]
        for content in (None, "", "http://10.0.0.1:5555\n"):
            file.unlink() if content is None else file.write_text(content)
            assert await discovery.look_up() == ["tcp://10.0.0.1:5555"]

    asyncio.run(main())
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "http://10.0.0.1:5555" in caplog.messages[-1]


@pytest.mark.parametrize("address", ["engine.sock", "tcp://127.0.0.1", "tcp://127.0.0.1:65534", "http://127.0.0.1:1"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_refuses_what_is_no_address(kind: type[Client | AsyncClient], address: str) -> None:
    with pytest.raises(ConfigError, match=rf"address: must be.*; got '{address}'"):
        kind(address)


@pytest.mark.parametrize(
    "entry",
    [
        "10.0.0.1:5555",
        "http://engine:5555",
        "dns+tcp://engines",
        "dns+tcp://engines:0",
        "srv+tcp://engines",
        "file:",
        "tcp://engine",
        "tcp://engine:99999",
    ],
)
def test_an_entry_that_cannot_be_an_address_is_refused_by_its_key(entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineDiscovery([entry])
    assert caught.value.field == "wire.engines"


def test_the_configuration_names_several_entries() -> None:
    config = Config().with_values(wire={"engines": "dns+tcp://a:5555, file:/run/engines"})
    assert engine_addresses(config) == ["dns+tcp://a:5555", "file:/run/engines"]


# -- a pool ------------------------------------------------------------------------------------------------------------


def test_engines_come_and_go_while_streams_run(tmp_path: Path) -> None:
    """The second engine is named after the start, the first no longer: its streams end as if nothing had been."""
    file = tmp_path / "engines"

    async def main() -> None:
        with engine_processes(tmp_path, 2, step_s=0.01) as (first, second):
            file.write_text(first.address)
            pool = EnginePool([f"file:{file}"], discovery_s=0.05, generator=random.Random(1))
            try:
                await pool.wait_ready(60.0)
                streams = [submit(pool, 150, seed).streams[0] for seed in range(3)]
                readers = [asyncio.create_task(read_ids(stream)) for stream in streams]
                await until(lambda: all(stream.num_tokens for stream in streams))
                file.write_text(f"{first.address}\n{second.address}")
                await until(lambda: len(pool.clients) == 2 and pool.clients[1].ready)
                assert pool.addresses == [first.address, second.address]
                file.write_text(second.address)
                await until(lambda: pool.addresses == [second.address])
                later = [submit(pool, 5, seed) for seed in range(8)]
                assert {client_of(pool, item).address for item in later} == {second.address}
                results = await asyncio.gather(*readers)
                assert [tokens for tokens, _ in results] == [output_of(150, seed) for seed in range(3)]
                assert pool.num_moved == 0
                await until(lambda: [client.address for client in pool.clients] == [second.address])
            finally:
                await pool.close()

    asyncio.run(asyncio.wait_for(main(), 250.0))


def test_an_engine_that_is_named_again_is_served_with_again(tmp_path: Path) -> None:
    async def main() -> None:
        with engine_processes(tmp_path, 2, step_s=0.005) as (first, second):
            pool = EnginePool([first.address, second.address])
            try:
                await pool.wait_ready(60.0)
                await until(lambda: all(client.ready for client in pool.clients))
                pool.set_addresses([second.address])
                assert [client.address for client in pool.clients] == [second.address]
                pool.set_addresses([second.address, first.address])
                await until(lambda: all(client.ready for client in pool.clients) and len(pool.clients) == 2)
                pool.set_addresses([first.address])
                assert (await read_ids(submit(pool, 5, 3).streams[0]))[0] == output_of(5, 3)
            finally:
                await pool.close()

    asyncio.run(asyncio.wait_for(main(), 250.0))


def test_a_pool_that_knows_no_engine_yet_says_so_and_finds_it_later(tmp_path: Path) -> None:
    file = tmp_path / "engines"

    async def main() -> None:
        with engine_processes(tmp_path, 1, step_s=0.005) as (engine,):
            pool = EnginePool([f"file:{file}"], discovery_s=0.05)
            try:
                with pytest.raises(Exception, match=r"[Nn]o engine"):
                    await pool.connect(0.2)
                assert not pool.ready
                file.write_text(engine.address)
                await pool.wait_ready(60.0)
                assert (await read_ids(submit(pool, 5, 3).streams[0]))[0] == output_of(5, 3)
            finally:
                await pool.close()

    asyncio.run(asyncio.wait_for(main(), 250.0))

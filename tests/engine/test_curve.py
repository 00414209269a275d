"""CURVE on TCP: listed keys get in, others do not, and unix sockets go on without."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferengine.client import AsyncClient, Client
from inferengine.config import Config
from inferengine.engine.io.endpoint import Endpoint
from inferengine.engine.service import EngineService
from inferengine.errors import ConfigError, InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire.curve import ClientKeys, client_keys, new_pair, read_pair, write_pair
from tests.engine.builders import address_of, make_config, run_service
from tests.ports import free_port

ENGINE, FRIEND, STRANGER = new_pair(), new_pair(), new_pair()
REFUSED_S = 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("curve")
    write_pair(made / "engine.key", ENGINE)
    write_pair(made / "friend.key", FRIEND)
    (made / "clients.toml").write_text(f'friend = "{FRIEND.public.decode()}"\n')
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineService]:
    with run_service(wire={"tcp": f"tcp://127.0.0.1:{free_port()}", **server(folder)}) as running:
        yield running


def server(folder: Path) -> dict[str, Any]:
    files = {"curve_secret_file": "engine.key", "curve_clients_file": "clients.toml"}
    return {name: str(folder / file) for name, file in files.items()}


def answers(address: str, curve: ClientKeys | None) -> bool:
    """Return whether a client with these keys is served."""
    client = Client(address, curve=curve)
    try:
        client.connect(5.0 if curve == ClientKeys(FRIEND, ENGINE.public) else REFUSED_S)
        stream = client.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)).streams[0]
        return sum(len(delta.token_ids) for delta in stream) == 4
    except InferEngineError:
        return False
    finally:
        client.close()


def test_a_stranger_is_named_in_the_log_once(engine: EngineService, caplog: pytest.LogCaptureFixture) -> None:
    stranger = new_pair()
    for _ in range(2):
        assert not answers(engine.config.wire.tcp, ClientKeys(stranger, ENGINE.public))
    told = [record.fields["key"] for record in caplog.records if "CURVE key is not in" in record.message]
    assert told.count(stranger.public.decode()) == 1


def test_a_listed_key_is_served(engine: EngineService) -> None:
    assert answers(engine.config.wire.tcp, ClientKeys(FRIEND, ENGINE.public))


@pytest.mark.parametrize(
    "curve",
    [None, ClientKeys(STRANGER, ENGINE.public), ClientKeys(FRIEND, STRANGER.public)],
    ids=["no key", "a stranger's key", "another engine's key"],
)
def test_a_client_whose_key_is_not_listed_is_not_answered(engine: EngineService, curve: ClientKeys | None) -> None:
    assert not answers(engine.config.wire.tcp, curve)


def test_a_unix_socket_needs_no_key(engine: EngineService) -> None:
    client = Client(address_of(engine))
    assert client.connect(5.0).state == "READY"
    client.close()


def test_an_async_client_hears_status_too(engine: EngineService) -> None:
    async def listen() -> dict[str, Any]:
        async with AsyncClient(engine.config.wire.tcp, curve=ClientKeys(FRIEND, ENGINE.public)) as client:
            while client.status is None:
                await asyncio.sleep(0.02)
            return client.status

    status = asyncio.run(asyncio.wait_for(listen(), 10))
    assert status["state"] == "READY"


def test_other_addresses_may_be_bound_with_keys_only(folder: Path, tmp_path: Path) -> None:
    address = f"tcp://0.0.0.0:{free_port()}"
    with pytest.raises(ConfigError, match="inferengine keygen"):
        Endpoint(make_config(str(tmp_path), wire={"tcp": address}))
    Endpoint(make_config(str(tmp_path), wire={"tcp": address, **server(folder)})).close(0)


def test_a_pair_is_for_its_owner_alone(folder: Path) -> None:
    assert stat.S_IMODE((folder / "engine.key").stat().st_mode) == 0o600
    assert read_pair(str(folder / "engine.key")) == ENGINE
    with pytest.raises(FileExistsError):
        write_pair(folder / "engine.key", FRIEND)


@pytest.mark.parametrize("text", ["", "public = 3", 'public = "short"\nsecret = "x"', "not toml ["])
def test_a_broken_key_file_is_named_and_not_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "k").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_pair(str(tmp_path / "k"))
    assert caught.value.field == "wire.curve_secret_file"
    assert "short" not in caught.value.message


def test_a_client_s_keys_come_from_its_configuration(folder: Path) -> None:
    assert client_keys(Config()) is None
    wire = {"curve_engine_key": ENGINE.public.decode(), "curve_secret_file": str(folder / "friend.key")}
    assert client_keys(Config().with_values(wire=wire)) == ClientKeys(FRIEND, ENGINE.public)
    with pytest.raises(ConfigError, match="keygen"):
        client_keys(Config().with_values(wire={"curve_engine_key": ENGINE.public.decode()}))

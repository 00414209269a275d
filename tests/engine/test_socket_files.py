"""SocketFiles: unix sockets whose file somebody removed are bound again, and connections live on."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from inferengine.client import Client
from inferengine.engine.io import endpoint, socket_files
from inferengine.engine.io.endpoint import LONGEST_UNIX_PATH
from inferengine.engine.service import EngineService
from inferengine.sampling_params import SamplingParams
from inferengine.wire.curve import ClientKeys, new_pair, write_pair
from tests.engine.builders import (
    address_of,
    assert_asks_for_keys,
    assert_served,
    run_held,
    run_service,
    tokens_of,
    wait_until,
)
from tests.ports import free_port


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_files, "CHECK_S", 0.05)


def socket_path(engine: EngineService) -> Path:
    return Path(address_of(engine).removeprefix("ipc://"))


def in_folder(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "engine"
    folder.mkdir(mode=0o750)
    return {"socket": f"ipc://{folder}/engine.sock"}


def test_new_clients_find_the_engine_again_and_running_streams_notice_nothing() -> None:
    with run_held() as (engine, device):
        client = Client(address_of(engine))
        try:
            client.connect(60.0)
            stream = client.submit([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True)).streams[0]
            for path in socket_path(engine).parent.glob("*.sock*"):
                path.unlink()
            wait_until(lambda: engine.io.socket_files.num_restored == 2)  # the ROUTER's and that of STATUS
            assert stat.S_IMODE(socket_path(engine).stat().st_mode) & 0o007 == 0
            device.let()
            assert sum(len(delta.token_ids) for delta in stream) == 200
            assert engine.io.counters.num_connections == 1, "it never had to connect again"
        finally:
            client.close()
        assert_served(address_of(engine))


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    with run_service(wire=in_folder(tmp_path)) as engine:
        shutil.rmtree(socket_path(engine).parent)
        wait_until(lambda: engine.io.socket_files.num_restored == 2)
        assert stat.S_IMODE(socket_path(engine).parent.stat().st_mode) == 0o750
        assert_served(address_of(engine))


def test_without_its_place_the_engine_complains_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "runtime"
    place.mkdir()
    with run_service(wire=in_folder(place)) as engine, caplog.at_level(logging.ERROR):
        client = Client(address_of(engine))
        try:
            client.connect(60.0)
            shutil.rmtree(place)
            wait_until(lambda: sum("cannot be made again" in record.message for record in caplog.records) == 2)
            assert tokens_of(client) == 4
            place.mkdir()
            wait_until(lambda: engine.io.socket_files.num_restored == 2)
        finally:
            client.close()
        assert sum("cannot be made again" in record.message for record in caplog.records) == 2
        assert_served(address_of(engine))


def test_removed_again_and_again_it_costs_no_more_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_STALE", 4)
    with run_service() as engine:
        most = 0
        for number in range(1, 16):
            socket_path(engine).unlink(missing_ok=True)
            wait_until(lambda number=number: engine.io.socket_files.num_restored >= number)  # type: ignore[misc]
            if number == 4:
                most = len(os.listdir("/proc/self/fd"))
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= most)
        assert_served(address_of(engine))


def test_a_path_may_be_as_long_as_at_the_start() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / ("x" * (LONGEST_UNIX_PATH - len(f"{place}//e.sock.replay")))
        folder.mkdir(mode=0o750)
        with run_service(wire={"socket": f"ipc://{folder}/e.sock"}) as engine:
            shutil.rmtree(folder)
            wait_until(lambda: engine.io.socket_files.num_restored == 2)
            assert_served(address_of(engine))


def test_clients_of_the_file_need_no_keys_and_those_of_tcp_still_do(tmp_path: Path) -> None:
    own, user = new_pair(), new_pair()
    write_pair(tmp_path / "engine.key", own)
    (tmp_path / "clients.toml").write_text(f'user = "{user.public.decode()}"\n')
    address = f"tcp://127.0.0.1:{free_port()}"
    wire = {
        "tcp": address,
        "curve_secret_file": str(tmp_path / "engine.key"),
        "curve_clients_file": str(tmp_path / "clients.toml"),
    }
    with run_service(wire=wire) as engine:
        socket_path(engine).unlink()
        wait_until(lambda: engine.io.socket_files.num_restored == 1)
        assert_served(address_of(engine))
        assert_served(address, curve=ClientKeys(user, own.public))
        assert_asks_for_keys(address)

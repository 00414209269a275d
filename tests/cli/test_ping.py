"""`inferengine ping`: exit codes and lines of a health check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferengine.cli.main import main
from inferengine.client import Client
from inferengine.sampling_params import SamplingParams
from tests.engine.builders import address_of, run_service, wait_until
from tests.ports import free_port


def ping(address: str, *words: str) -> int:
    return main(["ping", *words, "--wire.socket", address])


def test_an_engine_that_takes_requests_is_alive_and_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with run_service() as service:
        assert ping(address_of(service)) == ping(address_of(service), "--ready") == 0
    assert capsys.readouterr().out.startswith("ok: READY, its loop turned 0.")


def test_a_draining_engine_is_alive_and_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with run_service(step_s=0.1) as service, Client(address_of(service)) as client:
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        next(iter(client.submit([1, 2, 3], params).streams[0]))  # it has something to finish
        service.drain()
        wait_until(lambda: service.lifecycle.state == "DRAINING")
        assert ping(address_of(service)) == 0
        assert ping(address_of(service), "--ready") == 1
    assert capsys.readouterr().out.startswith("ok: DRAINING")


def test_keys_that_cannot_be_used_are_no_answer_about_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        ping("tcp://127.0.0.1:5555", "--wire.curve_engine_key", "abc", "--wire.curve_secret_file", "nowhere.key") == 2
    )
    assert "wire.curve_engine_key: " in capsys.readouterr().err


def test_an_engine_over_tcp_may_ask_for_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert ping(f"tcp://127.0.0.1:{free_port()}", "--timeout", "0.1") == 1
    assert "wire.curve_engine_key is needed" in capsys.readouterr().out


def test_where_nothing_listens_the_answer_names_the_address(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ping(f"ipc://{tmp_path}/none.sock", "--timeout", "0.2", "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["alive"] is False
    assert answer["address"] == f"ipc://{tmp_path}/none.sock"

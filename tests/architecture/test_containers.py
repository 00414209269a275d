"""Dockerfile, compose.yaml and constraints.txt fit the package: what can be said without Docker."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from frontends.common.auth import KeyRing, check_protection
from inferengine.cli.command import resolve
from inferengine.config import Config
from inferengine.errors import ConfigError
from tests.engine.builders import address_of, run_service

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = {name: one for name, one in COMPOSE["services"].items() if one["image"] == "inferengine"}
IMAGE_VARIABLES = dict(
    re.findall(r"\b(INFERENGINE_[A-Z_]+)=(\S+)", DOCKERFILE.partition("ENV ")[2].partition("VOLUME")[0])
)


def command_of_the_image() -> list[str]:
    found = re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    return list(json.loads(found[1]))


@pytest.mark.parametrize(
    "command",
    [command_of_the_image(), *(service["command"] for service in SERVICES.values())],
    ids=lambda words: words[0],
)
def test_every_command_is_one_of_the_command_line_s(command: list[str]) -> None:
    part, *flags = command
    assert part in ("up", "engine", "http", "ws")
    config = resolve([str(flag) for flag in flags], takes_model=True)
    assert config.http.allow_public == (part in ("up", "http"))
    assert config.ws.allow_public == (part in ("up", "ws"))


@pytest.mark.parametrize("words", [["./my-model"], ["./my-model", "--http.port", "9000"]])
def test_a_command_of_one_s_own_is_reachable_and_asks_for_keys(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker run IMAGE up MODEL` replaces the image's command: what it needs is in the environment."""
    monkeypatch.setattr(os, "environ", {**IMAGE_VARIABLES, "INFERENGINE_REVISION": ""})
    config = resolve(words, takes_model=True)
    assert (config.http.host, config.ws.host) == ("0.0.0.0", "0.0.0.0")
    assert config.wire.socket == "ipc:///run/inferengine/engine.sock"
    assert not config.http.allow_public
    refusal = pytest.raises(ConfigError, match=r"auth\.keys_file")
    with socket.create_server((config.http.host, 0)) as listener, refusal:
        check_protection("http", [listener], KeyRing(), allow_public=config.http.allow_public)


def test_the_image_asks_the_engine_whether_it_is_well() -> None:
    found = re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    assert json.loads(found[1]) == SERVICES["engine"]["healthcheck"]["test"][1:]


def test_prometheus_and_grafana_are_given_files_that_are_there() -> None:
    watching = {name: one for name, one in COMPOSE["services"].items() if one.get("profiles") == ["watch"]}
    assert set(watching) == {"prometheus", "grafana"}
    inside: set[str] = set()
    for service in watching.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
            inside.add(target)
        for config in service["configs"]:
            assert yaml.safe_load(COMPOSE["configs"][config["source"]]["content"])
    scrape = yaml.safe_load(COMPOSE["configs"]["scrape"]["content"])
    assert set(scrape["rule_files"]) <= inside
    targets = [target for job in scrape["scrape_configs"] for one in job["static_configs"] for target in one["targets"]]
    assert targets == [f"http:{Config().http.port}", f"ws:{Config().ws.port}"]
    (provider,) = yaml.safe_load(COMPOSE["configs"]["dashboards"]["content"])["providers"]
    assert provider["options"]["path"] in inside
    assert json.loads((ROOT / "systemd/grafana/inferengine.json").read_text(encoding="utf-8"))["panels"]


def test_what_the_image_copies_is_there_and_all_that_the_package_needs() -> None:
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    assert [name for name in copied if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {project["project"]["readme"], "pyproject.toml", "constraints.txt"} <= copied


def test_every_part_has_longer_to_stop_than_it_takes_to_drain() -> None:
    for service in SERVICES.values():
        assert float(service["stop_grace_period"].removesuffix("s")) > Config().engine.drain_timeout_s + 5


def test_the_engine_is_healthy_while_its_loop_turns_and_not_without_one(tmp_path: Path) -> None:
    _, program, *arguments = SERVICES["engine"]["healthcheck"]["test"]
    assert program == "inferengine"
    with run_service() as engine:
        for address, code in ((address_of(engine), 0), (f"ipc://{tmp_path}/nobody", 1)):
            environment = {**os.environ, "INFERENGINE_WIRE_SOCKET": address}
            run = "import sys; from inferengine.cli.main import main; sys.exit(main())"
            command = [sys.executable, "-c", run, *arguments]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert ran.returncode == code, ran.stderr


def test_no_version_of_triton_is_fixed() -> None:
    """A CUDA build of torch asks for one version of triton exactly, which is seldom the newest: with another one fixed
    beside it nothing can be installed on a machine with a GPU."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (triton,) = (line.partition("#")[0] for line in lines if line.startswith("triton"))
    assert "==" not in triton

"""The units: verified, scored, and booted once for real with systemd as PID 1."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferengine.cli.systemd import data_folder, this_install, units
from tests.systemd.machine import ROOT, Machine

UNITS = sorted(path for path in (ROOT / "systemd").iterdir() if path.suffix in (".service", ".socket", ".target"))
SERVICES = [path for path in UNITS if path.suffix == ".service"]
WORST_EXPOSURE = {"inferengine-engine.service": 1.6, "inferengine-http.service": 1.4, "inferengine-ws.service": 1.4}
EXEC_FAILED = 203  # systemd's own: the program cannot be run
TOML = '[engine]\ndevice = "cpu"\ndrain_timeout_s = 40\n'
needs_analyze = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="no systemd-analyze: apt install systemd"
)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return the units as they are installed for the interpreter of this test."""
    for file in units(data_folder(), this_install()):
        if (path := Path(file.path)).parent.name == "system":
            (tmp_path / path.name).write_text(file.text)
    return tmp_path


@needs_analyze
def test_systemd_finds_nothing_to_complain_about(installed: Path) -> None:
    names = [str(installed / path.name) for path in UNITS]
    ran = subprocess.run(["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@needs_analyze
@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_the_exposure_stays_low(installed: Path, service: Path) -> None:
    ran = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(installed / service.name)], capture_output=True, text=True
    )
    found = re.search(r"Overall exposure level .*: ([\d.]+)", ran.stdout)
    assert found, ran.stdout + ran.stderr
    assert float(found.group(1)) <= WORST_EXPOSURE[service.name]


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_systemd_waits_longer_than_the_drain(service: Path) -> None:
    from inferengine.config import EngineConfig

    found = re.search(r"^TimeoutStopSec=(\d+)$", service.read_text(), re.MULTILINE)
    assert found
    assert int(found.group(1)) > EngineConfig().drain_timeout_s


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_no_service_waits_for_another_to_start_or_to_stop(service: Path) -> None:
    """Else a front end would be silent while the engine loads, and a stop would take the sum of two deadlines."""
    orders = re.findall(r"^(?:After|Before|Requires|BindsTo)=(.*)$", service.read_text(), re.MULTILINE)
    others = {path.name for path in SERVICES} - {service.name}
    assert orders
    assert not others & set(" ".join(orders).split())


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.name)
def test_only_codes_that_another_try_would_end_with_again_keep_a_service_down(service: Path) -> None:
    """Anything else is a restart: a clean exit too, which some stray signal has asked for."""
    from inferengine.errors import ExitCode

    text = service.read_text()
    assert re.findall(r"^Restart=(.*)$", text, re.MULTILINE) == ["always"]
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
    loads = [ExitCode.MODEL, ExitCode.MEMORY] if service.name == "inferengine-engine.service" else []
    assert [int(code) for code in codes.split()] == [ExitCode.USAGE, *loads, EXEC_FAILED]


def test_every_example_configuration_is_valid() -> None:
    from inferengine.config import load

    examples = sorted((ROOT / "systemd" / "examples").glob("*.toml"))
    assert len(examples) >= 3
    for example in examples:
        assert load(example, environment={}).log.format == "json"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine(tmp_path, TOML) as booted:
        yield booted


def answers(machine: Machine) -> bool:
    """Return whether a completion comes back; waits through restarts."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 16})
    ask = ("curl", "-sS", "-H", "Content-Type: application/json", "-d", body, "http://127.0.0.1:8000/v1/completions")
    machine.wait_for(lambda: '"completion_tokens":16' in machine.run(*ask, check=False), 180)
    return True


@pytest.mark.systemd
@pytest.mark.timeout(900)
def test_the_units_start_serve_restart_and_drain_under_a_real_systemd(machine: Machine) -> None:
    machine.run("systemctl", "start", "inferengine-http.socket", "inferengine-ws.socket", "inferengine.target")
    machine.wait_for(lambda: machine.show("inferengine-engine.service", "ActiveState") == "active", 180)
    for name in ("http", "ws"):
        machine.wait_for(lambda name=name: machine.show(f"inferengine-{name}.service", "ActiveState") == "active")

    assert answers(machine)
    assert "<html" in machine.run("curl", "-sS", "http://127.0.0.1:8001/").lower()
    assert machine.run("stat", "-c", "%a %U", "/run/inferengine").strip() == "750 inferengine"

    engine = machine.show("inferengine-engine.service", "MainPID")
    machine.run("systemctl", "kill", "--signal=KILL", "inferengine-http.service")
    machine.wait_for(lambda: machine.show("inferengine-http.service", "NRestarts") == "1")
    assert answers(machine)
    assert machine.show("inferengine-engine.service", "MainPID") == engine

    machine.run("systemctl", "kill", "--signal=KILL", "inferengine-engine.service")
    machine.wait_for(lambda: machine.show("inferengine-engine.service", "NRestarts") == "1")
    assert answers(machine)

    for name in ("engine", "http", "ws"):  # a hang-up stops nobody, an end in good order that nobody asked for neither
        unit = f"inferengine-{name}.service"
        pid, restarts = machine.show(unit, "MainPID"), int(machine.show(unit, "NRestarts"))
        machine.run("systemctl", "reload", unit)
        machine.wait_for(lambda unit=unit: "reading the configuration again" in machine.journal(unit))
        assert (machine.show(unit, "MainPID"), machine.show(unit, "ActiveState")) == (pid, "active")
        machine.run("kill", "-TERM", pid)
        machine.wait_for(lambda unit=unit, n=restarts + 1: machine.show(unit, "NRestarts") == str(n), 120)
    assert answers(machine)

    installed = machine.run(sys.executable, "-P", "-m", "inferengine.cli", "systemd")
    assert {line.split()[0] for line in installed.splitlines()} == {"same"}

    began = time.monotonic()
    machine.run("systemctl", "stop", "inferengine.target")
    for name in ("http", "ws", "engine"):
        machine.wait_for(lambda name=name: machine.show(f"inferengine-{name}.service", "ActiveState") == "inactive")
        assert machine.show(f"inferengine-{name}.service", "Result") == "success"
        assert machine.show(f"inferengine-{name}.service", "ExecMainStatus") == "0"
    assert time.monotonic() - began < 40  # nothing runs: nothing waited for the drain's deadline

    engine_unit, drop_ins = "inferengine-engine.service", "/etc/systemd/system/inferengine-engine.service.d"
    missing = "[Service]\\nEnvironment=INFERENGINE_MODEL_PATH=/var/lib/inferengine/none\\n"
    machine.run("sh", "-c", f"mkdir -p {drop_ins} && printf '{missing}' > {drop_ins}/model.conf")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", engine_unit, check=False)
    machine.wait_for(lambda: machine.show(engine_unit, "ActiveState") == "failed")
    assert (machine.show(engine_unit, "ExecMainStatus"), machine.show(engine_unit, "NRestarts")) == ("3", "0")
    # The drop-in of docs/operations.md, with a shorter RestartSec.
    again = "[Unit]\\nStartLimitIntervalSec=0\\n[Service]\\nRestartSec=1\\n"
    again += "RestartPreventExitStatus=\\nRestartPreventExitStatus=2 203\\n"
    machine.run("sh", "-c", f"printf '{again}' > {drop_ins}/again.conf && systemctl daemon-reload")
    machine.run("systemctl", "start", "--no-block", engine_unit)
    machine.wait_for(lambda: int(machine.show(engine_unit, "NRestarts")) >= 2)
    machine.run("systemctl", "stop", engine_unit)
    machine.run("rm", "-r", drop_ins)

    hidden = "mkdir -p /root/uv && cp /bin/true /root/uv/python && ln -s /root/uv/python /opt/python"
    machine.run("sh", "-c", f"{hidden} && sed -i s:{sys.executable}:/opt/python: /etc/systemd/system/*.service")
    machine.run("systemctl", "daemon-reload")
    for name in ("engine", "http", "ws"):
        unit = f"inferengine-{name}.service"
        machine.run("systemctl", "start", unit, check=False)
        machine.wait_for(lambda unit=unit: machine.show(unit, "ActiveState") == "failed")
        assert (machine.show(unit, "ExecMainStatus"), machine.show(unit, "NRestarts")) == (str(EXEC_FAILED), "0")
        assert "cannot run /opt/python, which is /root/uv/python" in machine.journal(unit)

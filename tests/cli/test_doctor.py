"""`inferengine doctor`: what it finds on machines that lack something, and what it says to do."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path

import pytest

from inferengine.cli import check, doctor
from inferengine.cli import main as cli
from inferengine.cli.check import NOTE, OK, PROBLEM, Finding
from inferengine.config import Config
from inferengine.errors import ExitCode

H200 = {"name": "NVIDIA H200", "driver": "580.65", "capability": "9.0", "free_mib": "140000", "total_mib": "143771"}


def of_grade(findings: Iterable[Finding], grade: str) -> list[str]:
    return [finding.text for finding in findings if finding.grade == grade]


def test_this_machine_is_looked_at_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "engine", lambda config: iter(()))  # it would wait for one
    monkeypatch.setattr(doctor.check, "model", lambda config: iter(()))
    code = cli.main(["doctor", "--json", "--http.port", "0", "--ws.port", "0"])
    found = json.loads(capsys.readouterr().out)
    subjects = {finding["subject"] for finding in found["findings"]}
    assert {"python", "packages", "processor", "gpu", "open files", "permissions", "disk", "http", "socket"} <= subjects
    assert (code == ExitCode.OK) == (found["problems"] == 0)


def test_a_wrong_configuration_is_reported_after_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--http.port", "many"]) == ExitCode.USAGE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == [OK, "python"]
    assert "problem  config" in lines[-1]


@pytest.mark.parametrize(
    ("row", "grade", "text"),
    [
        ({}, OK, "NVIDIA H200, compute capability 9.0"),
        ({"capability": "7.5"}, PROBLEM, "older than 8.0: use --engine.device cpu"),
        ({"capability": "8.0"}, NOTE, "no FP8 arithmetic"),
        ({"free_mib": "20000"}, NOTE, "another program uses it"),
        ({"free_mib": "[N/A]"}, OK, "NVIDIA H200"),
    ],
)
def test_a_device_is_judged_by_age_and_free_memory(row: dict[str, str], grade: str, text: str) -> None:
    assert any(text in each for each in of_grade(doctor.judge_device(H200 | row), grade))


def test_hardware_without_a_driver_is_seen_on_the_bus(tmp_path: Path) -> None:
    assert not doctor.has_nvidia_hardware(tmp_path)
    for name, vendor, kind in (("a", "0x8086", "0x030000"), ("b", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert not doctor.has_nvidia_hardware(tmp_path), "another vendor's display, and NVIDIA's sound"
    (tmp_path / "a" / "vendor").write_text("0x10de\n")
    assert doctor.has_nvidia_hardware(tmp_path)


def test_a_driver_that_fails_is_a_problem_with_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Driver/library version mismatch'; exit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = doctor.query_devices()
    assert isinstance(found, str)
    assert "version mismatch" in found
    assert "restart" in found
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65, 9.0, 140000, 143771'\n")
    assert doctor.query_devices() == [H200]


def test_keys_that_everybody_can_read_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    keys.chmod(0o644)
    config = Config().with_values(auth={"keys_file": str(keys)})
    assert of_grade(doctor.permissions(config), PROBLEM) == [
        f"auth.keys_file: every user may open {keys}: chmod 0640 {keys}"
    ]
    keys.chmod(0o640)
    assert of_grade(doctor.permissions(config), PROBLEM) == []


def test_a_full_disk_is_a_problem_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**12, 10**12, 1000))
    (problem, *_) = of_grade(doctor.disk(Config()), PROBLEM)
    assert "free some space, or set HF_HOME to another disk" in problem


def test_little_memory_is_read_off_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   2048 kB\n")
    assert doctor.available_memory(tmp_path / "meminfo") == 2 * 1024**2
    assert doctor.available_memory(tmp_path / "absent") is None


class TestPackages:
    def test_an_extra_that_was_not_asked_for_is_a_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, {"pyzmq": "27.0", "msgpack": "1.1", "tokenizers": "0.23"})
        found = list(check.packages())
        assert of_grade(found, PROBLEM) == []
        assert any("engine: not installed; pip install" in text for text in of_grade(found, NOTE))

    def test_a_package_that_is_old_or_partly_installed_is_a_problem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, {"pyzmq": "25.0", "msgpack": "1.1", "torch": "2.13.0+cpu"})
        problems = of_grade(check.packages(), PROBLEM)
        assert any("pyzmq 25.0 is older than 26" in text for text in problems)
        assert any("engine: tokenizers not installed: pip install" in text for text in problems)

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
        required = [
            "pyzmq>=26",
            "msgpack>=1.0.8",
            'torch>=2.9; extra == "engine"',
            'tokenizers>=0.22; extra == "engine"',
            'uvicorn<0.55,>=0.40; extra == "server"',
            'pytest>=9; extra == "test"',
        ]

        def version(name: str) -> str:
            if name not in versions:
                raise check.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(check.metadata, "requires", lambda name: required)
        monkeypatch.setattr(check.metadata, "version", version)

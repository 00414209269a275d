"""The processes at a public address and with TLS: what they refuse, and what they serve."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from frontends.common.auth import entry, new_key
from inferengine.errors import ExitCode
from tests.frontends.http.test_process import ROOT
from tests.ports import free_port

WAIT_S = 30.0


def run(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inferengine.cli", name, f"--{name}.port", "0", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)


@contextmanager
def running(name: str, port: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "inferengine.cli", name, f"--{name}.port", str(port), "--log.level", "error"]
    process = subprocess.Popen([*command, *flags], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def answer(url: str, verify: ssl.SSLContext | bool = True, headers: dict[str, str] | None = None) -> httpx.Response:
    """Return the first answer of a process that is starting."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return httpx.get(url, verify=verify, headers=headers, timeout=60)
        except httpx.TransportError:
            assert time.monotonic() < deadline, "it does not answer"
            time.sleep(0.05)


@pytest.mark.parametrize("name", ["http", "ws"])
def test_a_public_address_is_refused_at_start_with_the_remedies(name: str) -> None:
    ended = run(name, f"--{name}.host", "0.0.0.0")
    assert ended.returncode == ExitCode.USAGE
    assert "auth.keys_file" in ended.stderr
    assert f"{name}.allow_public" in ended.stderr


@pytest.mark.parametrize("name", ["http", "ws"])
def test_a_public_address_with_keys_is_served(name: str, tmp_path: Path) -> None:
    key, port = new_key(), free_port()
    (tmp_path / "keys.toml").write_text(entry("anna", key))
    flags = [f"--{name}.host", "0.0.0.0", "--auth.keys_file", str(tmp_path / "keys.toml")]
    with running(name, port, *flags, "--wire.socket", f"ipc://{tmp_path}/e.sock"):
        url = f"http://127.0.0.1:{port}/metrics"
        assert answer(url).status_code == 401
        assert answer(url, headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("name", ["http", "ws"])
def test_a_port_that_is_none_is_an_error_that_a_restart_would_repeat(name: str) -> None:
    ended = run(name, f"--{name}.port", "70000")
    assert ended.returncode == ExitCode.USAGE
    assert f"{name}.port: must be at most 65535; got 70000" in ended.stderr


@pytest.mark.parametrize(
    ("flag", "complaint"),
    [("auth.keys_file", "cannot be read"), ("http.tls_certificate", "no such file"), ("http.tls_key", "of no use")],
)
def test_a_file_that_is_not_there_is_named(flag: str, complaint: str) -> None:
    ended = run("http", f"--{flag}", "/nowhere/file")
    assert ended.returncode == ExitCode.USAGE
    assert flag in ended.stderr
    assert complaint in ended.stderr


def test_a_files_folder_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run("http", "--http.files_folder", str(tmp_path / "file" / "batches"))
    assert ended.returncode == ExitCode.USAGE
    assert "http.files_folder" in ended.stderr
    assert "file is no folder. Name a folder that this process can write" in ended.stderr


@pytest.mark.parametrize(("name", "key"), [("http", "http.cors_origins"), ("ws", "ws.origins")])
def test_an_origin_without_its_scheme_is_refused_at_start(name: str, key: str) -> None:
    ended = run(name, f"--{key}", "app.example")
    assert ended.returncode == ExitCode.USAGE
    assert key in ended.stderr
    assert "write https://" in ended.stderr


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [
        ("http", "wire.engines", "tcp://engine"),
        ("http", "wire.socket", "engine.sock"),
        ("http", "http.trusted_proxies", "proxy.internal"),
        ("ws", "wire.engines", "engine:5555"),
    ],
)
def test_several_workers_do_not_start_with_an_address_that_is_none(name: str, flag: str, value: str) -> None:
    """Each would end by itself, with a traceback, again and again."""
    ended = run(name, f"--{name}.workers", "2", f"--{name}.port", "0", f"--{flag}", value)
    assert ended.returncode == ExitCode.USAGE
    assert flag in ended.stderr
    assert "listening" not in ended.stderr


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")
@pytest.mark.parametrize("name", ["http", "ws"])
def test_tls_is_served(name: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *names, *files], check=True, capture_output=True)
    port = free_port()
    flags = [f"--{name}.tls_certificate", str(certificate), f"--{name}.tls_key", str(key)]
    trust = ssl.create_default_context(cafile=str(certificate))
    with running(name, port, *flags, "--wire.socket", f"ipc://{tmp_path}/e.sock"):
        found = answer(f"https://127.0.0.1:{port}/health", verify=trust)
        assert found.status_code in (200, 503)  # there is no engine
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)

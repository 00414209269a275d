"""What the markers need, checked in one place, and `--no-skips` for machines where everything must run."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.compiler_process import Compile, compiler_process

# What a person's own front ends keep, such as their batches, is none of the tests'.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="inferengine-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

gc.disable()  # until all is imported: looking through what stays takes a quarter of that time

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # the least work first
HIDDEN = "this checkout lies in /tmp, where hardened units do not see it"
NODE_PACKAGES = Path(__file__).parent / "node" / "node_modules"


def _missing(marker: str) -> str:
    """Return what this machine lacks for tests of a marker; empty when nothing is missing."""
    if marker == "gpu":
        return "" if Path("/dev/nvidiactl").exists() else "no CUDA device"
    if marker == "browser":
        if not any(shutil.which(name) for name in BROWSERS):
            return "no chromium: apt install chromium"
        return "" if importlib.util.find_spec("playwright") else "no playwright: pip install playwright"
    if marker == "node":
        if not shutil.which("node"):
            return "no Node.js"
        there = all((NODE_PACKAGES / name).is_dir() for name in ("zeromq", "ws"))
        return "" if there else "no zeromq or ws for Node: npm install --prefix tests/node"
    if marker == "systemd":
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            return "needs Linux and root"
        if Path(__file__).is_relative_to("/tmp"):
            return HIDDEN  # the units have a /tmp of their own
        if Path("/run/systemd/system").exists():
            return "this machine runs systemd itself: boot a second one in a container"
        tools = [name for name in ("systemd-analyze", "systemctl", "unshare", "nsenter") if not shutil.which(name)]
        return f"no {', '.join(tools)}: apt install systemd util-linux" if tools else ""
    return ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="a skip is a failure, unless no installation could help it"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {marker: _missing(marker) for marker in ("gpu", "browser", "node", "systemd")}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def pytest_collection_finish() -> None:
    """Exclude what all imports made from garbage collection: it stays."""
    gc.enable()
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # what stays frozen at the end is never collected, and Triton reports it as leaked
    if (transports := sys.modules.get("httpx._transports.default")) is not None:
        # Each client, and each httpx.get, reads the certificates of all authorities otherwise: 20 ms of processor time.
        transports.create_ssl_context = functools.cache(transports.create_ssl_context)  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def compile_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Yield what runs programs that compile kernels for a card."""
    with compiler_process(tmp_path_factory.mktemp("compiler")) as run:
        yield run


def _cannot_be_brought(reason: str) -> bool:
    """Return whether no installation would change it."""
    return "CUDA device" in reason or HIDDEN in reason


def _skipped(session: pytest.Session) -> Counter[str]:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    forbidden = [reason for reason in _skipped(session) if not _cannot_be_brought(reason)]
    if session.config.getoption("--no-skips") and forbidden and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    if not counts:
        return
    terminalreporter.section("not run on this machine")
    for reason, number in counts.most_common():
        terminalreporter.line(f"{number:4d}  {reason}")
    if config.getoption("--no-skips") and any(not _cannot_be_brought(reason) for reason in counts):
        terminalreporter.line("--no-skips: skipped tests count as failures here", red=True)

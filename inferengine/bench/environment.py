"""What a result was measured with: revision, machine, versions, devices, command. Every benchmark's JSON carries it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from inferengine.config.environment import build_revision

ROOT = Path(__file__).resolve().parents[2]
REVISION_FILE = "REVISION"
PACKAGES = ("inferengine", "torch", "triton", "transformers", "pyzmq", "msgpack")


def environment(*, seed: int | None = None, devices: Sequence[str] = ()) -> dict[str, Any]:
    """Describe this process: `revision` (of the function of that name), `date` in UTC, `command`, `seed`, processor,
    memory in bytes, Python, packages and `devices`."""
    return {
        "revision": revision(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": _command(sys.argv),
        "seed": seed,
        "system": platform.platform(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "devices": list(devices),
    }


def _command(words: Sequence[str]) -> str:
    """Return the command line: the program by its name, files of the checkout by their paths in it, no keys."""
    program = Path(words[0])
    name = program.name if program.name != "__main__.py" else f"-m {program.parent.name}"
    shown = [word.replace(f"{ROOT}/", "") for word in _without_keys(words[1:])]
    return " ".join([{"-m cli": "inferengine"}.get(name, name), *shown])


def _without_keys(words: Sequence[str]) -> list[str]:
    """Hide the values of options that end in `key`."""
    shown = [word.partition("=")[0] + "=(hidden)" if "key=" in word else word for word in words]
    return ["(hidden)" if before.endswith("key") else word for before, word in zip(["", *shown], shown, strict=False)]


def revision() -> str:
    """Return the revision of this code: INFERENGINE_REVISION, the file REVISION in the checkout's folder, else git's
    name of the checkout, with `-dirty` where files differ. Empty outside one: a copy, or an environment with packages,
    below another repository is not of that repository."""
    if named := named_revision(ROOT):
        return named
    top = git("rev-parse", "--show-toplevel")
    return git("describe", "--always", "--dirty", "--abbrev=12") if top and Path(top) == ROOT else ""


def named_revision(root: Path) -> str:
    """Return what INFERENGINE_REVISION or the file REVISION in `root` says; empty where neither does. They are for a
    copy of the tree without its history, and for an image that is built from one."""
    if named := build_revision():
        return named
    try:
        return (root / REVISION_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def git(*words: str) -> str:
    """Return the output of a git command about this checkout; empty where it fails."""
    command = ["git", "-C", str(ROOT), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30.0).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def version(package: str) -> str:
    """Return the version of an installed package; empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_result(path: Path, document: Mapping[str, Any], *, seed: int | None = None) -> None:
    """Write a result as JSON, its `environment` first. What the document's own `environment` says is added to it."""
    whole = {**document, "environment": {**environment(seed=seed), **document.get("environment", {})}}
    whole = {"environment": whole.pop("environment"), **whole}
    path.write_text(json.dumps(whole, indent=1) + "\n")

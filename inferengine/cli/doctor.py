"""`inferengine doctor`: what this machine lacks, from Python to the disk; every problem with its remedy."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from inferengine.cli import check
from inferengine.cli.check import NOTE, OK, PROBLEM, Finding
from inferengine.cli.command import Arguments, Option, command
from inferengine.config import Config, cache_directory, hub_cache_directory, keep_compiled_kernels, runtime_directory
from inferengine.config.environment import variables
from inferengine.errors import ConfigError

OPTIONS = {"options": (Option("--json", "print the findings as JSON"),)}
OLDEST_PYTHON = (3, 11)
FEWEST_FILES = 4096  # open files, for sockets
LEAST_MEMORY_BYTES = 2 * 1024**3
LEAST_DISK_BYTES = 1024**3  # for kernels, logs and the sockets' folder; a model asks for more when it is fetched
NVIDIA_SMI_TIMEOUT_S = 15.0  # it takes seconds where the driver is not kept loaded
TORCH_TIMEOUT_S = 120.0  # the first import from a cold disk
OLDEST_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
DRIVER_OF_CUDA = {12: 525, 13: 580}  # CUDA's major version → oldest driver (NVIDIA's CUDA release notes, table 2)


@command(OPTIONS, takes_model=True, reads_late=True)
def run(arguments: Arguments) -> int:
    """Look at this machine and say what keeps the service from working here, or from working well.

    It looks at Python, the packages, processor and memory, the GPU and its driver, Triton and what it compiles with,
    open files, permissions and disk space; then at everything that `inferengine check` looks at: configuration, model,
    socket, ports and a running engine. One line each: ok, note (worth knowing) or problem (with its remedy). The exit
    code is 1 when there is a problem, 2 when the configuration itself cannot be used.
    """
    machine = (python, packages, processor, gpu, triton, open_files)
    return check.report_on(
        arguments,
        (finding for look in machine for finding in look()),
        (permissions, disk, check.model, check.device, check.onnx, check.speculation, check.engine_socket, check.ports,
         check.interpreter, check.engine),
    )  # fmt: skip


def python() -> Iterator[Finding]:
    """Report the interpreter, and where it runs."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield Finding(PROBLEM, "python", f"{version} is older than 3.11: PYTHON=python3.12 scripts/install")
    elif sys.maxsize < 2**32:
        yield Finding(PROBLEM, "python", f"{version} has 32 bits, and the packages need 64: install another Python")
    else:
        yield Finding(OK, "python", f"{version}, {platform.platform()}, in {sys.prefix}")
    if not sys.platform.startswith("linux"):
        yield Finding(
            NOTE, "python", "the engine and the front ends are tested on Linux only; clients run elsewhere too"
        )


def packages() -> Iterator[Finding]:
    """Return findings on the packages of the base and of each extra."""
    return (finding for finding in check.packages() if finding.subject != "python")


def processor() -> Iterator[Finding]:
    """Report the number of cores and the memory."""
    cores, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    limited = f" of {present}" if cores != present else ""
    yield Finding(OK, "processor", f"{cores}{limited} cores, {platform.machine()}")
    available = available_memory(Path("/proc/meminfo"))
    if available is None:
        return
    if available < LEAST_MEMORY_BYTES:
        yield Finding(PROBLEM, "memory", f"{available / 1e9:.1f} GB are available: end other programs; 2 GB are needed")
    else:
        yield Finding(OK, "memory", f"{available / 1e9:.1f} GB available")


def available_memory(file: Path) -> int | None:
    """Return the bytes of memory that a new program can have, as Linux estimates it; None where it does not say."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", file.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) * 1024 if found else None


def gpu() -> Iterator[Finding]:
    """Report NVIDIA's devices, their driver, and whether torch can use them."""
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        if has_nvidia_hardware(Path("/sys/bus/pci/devices")):
            yield Finding(
                PROBLEM, "gpu", "there is an NVIDIA device without a driver: install NVIDIA's driver, 580 or newer"
            )
        else:
            yield Finding(OK, "gpu", "none: models run on the processor")
        return
    if not Path("/dev/nvidiactl").exists():
        yield Finding(
            PROBLEM,
            "gpu",
            "the driver is loaded and there is no /dev/nvidiactl: in a container start it with --gpus all; elsewhere "
            "run nvidia-modprobe",
        )
        return
    if not os.access("/dev/nvidiactl", os.R_OK | os.W_OK):
        yield Finding(PROBLEM, "gpu", "this user may not open /dev/nvidiactl: add it to the device's group")
        return
    rows = query_devices()
    if isinstance(rows, str):
        yield Finding(PROBLEM, "driver", rows)
        return
    for row in rows:
        yield from judge_device(row)
    yield from judge_torch(rows[0]["driver"] if rows else "")


def has_nvidia_hardware(devices: Path) -> bool:
    """Return whether a display or 3D controller of NVIDIA's is on the bus."""
    for device in devices.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def query_devices() -> list[dict[str, str]] | str:
    """Return what nvidia-smi says of each device; a text with the remedy where it fails."""
    fields = {"name": "name", "driver_version": "driver", "compute_cap": "capability", "memory.free": "free_mib",
              "memory.total": "total_mib"}  # fmt: skip
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return (
            "there is no nvidia-smi: install the driver's utilities; in a container set NVIDIA_DRIVER_CAPABILITIES=all"
        )
    try:
        ran = subprocess.run(
            [smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi does not answer: the driver hangs; restart the machine"
    if ran.returncode != 0:
        return f"nvidia-smi fails ({(ran.stdout + ran.stderr).strip()[:200]}): reinstall the driver and restart"
    lines = [[cell.strip() for cell in line.split(",")] for line in ran.stdout.splitlines() if line.strip()]
    return [dict(zip(fields.values(), cells, strict=False)) for cells in lines]


def judge_device(row: dict[str, str]) -> Iterator[Finding]:
    """Report how old one device is and how much of its memory is free."""
    capability = tuple(check.numbers(row.get("capability", "")))[:2]
    shown = f"{row.get('name', 'unknown')}, compute capability {row.get('capability', '?')}"
    if capability and capability < OLDEST_CAPABILITY:
        yield Finding(PROBLEM, "gpu", f"{shown} is older than 8.0: use --engine.device cpu")
        return
    yield Finding(OK, "gpu", shown)
    if capability and capability < FP8_CAPABILITY:
        yield Finding(NOTE, "gpu", "it has no FP8 arithmetic: --model.quantization int8 or int4, not fp8")
    try:
        free, total = int(row["free_mib"]), int(row["total_mib"])
    except (KeyError, ValueError):
        return
    if free < total // 2:
        yield Finding(
            NOTE, "gpu", f"{free / 1024:.0f} of {total / 1024:.0f} GiB are free: another program uses it (nvidia-smi)"
        )
    else:
        yield Finding(OK, "gpu", f"{free / 1024:.0f} of {total / 1024:.0f} GiB free")


def judge_torch(driver: str) -> Iterator[Finding]:
    """Check whether the driver is new enough for this build of torch, and whether torch finds the device."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return  # `packages` has said so
    program = "import torch; print(torch.version.cuda or 'none', torch.cuda.is_available())"
    try:
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
        cuda, available = ran.stdout.split()
    except (OSError, ValueError, subprocess.TimeoutExpired):
        yield Finding(PROBLEM, "driver", f"torch {torch} cannot be imported: install it again (scripts/install)")
        return
    newest = DRIVER_OF_CUDA.get(check.numbers(cuda)[0]) if check.numbers(cuda) else None
    if cuda == "none":
        yield Finding(
            PROBLEM,
            "driver",
            f"torch {torch} is a build without CUDA: pip install --force-reinstall torch --index-url "
            "https://download.pytorch.org/whl/cu130",
        )
    elif newest is not None and driver and check.numbers(driver)[0] < newest:
        yield Finding(PROBLEM, "driver", f"{driver} is too old for torch's CUDA {cuda}: install {newest} or newer")
    elif available != "True":
        yield Finding(
            PROBLEM, "driver", f"torch (CUDA {cuda}) finds no device with driver {driver}: see CUDA_VISIBLE_DEVICES"
        )
    else:
        yield Finding(OK, "driver", f"{driver}, torch {torch} with CUDA {cuda}")


def triton() -> Iterator[Finding]:
    """Report Triton, and what it compiles with: only for a GPU."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        if Path("/dev/nvidiactl").exists():
            yield Finding(PROBLEM, "triton", "not installed: pip install 'inferengine[engine]'")
        return
    if not Path("/dev/nvidiactl").exists():
        yield Finding(OK, "triton", f"{version}, not used without a GPU")
        return
    compiler = variables().get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if compiler is None:
        yield Finding(PROBLEM, "triton", "there is no C compiler, and Triton needs one: apt install gcc libc6-dev")
    elif not header.exists():
        yield Finding(PROBLEM, "triton", f"there is no {header}, and Triton needs it: apt install python3-dev")
    elif complaint := keep_compiled_kernels():
        yield Finding(PROBLEM, "triton", complaint)
    else:
        yield Finding(OK, "triton", f"{version}, compiles with {compiler}")


def open_files() -> Iterator[Finding]:
    """Report how many files and sockets a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEWEST_FILES:
        yield Finding(NOTE, "open files", f"{soft} per process, so few connections: ulimit -n {min(hard, 65536)} first")
    else:
        yield Finding(OK, "open files", f"{'any number' if soft == resource.RLIM_INFINITY else soft} per process")


def permissions(config: Config) -> Iterator[Finding]:
    """Check whether this user may write where the service writes, and read what it is told to read."""
    folders = {"the cache": cache_directory(), "downloaded models": hub_cache_directory()}
    for what, folder in folders.items():
        place = existing(folder)
        if not os.access(place, os.W_OK | os.X_OK):
            variable = "XDG_CACHE_HOME" if what == "the cache" else "HF_HOME"
            yield Finding(
                PROBLEM, "permissions", f"this user may not write to {place} ({what}): set {variable} to another folder"
            )
        else:
            yield Finding(OK, "permissions", f"{what}: {folder}")
    for key, file in (
        ("auth.keys_file", config.auth.keys_file),
        ("wire.curve_secret_file", config.wire.curve_secret_file),
    ):
        if not file:
            continue
        if not os.access(file, os.R_OK):
            yield Finding(PROBLEM, "permissions", f"{key}: {file} cannot be read: make it with 'inferengine keygen'")
        elif Path(file).stat().st_mode & 0o007:
            yield Finding(PROBLEM, "permissions", f"{key}: every user may open {file}: chmod 0640 {file}")
        else:
            yield Finding(OK, "permissions", f"{key}: {file}")


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def disk(config: Config) -> Iterator[Finding]:
    """Free space where models, compiled kernels, sockets and temporary files go."""
    places = {
        hub_cache_directory(): "HF_HOME",
        cache_directory(): "XDG_CACHE_HOME",
        Path(tempfile.gettempdir()): "TMPDIR",
    }
    with contextlib.suppress(ConfigError):  # check.engine_socket reports that
        places[runtime_directory()] = "XDG_RUNTIME_DIR"
    seen: set[int] = set()
    for folder, variable in places.items():
        place = existing(folder)
        if place.stat().st_dev in seen:
            continue
        seen.add(place.stat().st_dev)
        free = shutil.disk_usage(place).free
        least = LEAST_DISK_BYTES if variable != "XDG_RUNTIME_DIR" else 1024**2  # sockets are small, and so is that disk
        if free < least:
            yield Finding(
                PROBLEM,
                "disk",
                f"{free / 1e9:.2f} GB free at {place}: free some space, or set {variable} to another disk",
            )
        else:
            yield Finding(OK, "disk", f"{free / 1e9:,.1f} GB free at {place}")

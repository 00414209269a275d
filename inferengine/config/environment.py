"""The process's environment variables, and the folders and sockets that they name.

No other module reads the environment.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from inferengine.errors import ConfigError

REVISION_VARIABLE = "INFERENGINE_REVISION"  # the one of this prefix that is no key of the configuration


def variables() -> Mapping[str, str]:
    """Return the process's environment variables."""
    return os.environ


def runtime_directory() -> Path:
    """Return the folder of sockets, mode 0750: systemd's RUNTIME_DIRECTORY, XDG_RUNTIME_DIR, else a private folder in
    /tmp.

    Raises ConfigError where it cannot be made or is not safe.
    """
    if systemd := os.environ.get("RUNTIME_DIRECTORY"):
        return Path(systemd.split(":")[0]).resolve()  # with DynamicUser= it is a link
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "inferengine" if base and Path(base).is_dir() else Path(f"/tmp/inferengine-{os.getuid()}")
    try:
        folder.mkdir(mode=0o750)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            "wire.socket",
            f"the folder {folder} for the engine's socket cannot be made: {error.strerror}; "
            "set XDG_RUNTIME_DIR to a folder of yours, or wire.socket",
        ) from None
    if complaint := unsafe_folder(folder):
        raise ConfigError("wire.socket", f"{complaint}, or set wire.socket")
    return folder


def unsafe_folder(folder: Path, user: int | None = None) -> str:
    """Return why no socket may be in this folder, with the remedy; empty: it is safe.

    Another user who may write to it could replace the socket and read what clients send. `user`: whose sockets they
    are; None: this user's.
    """
    try:
        found = os.lstat(folder)
    except OSError as error:
        return f"the socket's folder {folder} cannot be looked at ({error.strerror}): create it with mode 0750"
    if stat.S_ISLNK(found.st_mode):
        return f"the socket's folder {folder} is a symbolic link: replace it by a folder of yours with mode 0750"
    if not stat.S_ISDIR(found.st_mode):
        return f"the socket's folder {folder} is no folder: replace it by one with mode 0750"
    if found.st_uid not in (os.getuid() if user is None else user, 0):
        return f"the socket's folder {folder} belongs to another user: remove it"
    if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and not found.st_mode & stat.S_ISVTX:
        return (
            f"others may write to the socket's folder {folder} (mode {stat.S_IMODE(found.st_mode):04o}): chmod 0750 it"
        )
    return ""


def cache_directory() -> Path:
    """Return the folder for data that is kept between runs: systemd's CACHE_DIRECTORY, XDG_CACHE_HOME, else
    ~/.cache."""
    if systemd := os.environ.get("CACHE_DIRECTORY"):
        return Path(systemd.split(":")[0])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "inferengine"


def state_directory() -> Path:
    """Return the folder for data that must not be lost: systemd's STATE_DIRECTORY, XDG_STATE_HOME, else
    ~/.local/state."""
    if systemd := os.environ.get("STATE_DIRECTORY"):
        return Path(systemd.split(":")[0])
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "inferengine"


def keep_compiled_kernels() -> str | None:
    """Set the folder in which Triton keeps compiled kernels for the next start. Call before anything is compiled.

    TRITON_CACHE_DIR and TRITON_HOME are respected. Else it is the first that can be written of systemd's
    CACHE_DIRECTORY, Triton's own ~/.triton/cache and the folder of `cache_directory()`. Returns a complaint where none
    can be written: each start then compiles for half a minute.
    """
    if (named := os.environ.get("TRITON_CACHE_DIR")) or (home := os.environ.get("TRITON_HOME")):
        folders = [Path(named) if named else Path(home or "") / ".triton" / "cache"]
    else:
        folders = [Path.home() / ".triton" / "cache", cache_directory() / "triton"]
        if os.environ.get("CACHE_DIRECTORY"):
            folders.reverse()
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            os.environ["TRITON_CACHE_DIR"] = str(folder)
            return None
    return f"{folders[0]} cannot be written: kernels are compiled anew at each start; set TRITON_CACHE_DIR"


def connect_on_this_host() -> None:
    """Let torch's processes connect over this host's loopback interface, without NVLink multicast. Call before any has
    connected. What the environment says already is respected."""
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}.items():
        os.environ.setdefault(name, value)


def send_no_telemetry() -> None:
    """Have ONNX Runtime neither collect nor send figures of use. Call before it is imported.

    From 1.32 on it does by default, and keeps an id of the machine in the cache folder. ORT_DISABLE_TELEMETRY is
    respected if it is set.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def visible_cards() -> list[str]:
    """Return the NVIDIA devices that a program started here sees, as CUDA_VISIBLE_DEVICES names them: the entries of
    that variable, else the numbers of the device files. Says nothing of whether torch can use them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        cards = [card.strip() for card in named.split(",")]
        hidden = next((place for place, card in enumerate(cards) if card in ("", "-1")), len(cards))
        return cards[:hidden]  # CUDA reads up to the first that is none
    count = sum(1 for path in Path("/dev").glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit())
    return [str(number) for number in range(count)]


def hub_cache_directory() -> Path:
    """Return where Hugging Face's tools keep downloaded models: HF_HUB_CACHE, HF_HOME/hub, else
    ~/.cache/huggingface/hub."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := os.environ.get("HF_HOME"):
        return Path(home) / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def hub_endpoint() -> str:
    """Return the address of the Hugging Face hub, or of its mirror: HF_ENDPOINT."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def build_revision() -> str:
    """Return the revision that this code was built from, as its builder says: INFERENGINE_REVISION; empty: it does
    not."""
    return os.environ.get(REVISION_VARIABLE, "").strip()


def notify_socket() -> str | None:
    """Return systemd's notification socket, or None."""
    return os.environ.get("NOTIFY_SOCKET")


def watchdog_interval_s() -> float | None:
    """Return the interval at which systemd's watchdog is to be notified, half of WatchdogSec; None without a
    watchdog."""
    microseconds = os.environ.get("WATCHDOG_USEC")
    if not microseconds or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 2e6


def listen_fds() -> list[int]:
    """File descriptors that systemd passed to this process (socket activation), from 3 on."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    return list(range(3, 3 + int(os.environ.get("LISTEN_FDS", "0"))))


def share_cores_with_others() -> None:
    """Let OpenMP's threads sleep soon after a parallel region; call before torch is imported.

    By default they spin for milliseconds. On a machine whose cores are all busy (front ends, other programs) they then
    keep each other from running: measured on two busy cores, 100 tokens took over 15 s instead of 1.2 s.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

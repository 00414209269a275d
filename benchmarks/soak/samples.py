"""Writes samples as lines of JSON: memory, descriptors and threads of each process, latencies, errors."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, TextIO

import httpx

from benchmarks.soak.load import Load
from benchmarks.soak.service import Part, Service

TICKS = os.sysconf("SC_CLK_TCK")
ESTABLISHED = "01"  # in /proc/net/tcp


def client_sockets(ports: Collection[int]) -> set[str]:
    """Return the sockets of established connections at these ports of this host, as a link of /proc/PID/fd names them.

    One that its client has closed or reset is not among them.
    """
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == ESTABLISHED and int(fields[1].rpartition(":")[2], 16) in ports:
            found.add(f"socket:[{fields[9]}]")
    return found


def process_figures(pid: int, clients: Collection[str] = ()) -> dict[str, float]:
    """Return RSS and PSS in MiB, descriptors, threads, CPU seconds so far. Raises OSError for a process that is gone.

    `clients`: sockets that are not counted as descriptors, because a client keeps them open: there are more of them
    whenever the machine is slower.
    """
    found: dict[str, float] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Rss:", "Pss:")):
            found[f"{line[:3].lower()}_mib"] = round(int(line.split()[1]) / 1024, 2)
    links = (_link(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd"))
    found["descriptors"] = sum(link not in clients for link in links)
    found["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    found["cpu_s"] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed since it was listed
        return ""


def quantile(values: list[float], share: float) -> float | None:
    """Return the value below which this share of the values lies; None without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def memory_on_cards() -> dict[int, float]:
    """Return the MiB that each process has on all cards, by pid; nothing where there is no card."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    found: Counter[int] = Counter()
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        for line in subprocess.run(command, capture_output=True, timeout=20.0, text=True).stdout.splitlines():
            pid, mib = line.split(",")
            found[int(pid)] += float(mib)
    return dict(found)


class Sampler:
    """Writes samples to a file."""

    def __init__(self, service: Service, load: Load, file: TextIO) -> None:
        self._service, self._load, self._file = service, load, file
        self._began_s = time.monotonic()
        self._generations: dict[str, list[Part]] = {}

    def stats(self) -> dict[str, Any] | None:
        """Return the engine's figures; None while there is no engine or no front end."""
        with contextlib.suppress(httpx.TransportError, ValueError):
            answer = httpx.get(f"{self._service.http}/stats", headers=self._service.keys[2].headers, timeout=20.0)
            if answer.status_code == 200:
                return dict(answer.json())
        return None

    def take(self, *, quiet: bool = False) -> dict[str, Any]:
        """Write a sample of the processes now, and of the requests since the last one. `quiet`: no request is open."""
        sample: dict[str, Any] = {"t": round(time.monotonic() - self._began_s, 2), "quiet": quiet}
        sample["processes"] = []
        on_cards = memory_on_cards() if self._service.device == "cuda" else {}
        clients = client_sockets((self._service.http_port, self._service.ws_port))
        for part in self._service.parts():
            with contextlib.suppress(OSError):
                lives = self._generations.setdefault(part.name, [])
                if part not in lives:
                    lives.append(part)
                figures = process_figures(part.pid, clients)
                life = {"name": part.name, "life": lives.index(part), "pid": part.pid}
                if part.pid in on_cards:
                    figures["device_mib"] = on_cards[part.pid]
                sample["processes"].append({**life, **figures, **self._service.heap_figures(part.pid)})
        sample["orphans"] = len(self._service.orphans())
        stats = self.stats()
        sample["engine"] = None if stats is None else _engine_figures(stats)
        notes, self._load.notes = self._load.notes, []
        gaps, self._load.gaps_s = self._load.gaps_s, []
        first = [note.first_s for note in notes if note.first_s is not None and note.manner != "slow"]
        sample["requests"] = dict(Counter(note.kind for note in notes))
        sample["errors"] = dict(
            Counter(f"{note.kind}: {note.detail[:60]}" for note in notes if note.kind not in ("ended", "cancelled"))
        )
        sample["unexpected"] = sum(not note.expected for note in notes)
        for name, values in (("first_token", first), ("between_tokens", gaps)):
            sample[name] = {"count": len(values), "sum_s": round(sum(values), 3)}
            for share in (0.5, 0.99, 1.0):
                value = quantile(values, share)
                sample[name][f"p{share * 100:g}_s"] = None if value is None else round(value, 4)
        sample["open"] = len(self._load.open)
        sample["load_average"] = os.getloadavg()[0]
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._service.disk.folder)
            sample["log_bytes"] = self._service.log.stat().st_size
            sample["disk_used_mib"] = round((disk.f_blocks - disk.f_bfree) * disk.f_frsize / 2**20, 2)
        self._file.write(json.dumps(sample) + "\n")
        self._file.flush()
        return sample


def _engine_figures(stats: dict[str, Any]) -> dict[str, Any]:
    cache = stats.get("cache") or {}
    return {
        "active_requests": stats.get("active_requests"),
        "num_blocks": cache.get("max_pages"),
        "block_size": cache.get("page_size"),
        "used_blocks": cache.get("used_pages"),
        "evictions": cache.get("evictions"),
        "kept_streams": stats.get("kept_streams"),
        "uptime_s": stats.get("uptime_s"),
        "stalled_steps": stats.get("stalled_steps"),
    }

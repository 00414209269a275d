"""Injects faults at seeded random moments: kills, freezes, a full disk, clock steps, connection storms, SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from benchmarks.soak.disturbances import Disturbances
from benchmarks.soak.service import Part, Service, make_key

WEIGHTS = {
    "kill engine": 3,
    "kill http": 1,
    "kill http worker": 2,
    "kill ws": 2,
    "kill grammars": 1,
    "freeze engine": 2,
    "freeze http worker": 2,
    "freeze ws": 2,
    "freeze up": 1,
    "full disk": 2,
    "step clock": 2,
    "storm": 2,
    "half-open": 1,
    "hang up": 2,
}
PAUSE_S = (8.0, 35.0)  # between two faults
OLD_ENOUGH_S = 12.0  # age at which a process may be killed: `up` gives up after five runs in a row below 10 s
FREEZE_S = (0.5, 12.0)
FULL_S = (8.0, 20.0)
CLOCK_STEPS_S = (-7200.0, -3600.0, -60.0, -1.0, 1.0, 60.0, 3600.0, 7200.0)
STORM = 1000
BACK_S = 150.0
RELOADED_S = 30.0


class Faults:
    """Injects one fault after the other."""

    def __init__(self, service: Service, disturbances: Disturbances, seed: int) -> None:
        self._service, self._disturbances, self._draw = service, disturbances, random.Random(seed)
        self._first = [name for name in WEIGHTS if name.startswith("kill")]  # of each one, before others are drawn
        self._draw.shuffle(self._first)
        self.done: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.unexpected: list[str] = []

    async def each(self, names: list[str]) -> None:
        """Inject these faults in this order, once each, as soon as there is a process for it that is old enough."""
        for name in names:
            await asyncio.sleep(self._draw.uniform(1.0, 3.0))
            until_s = time.monotonic() + BACK_S
            while not await self.do(name) and time.monotonic() < until_s:
                await asyncio.sleep(1.0)

    async def some(self, until_s: float, kill_until_s: float) -> None:
        """Inject random faults until `until_s`, and kill whole processes until `kill_until_s`."""
        while True:
            await asyncio.sleep(self._draw.uniform(*PAUSE_S))
            now = time.monotonic()
            if now > until_s:
                return
            kills = now < kill_until_s
            if kills and self._first:
                name = self._first.pop(0)
                if not await self.do(name):
                    self._first.append(name)
                continue
            names = [name for name in WEIGHTS if kills or not name.startswith("kill") or name == "kill grammars"]
            if not self._service.disk.is_own:
                names.remove("full disk")
            await self.do(self._draw.choices(names, [WEIGHTS[name] for name in names])[0])

    async def do(self, name: str) -> bool:
        """Inject one fault, and wait until its effect is over. Returns False if there was no process for it yet."""
        kind, _, part = name.partition(" ")
        act = {
            "kill": lambda: self._kill(part), "freeze": lambda: self._freeze(part), "full": self._full_disk,
            "step": self._step_clock, "storm": self._storm, "half-open": self._half_open, "hang": self._hang_up,
        }[kind]  # fmt: skip
        place = self._disturbances.begin(name)
        try:
            told = await act()
        except Exception as error:
            told = {"failed": f"{type(error).__name__}: {error}"[:400]}
            self.unexpected.append(f"{name}: {told['failed']}")
            print("UNEXPECTED", time.strftime("%H:%M:%S"), self.unexpected[-1], flush=True)
        seconds = self._disturbances.end(place)
        if told.pop("nothing", False):
            return False
        self.counts[name] += 1
        self.done.append(
            {"name": name, "at_s": round(time.monotonic() - seconds, 2), "seconds": round(seconds, 2), **told}
        )
        print(time.strftime("%H:%M:%S"), self.done[-1], flush=True)
        return True

    async def _old_part(self, name: str) -> Part | None:
        parts = await asyncio.to_thread(self._service.part, name)
        old = [part for part in parts if _age_s(part) > OLD_ENOUGH_S]
        return self._draw.choice(old) if old else None

    async def _kill(self, name: str) -> dict[str, Any]:
        part = await self._old_part(name)
        if part is None:
            return {"nothing": True}
        os.kill(part.pid, signal.SIGKILL)
        if name == "grammars":
            return {}
        began_s = time.monotonic()
        while part in await asyncio.to_thread(self._service.parts):
            await asyncio.sleep(0.05)
        if name == "engine":
            await self._successor(began_s)
        await self._back(name)
        return {"back_after_s": round(time.monotonic() - began_s, 2)}

    async def _successor(self, killed_s: float) -> None:
        """Wait until front ends are connected to an engine that was started after `killed_s`."""
        headers = self._service.keys[2].headers
        async with httpx.AsyncClient(base_url=self._service.http, timeout=5.0) as http:
            while time.monotonic() < killed_s + BACK_S:
                with contextlib.suppress(httpx.TransportError):
                    stats = (await http.get("/stats", headers=headers)).json()
                    if stats.get("running") and stats["uptime_s"] < time.monotonic() - killed_s:
                        return
                await asyncio.sleep(0.2)
        raise TimeoutError(f"no new engine after {BACK_S:g} s")

    async def _back(self, name: str) -> None:
        """Wait until both front ends and the engine serve again."""
        deadline = time.monotonic() + BACK_S
        headers = self._service.keys[0].headers
        want = 2 if name.startswith("http") else 1
        while True:
            if self._service.process.poll() is not None:
                raise RuntimeError(f"`up` has ended with {self._service.process.returncode}")
            with contextlib.suppress(httpx.TransportError, OSError, WebSocketException, TimeoutError):
                workers = await asyncio.to_thread(self._service.part, "http worker")
                async with httpx.AsyncClient(base_url=self._service.http, timeout=5.0) as http:
                    ready = (await http.get("/ready")).status_code == 200
                async with connect(self._service.ws, additional_headers=headers, open_timeout=5.0) as socket:
                    hello = await asyncio.wait_for(socket.recv(), 5.0)
                if (
                    ready
                    and b"READY" in (hello if isinstance(hello, bytes) else hello.encode())
                    and len(workers) >= want
                ):
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not back after {BACK_S:g} s")
            await asyncio.sleep(0.2)

    async def _freeze(self, name: str) -> dict[str, Any]:
        part = await self._old_part(name)
        if part is None:
            return {"nothing": True}
        seconds = self._draw.uniform(*FREEZE_S)
        os.kill(part.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(part.pid, signal.SIGCONT)
        await asyncio.sleep(1.0)
        if part not in await asyncio.to_thread(self._service.parts):
            raise RuntimeError("did not survive it")
        await self._back(name)
        return {"frozen_s": round(seconds, 1)}

    async def _full_disk(self) -> dict[str, Any]:
        seconds = self._draw.uniform(*FULL_S)
        await asyncio.to_thread(self._service.disk.fill)
        await asyncio.sleep(seconds)
        self._service.disk.clear()
        return {"full_s": round(seconds, 1)}

    async def _step_clock(self) -> dict[str, Any]:
        offset = self._draw.choice(CLOCK_STEPS_S)
        self._service.step_clock(offset)
        return {"offset_s": offset}

    async def _storm(self) -> dict[str, Any]:
        """Open STORM connections in a burst at one of the front ends."""
        port = self._draw.choice((self._service.http_port, self._service.ws_port))
        await storm(port, STORM)
        return {"port": "http" if port == self._service.http_port else "ws"}

    async def _half_open(self) -> dict[str, Any]:
        """Open 100 connections that send half a head and wait. The server must close each."""
        await half_open([self._service.http_port, self._service.ws_port] * 50)
        return {}

    async def _hang_up(self) -> dict[str, Any]:
        """Replace a key and send SIGHUP. Every worker must accept the new key and refuse the old one."""
        old = self._service.passing
        self._service.passing = make_key(f"passing-{self.counts['hang up'] + 1}")
        self._service.write_keys()
        self._service.hang_up()
        began_s = time.monotonic()
        right = 0
        while right < 8:
            async with httpx.AsyncClient(base_url=self._service.http, timeout=20.0) as http:  # any worker takes it
                new = (await http.get("/v1/models", headers=self._service.passing.headers)).status_code
                refused = (await http.get("/v1/models", headers=old.headers)).status_code
            right = right + 1 if (new, refused) == (200, 401) else 0
            if time.monotonic() > began_s + RELOADED_S:
                raise RuntimeError(f"the new key gets {new}, the old one {refused}")
            await asyncio.sleep(0.1)
        return {"in_force_after_s": round(time.monotonic() - began_s, 2)}


async def storm(port: int, count: int) -> None:
    """Open so many connections in a burst: a third resets, a third requests /health, a third sends half a head.

    Raises RuntimeError if /health did not answer each request."""
    served = failed = 0

    async def one(number: int) -> None:
        nonlocal served, failed
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 60.0)
        except (OSError, TimeoutError):
            failed += 1
            return
        try:
            if number % 3 == 1:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = await asyncio.wait_for(reader.read(), 60.0)
                served += answer.startswith(b"HTTP/1.1 200")
            elif number % 3 == 2:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
                await asyncio.sleep(0.5)
        except (OSError, TimeoutError):
            failed += 1
        finally:
            if number % 3 == 0:
                reset(writer.transport)
            writer.close()

    await asyncio.gather(*(one(number) for number in range(count)))
    wanted = len(range(1, count, 3))
    if served < wanted:
        raise RuntimeError(f"/health answered {served} of {wanted}, {failed} connections failed")


async def half_open(ports: Sequence[int]) -> None:
    """Open a connection to each port, send half a head and wait. Raises RuntimeError if the server closed not all."""
    closed = 0

    async def one(port: int) -> None:
        nonlocal closed
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHo")
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(reader.read(), 40.0)
            closed += 1
        writer.close()

    await asyncio.gather(*(one(port) for port in ports))
    if closed < len(ports):
        raise RuntimeError(f"{len(ports) - closed} of {len(ports)} half heads were never closed")


def reset(transport: asyncio.Transport | asyncio.WriteTransport) -> None:
    """Close a connection with RST."""
    found = transport.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _age_s(part: Part) -> float:
    with open("/proc/uptime") as file:
        uptime_s = float(file.read().split()[0])
    return uptime_s - part.start / os.sysconf("SC_CLK_TCK")

"""Finds the addresses of a pool's engines: fixed, by DNS names, or in a file that another program writes.

Entries of `wire.engines`, each of which stands for any number of engines:

- `tcp://HOST:PORT`, `ipc://PATH`: one engine.
- `dns+tcp://NAME:PORT`: one engine at each address (A and AAAA) of the name, as of a headless service of Kubernetes.
- `srv+tcp://_SERVICE._tcp.NAME`: one engine for each SRV record (RFC 2782), which names host and port. It needs
  dnspython. Priority and weight are not used: a pool balances by load.
- `file:PATH`: one address in each line; `#` begins a comment.

Names and files are read again every few seconds. A lookup that fails, or that finds no engine, changes nothing: engines
that are gone are noticed by their silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from inferengine.config import Config, check_address, engine_addresses
from inferengine.errors import ConfigError
from inferengine.wire.curve import client_keys

REFRESH_S = 5.0
LOOKUP_TIMEOUT_S = 5.0
_DYNAMIC = ("dns+tcp://", "srv+tcp://", "file:")

log = logging.getLogger(__name__)


def check_engines(config: Config) -> None:
    """Raise ConfigError naming the key where a client cannot use the addresses and keys of this configuration."""
    EngineDiscovery(engine_addresses(config))
    client_keys(config)


class EngineDiscovery:
    """Looks up the addresses that the entries of `wire.engines` stand for."""

    def __init__(self, entries: Sequence[str]) -> None:
        """Raises ConfigError for an entry of an unknown form."""
        self._entries = list(entries)
        for entry in self._entries:
            _check(entry)
        self.is_dynamic = any(entry.startswith(_DYNAMIC) for entry in self._entries)
        self._known: dict[str, list[str]] = {}  # by entry, as of its last successful lookup
        self._complaints: dict[str, str] = {}

    def fixed(self) -> list[str]:
        """Return the entries that are addresses themselves."""
        return [entry for entry in self._entries if not entry.startswith(_DYNAMIC)]

    async def look_up(self) -> list[str]:
        """Return the addresses of all entries, without repetition, in the order of the entries."""
        lookups = [self._addresses_of(entry) for entry in self._entries]
        found = [address for addresses in await asyncio.gather(*lookups) for address in addresses]
        return list(dict.fromkeys(found))

    async def watch(self, on_change: Callable[[list[str]], None], interval_s: float = REFRESH_S) -> None:
        """Call `on_change` with the addresses now, and again whenever they have changed, until cancelled."""
        before: list[str] | None = None
        while True:
            now = await self.look_up()
            if now and now != before:
                on_change(now)
                before = now
            if not self.is_dynamic:
                return
            await asyncio.sleep(interval_s)

    async def _addresses_of(self, entry: str) -> list[str]:
        if not entry.startswith(_DYNAMIC):
            return [entry]
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                found = await _look_up(entry)
            complaint = "" if found else "it names no engine"
        except TimeoutError:
            found, complaint = [], f"no answer within {LOOKUP_TIMEOUT_S:g} s"
        except OSError as error:
            found, complaint = [], error.strerror or str(error)
        if complaint != self._complaints.get(entry, ""):
            self._complaints[entry] = complaint
            if complaint:
                log.warning(
                    "engines of %s: %s; the %d known ones stay", entry, complaint, len(self._known.get(entry, ()))
                )
            else:
                log.info("engines of %s: found again", entry)
        if found:
            self._known[entry] = found
        return self._known.get(entry, [])


async def _look_up(entry: str) -> list[str]:
    if entry.startswith("file:"):
        return await asyncio.to_thread(_read_file, entry.removeprefix("file:"))
    name = entry.partition("://")[2]
    if entry.startswith("srv+tcp://"):
        return await _srv_records(name)
    host, _, port = name.rpartition(":")
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return sorted({_tcp_address(answer[4][0], int(port)) for answer in answers})


async def _srv_records(name: str) -> list[str]:
    import dns.asyncresolver
    import dns.exception
    import dns.resolver

    try:
        answer = await dns.asyncresolver.resolve(name, "SRV", lifetime=LOOKUP_TIMEOUT_S)
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        return []
    except dns.exception.DNSException as error:
        raise OSError(None, f"the name server does not answer: {type(error).__name__}") from None
    found: set[str] = set()
    loop = asyncio.get_running_loop()
    for record in answer:
        host = str(record.target).rstrip(".")
        # Addresses and not names, because an engine that comes back at another address is another engine.
        with contextlib.suppress(socket.gaierror):
            for item in await loop.getaddrinfo(host, int(record.port), type=socket.SOCK_STREAM):
                found.add(_tcp_address(item[4][0], int(record.port)))
    return sorted(found)


def _read_file(path: str) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in Path(path).read_text().splitlines()]
    addresses = [line for line in lines if line]
    for address in addresses:
        if address.startswith(_DYNAMIC) or not address.startswith(("tcp://", "ipc://")):
            raise OSError(None, f"{address[:80]!r} is no address: each line is tcp://HOST:PORT or ipc://PATH")
    return addresses


def _tcp_address(host: str | int, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in str(host) else f"tcp://{host}:{port}"


def _check(entry: str) -> None:
    kind, _, rest = entry.partition("://")
    if kind == "dns+tcp":
        host, _, port = rest.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError("wire.engines", f"{entry}: a name and a port are needed, such as dns+tcp://engines:5555")
    elif kind == "srv+tcp":
        if not rest.startswith("_") or "._tcp." not in rest or ":" in rest:
            raise ConfigError(
                "wire.engines", f"{entry}: a service's name is needed, such as srv+tcp://_wire._tcp.engines.example"
            )
        try:
            import dns.asyncresolver  # noqa: F401
        except ImportError:
            raise ConfigError(
                "wire.engines", "srv+tcp:// needs dnspython: pip install dnspython, or use dns+tcp://NAME:PORT"
            ) from None
    elif not entry.startswith(("tcp://", "ipc://", "file:")):
        raise ConfigError(
            "wire.engines",
            f"{entry!r} is no address: tcp://HOST:PORT, ipc://PATH, dns+tcp://NAME:PORT, srv+tcp://_SERVICE._tcp.NAME "
            "or file:PATH",
        )
    elif kind == "tcp":
        check_address("wire.engines", entry)
    elif entry == "file:":
        raise ConfigError("wire.engines", "file: a path must follow, such as file:/run/inferengine/engines")

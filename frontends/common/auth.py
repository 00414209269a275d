"""Who may use a front end, with which rights and how much: API keys, quotas, TLS files, host names.

The file of `auth.keys_file` has digests of keys, not the keys:

[[key]]
name = "alice"                     # for logs
sha256 = "..."                     # of the key; keys are random, so a slow hash would add nothing
tenant = "team-a"                  # has its own fair share, prefix cache and streams; default: the name
priority = 0                       # lower is sooner; a request can only ask for a later one
requests_per_minute = 600          # 0: no limit
max_in_flight = 32                 # 0: no limit
models = ["llama"]                 # none: all
admin = false                      # may pause, resume, abort and reset

Without keys a front end listens only where other machines cannot reach it (`check_protection`), and answers only
requests for names that lead to it (`AllowedHosts`).

`Quotas` counts over all workers of a front end. The counters are in shared memory that is mapped before the fork. Each
worker writes its own rows and reads those of all workers, so limits hold for the sum without a lock. Two workers that
decide at the same moment may admit one request too many. A row is found by the key's name, because keys change while
the workers run. The rate is a sliding window: requests are counted by the second, and each count is dropped after 60
seconds. So the Retry-After of a refused request is exact and at most 60 s; SDKs ignore a longer one and give up.
Several refused requests get different seconds, one for each place that becomes free.

`AllowedHosts`: a web page can make its own host name resolve to 127.0.0.1 (DNS rebinding). The browser then treats this
server as the page's own, and only the Host header shows the difference. So a server without keys on a loopback address
answers requests for loopback addresses, localhost and the names that the operator lists, and refuses all others. On an
address that other machines can reach (http.allow_public) names are checked only if some are listed. With keys nothing
is checked, because a foreign page has no key. A request of HTTP/1.0 without a Host header does not come from a browser
and is accepted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import html
import ipaddress
import itertools
import logging
import mmap
import os
import re
import secrets
import socket
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from frontends.common.errors import error_body
from inferengine.errors import ConfigError, InferEngineError, InvalidRequest

if TYPE_CHECKING:  # `inferengine keygen` uses this file where the packages of the front ends are not installed
    from starlette.types import ASGIApp, Receive, Scope, Send

    from frontends.common.connection_limits import RefusalMetrics

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
KEY_PREFIX = "ie_"
KEY_BYTES = 32
MAX_PRESENTED_CHARACTERS = 256
CONFIG_KEY = "auth.keys_file"
_FIELDS: dict[str, type] = {
    "name": str,
    "sha256": str,
    "tenant": str,
    "priority": int,
    "requests_per_minute": int,
    "max_in_flight": int,
    "models": list,
    "admin": bool,
}


@dataclass(frozen=True)
class ApiKey:
    """The rights of a key. ANYBODY, without a name, is used where no keys are required."""

    name: str = ""
    tenant: str = ""
    priority: int = 0
    requests_per_minute: int = 0
    max_in_flight: int = 0
    models: tuple[str, ...] = ()
    admin: bool = False

    def may_use(self, model: str) -> bool:
        """Return whether this key may use `model`; a key that lists no models may use all."""
        return not self.models or model in self.models

    def salt(self, given: bytes) -> bytes:
        """Return the cache salt of a request with the tenant's digest in front: tenants share no cached prefixes."""
        return hashlib.sha256(self.tenant.encode()).digest()[:16] + given if self.tenant else given

    def urgency(self, wanted: int) -> int:
        """Return a request's priority, which is at most as urgent as the key's."""
        return min(self.priority + max(0, wanted), 2**31 - 1)

    def restrict(self, arguments: dict[str, Any], adapter: str = "") -> dict[str, Any]:
        """Return the arguments of a submission with this key's tenant, salt and priority. `adapter`: the requested LoRA
        adapter."""
        if adapter:
            arguments = arguments | {"adapter": adapter}
        if self is ANYBODY:
            return arguments
        return arguments | {
            "tenant": self.tenant,
            "salt": self.salt(arguments.get("salt", b"")),
            "priority": self.urgency(arguments.get("priority", 0)),
        }


ANYBODY = ApiKey()


def key_of(scope: Mapping[str, Any]) -> ApiKey:
    """Return the key that the middleware found for an ASGI scope; ANYBODY where none is required."""
    key: ApiKey = scope.get("api_key", ANYBODY)
    return key


class KeyRing:
    """The keys of a file. Without a file no keys are required.

    The file is checked for changes when a key is presented, at most once a second. A changed file replaces all keys.
    An invalid one leaves them as they are, and `complaint` says what is wrong.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        digests: Sequence[bytes] = (),
        *,
        required: bool = False,
        path: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path`: the file to check for changes, "" for none."""
        self.keys = keys
        self.required = required
        self.complaint = ""
        self._digests = digests
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._next_look_s = clock() + LOOK_AGAIN_S

    def identify(self, presented: str | None) -> ApiKey:
        """Return the rights of a presented key. Raises `unauthorized`. The time does not depend on the key."""
        if not self.required:
            return ANYBODY
        if self._path and self._clock() >= self._next_look_s:
            self._look_again()
        if presented is None or len(presented) > MAX_PRESENTED_CHARACTERS:
            raise InferEngineError(
                "unauthorized", "An API key is needed: send it as Authorization: Bearer KEY, or as x-api-key."
            )
        digest, found = digest_of(presented), -1
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = index
        if found < 0:
            raise InferEngineError("unauthorized", "The API key is not known here.")
        return self.keys[found]

    def reload(self) -> None:
        """Read the file now, changed or not."""
        self._stamp = _stamp(self._path)  # before reading: a change during the reading is seen the next time
        try:
            fresh = read_keys(self._path)
        except ConfigError as error:
            self.complaint = str(error)
            logger.error("the keys file cannot be used, the old keys hold", extra={"fields": {"error": str(error)}})
            return
        self.keys, self._digests, self.complaint = fresh.keys, fresh._digests, ""
        logger.info("keys read again", extra={"fields": {"keys": len(self.keys)}})

    def reload_if_any(self) -> None:
        """Reload if the keys come from a file."""
        if self._path:
            self.reload()

    def _look_again(self) -> None:
        self._next_look_s = self._clock() + LOOK_AGAIN_S
        if _stamp(self._path) != self._stamp:
            self.reload()


def _stamp(path: str) -> tuple[int, ...]:
    """Return values that change when a file is written or replaced."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def digest_of(key: str) -> bytes:
    """Return the SHA-256 digest of a key, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def new_key() -> str:
    """Return a new key: 256 random bits, in characters that headers, URLs and subprotocols allow."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def entry(name: str, key: str, **values: Any) -> str:
    """Return the lines of the keys file for a new key."""
    lines = ["[[key]]", f"name = {_toml(name)}", f'sha256 = "{digest_of(key).hex()}"']
    lines += [f"{field} = {_toml(value)}" for field, value in values.items()]
    return "\n".join(lines) + "\n"


def read_keys(path: str, clock: Callable[[], float] = time.monotonic) -> KeyRing:
    """Read the keys file; an empty path gives a KeyRing that requires no key. Raises ConfigError naming the entry and
    the field at fault."""
    if not path:
        return KeyRing()
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(CONFIG_KEY, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also of bytes, and of numbers with too many digits
        raise ConfigError(CONFIG_KEY, f"is not valid TOML: {error}") from None
    entries = document.get("key", [])
    if set(document) - {"key"} or not isinstance(entries, list) or not entries:
        raise ConfigError(CONFIG_KEY, "must hold [[key]] entries and nothing else: make one with 'inferengine keygen'")
    keys = [_read_entry(index, item) for index, item in enumerate(entries)]
    names = [key.name for key in keys]
    if len(set(names)) != len(names):
        raise ConfigError(CONFIG_KEY, "every key needs a name of its own")
    return KeyRing(keys, [bytes.fromhex(item["sha256"]) for item in entries], required=True, path=path, clock=clock)


def _read_entry(index: int, item: Any) -> ApiKey:
    where = f"entry {index + 1}"
    if not isinstance(item, dict):
        raise ConfigError(CONFIG_KEY, f"{where} must stand under [[key]]")
    for field, value in item.items():
        wanted = _FIELDS.get(field)
        if wanted is None:
            raise ConfigError(CONFIG_KEY, f"{where}: there is no field {field!r}; fields are {', '.join(_FIELDS)}")
        texts = value if field == "models" and isinstance(value, list) else []
        if type(value) is not wanted or not all(isinstance(text, str) for text in texts):
            raise ConfigError(CONFIG_KEY, f"{where}: {field} has the wrong type")
    name, digest = str(item.get("name", "")), str(item.get("sha256", ""))
    if not name or not name.isprintable():
        raise ConfigError(CONFIG_KEY, f"{where}: name is required")
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ConfigError(CONFIG_KEY, f"{where}: sha256 must be 64 hexadecimal digits")
    if item.get("requests_per_minute", 0) < 0 or item.get("max_in_flight", 0) < 0:
        raise ConfigError(CONFIG_KEY, f"{where}: limits are 0 (none) or above")
    values = {field: item[field] for field in item if field not in ("name", "sha256", "tenant", "models")}
    tenant, models = str(item.get("tenant", name)), tuple(item.get("models", ()))
    return ApiKey(name=name, tenant=tenant, models=models, **values)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, int):
        return str(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def check_protection(section: str, listeners: Sequence[socket.socket], keys: KeyRing, *, allow_public: bool) -> None:
    """Raise ConfigError if other machines can reach a listener, no keys are required and `allow_public` is false."""
    if any(map(is_public, listeners)) and not keys.required and not allow_public:
        raise ConfigError(
            f"{section}.host",
            "others than this machine could reach this address, and nobody would be asked for a key: set "
            f"auth.keys_file ('inferengine keygen' makes keys), or {section}.allow_public = true behind a proxy "
            "or network that keeps strangers out",
        )


def is_public(listener: socket.socket) -> bool:
    """Return whether other machines can reach a listener."""
    name = listener.getsockname()
    return not isinstance(name, str) and not ipaddress.ip_address(name[0].partition("%")[0]).is_loopback


class TlsFiles(NamedTuple):
    """Paths of PEM files, None without TLS. Without a key file the certificate's file has the key."""

    certificate: str | None = None
    key: str | None = None


def tls_files(section: str, certificate: str, key: str) -> TlsFiles:
    """Return the TLS files of the configuration. Raises ConfigError for a missing file."""
    if not certificate:
        if key:
            raise ConfigError(f"{section}.tls_key", f"is of no use without {section}.tls_certificate")
        return TlsFiles()
    files = {"tls_certificate": certificate} | ({"tls_key": key} if key else {})
    for name, path in files.items():
        if not Path(path).is_file():
            raise ConfigError(f"{section}.{name}", "there is no such file")
    return TlsFiles(certificate, key or None)


def tenant_of(scope: Mapping[str, Any]) -> str:
    """Return the tenant of a request's key, which AuthMiddleware has put into its ASGI scope; "" without one."""
    key = scope.get("api_key")
    return "" if key is None else str(key.tenant)


WINDOW_S = 60
MIN_ROWS = 256
# The cells of a row: mark of the key, requests in flight, second of the last entry, then by second (60 cells each)
# admitted requests and promised places.
_MARK, _IN_FLIGHT, _LATEST, _ADMITTED = range(4)
_PROMISED = _ADMITTED + WINDOW_S
_CELLS = _PROMISED + WINDOW_S
_LONG_AGO = -2.0 * WINDOW_S
_DOUBLE = 8


# -- quotas ------------------------------------------------------------------------------------------------------------


class Quotas:
    """The counters of all workers. Each worker writes only its own."""

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        *,
        max_in_flight: int = 0,
        num_workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keys`: the keys known now; there is room for four times as many. `max_in_flight`: limit for all keys
        together, 0 for none. `clock` must be the same for all workers."""
        self._max_in_flight = max_in_flight
        self._num_workers = num_workers
        self._clock = clock
        self._slab = (1 + max(MIN_ROWS, 4 * len(keys))) * _CELLS  # the first row counts all keys together
        self._memory = mmap.mmap(-1, num_workers * self._slab * _DOUBLE)
        self._cells: memoryview[float] = memoryview(self._memory).cast("d")
        self._worker = 0
        self._places: dict[tuple[int, float], int] = {}  # by worker and mark: the row found last

    def choose_worker(self, worker: int) -> None:
        """Count as this worker from now on, after the fork. Sets its requests in flight to 0, because those of a
        predecessor ended with it; rates continue."""
        self._worker = worker
        for place in range(worker * self._slab, (worker + 1) * self._slab, _CELLS):
            self._cells[place + _IN_FLIGHT] = 0.0

    @contextlib.contextmanager
    def request(self, key: ApiKey) -> Iterator[None]:
        """Count a request of this key while it is answered. Raises `rate_limited` for the limits of the key, and
        `overloaded` for `max_in_flight`."""
        self.enter(key)
        try:
            yield
        finally:
            self.leave(key)

    def enter(self, key: ApiKey) -> None:
        """Begin to count a request, as `request` does. Call `leave` once for each. Raises as `request`; then nothing is
        counted."""
        if self._max_in_flight and self.in_flight() >= self._max_in_flight:
            raise InferEngineError("overloaded", "The server answers as many requests as it may.", retry_after_s=1.0)
        if key.max_in_flight and self.in_flight(key) >= key.max_in_flight:
            message = f"This key has {key.max_in_flight} requests in flight, the most that it may."
            raise InferEngineError("rate_limited", message, retry_after_s=1.0)
        if key.requests_per_minute:
            now_s = self._clock()
            if self.rate(key) >= key.requests_per_minute:
                message = f"This key may send {key.requests_per_minute} requests a minute."
                wait_s = self._promise(key, int(now_s)) - now_s
                raise InferEngineError("rate_limited", message, retry_after_s=wait_s)
            self._admit(key, int(now_s))
        self._cells[self._worker * self._slab + _IN_FLIGHT] += 1
        if key.name:
            self._cells[self._own_row(key) + _IN_FLIGHT] += 1

    def try_charge(self, key: ApiKey) -> bool:
        """Count a request that can wait, a batch's line, towards the rate of its key, and not as one in flight. False:
        nothing is counted, because the last tenth of each minute's requests is left to those that cannot wait."""
        most = key.requests_per_minute - key.requests_per_minute // 10
        if not key.requests_per_minute:
            return True
        if self.rate(key) >= most:
            return False
        self._admit(key, int(self._clock()))
        return True

    def _admit(self, key: ApiKey, now: int) -> None:
        row = self._current_row(key, now)
        self._cells[row + _ADMITTED + now % WINDOW_S] += 1

    def leave(self, key: ApiKey) -> None:
        """Count one request fewer in flight, for this key and in total. Call once for each `enter`."""
        self._cells[self._worker * self._slab + _IN_FLIGHT] -= 1
        if key.name:
            self._cells[self._own_row(key) + _IN_FLIGHT] -= 1

    def in_flight(self, key: ApiKey | None = None) -> int:
        """Return the number of requests being answered by all workers, of one key or of all."""
        if key is None:
            rows = [worker * self._slab for worker in range(self._num_workers)]
        else:
            rows = self._rows(key)
        return int(sum(self._cells[row + _IN_FLIGHT] for row in rows))

    def rate(self, key: ApiKey) -> int:
        """Return the number of admitted requests of a key in the last minute."""
        now = int(self._clock())
        total = 0.0
        for row in self._rows(key):
            latest = int(self._cells[row + _LATEST])
            if now - latest < WINDOW_S:
                total += sum(self._cells[row + _ADMITTED : row + _PROMISED])
                total -= sum(self._cells[row + _ADMITTED + second % WINDOW_S] for second in range(latest + 1, now + 1))
        return int(total)

    def _promise(self, key: ApiKey, now: int) -> int:
        """Return the first second with a free place that was not promised yet, or the last second of the window. A
        promise reserves nothing, it only delays the next promise: the first request to come is admitted."""
        admitted = [0.0] * WINDOW_S  # by the second at which they no longer count, from the next second on
        promised = [0.0] * WINDOW_S
        for row in self._rows(key):
            latest = int(self._cells[row + _LATEST])
            for ahead in range(WINDOW_S):
                second = now + 1 + ahead
                if second - WINDOW_S <= latest:
                    admitted[ahead] += self._cells[row + _ADMITTED + second % WINDOW_S]
                if second <= latest + WINDOW_S:
                    promised[ahead] += self._cells[row + _PROMISED + second % WINDOW_S]
        free = key.requests_per_minute - sum(admitted)
        places = zip(itertools.accumulate(admitted), itertools.accumulate(promised), strict=True)
        ahead = next((index for index, (left, taken) in enumerate(places) if free + left > taken), WINDOW_S - 1)
        second = now + 1 + ahead
        self._cells[self._current_row(key, now) + _PROMISED + second % WINDOW_S] += 1
        return second

    def _current_row(self, key: ApiKey, now: int) -> int:
        """Return this worker's row of the key after dropping counts older than the window."""
        row = self._own_row(key)
        latest = int(self._cells[row + _LATEST])
        for second in range(max(latest + 1, now - WINDOW_S + 1), now + 1):
            self._cells[row + _ADMITTED + second % WINDOW_S] = 0.0
            self._cells[row + _PROMISED + second % WINDOW_S] = 0.0
        self._cells[row + _LATEST] = max(latest, now)
        return row

    def _rows(self, key: ApiKey) -> list[int]:
        """Return the key's rows of all workers that have one."""
        mark = _mark(key.name)
        rows = [self._find(worker, mark) for worker in range(self._num_workers)]
        return [row for row in rows if row is not None]

    def _own_row(self, key: ApiKey) -> int:
        """Return this worker's row of the key. A new one replaces a row that counts nothing any more."""
        mark = _mark(key.name)
        if (found := self._find(self._worker, mark)) is not None:
            return found
        now = int(self._clock())
        for row in self._slab_rows(self._worker):
            cells = self._cells
            if not cells[row + _MARK] or (not cells[row + _IN_FLIGHT] and cells[row + _LATEST] <= now - WINDOW_S):
                for place in range(row + _IN_FLIGHT, row + _CELLS):
                    cells[place] = 0.0
                cells[row + _LATEST] = _LONG_AGO
                cells[row + _MARK] = mark
                return row
        raise InferEngineError("overloaded", "More keys are in use than this server counts.", retry_after_s=WINDOW_S)

    def _find(self, worker: int, mark: float) -> int | None:
        """Return a worker's row with this mark, or None. Rows are filled in order: an unused one ends the search."""
        known = self._places.get((worker, mark))
        if known is not None and self._cells[known + _MARK] == mark:
            return known
        for row in self._slab_rows(worker):
            if self._cells[row + _MARK] == mark:
                self._places[worker, mark] = row
                return row
            if not self._cells[row + _MARK]:
                break
        return None

    def _slab_rows(self, worker: int) -> range:
        return range(worker * self._slab + _CELLS, (worker + 1) * self._slab, _CELLS)


def _mark(name: str) -> float:
    """Return a hash of a name that a float holds exactly (at most 2^48), never 0."""
    return float(1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big"))


# -- host names --------------------------------------------------------------------------------------------------------


ANY = "*"
_NAME = re.compile(r"[a-z0-9_.-]{1,253}")
_PORT = re.compile(r":\d{0,5}")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:\d{1,5})?")
_DEFAULT_PORT = re.compile(r"^(http:.*):80$|^(https:.*):443$")
_PAGE_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>Not allowed · InferEngine</title>
<style>body { max-width: 36rem; margin: 16vh auto; padding: 0 1.5rem; font: 16px/1.6 system-ui, sans-serif }</style>
"""


class AllowedHosts:
    """The host names and origins that one front end accepts."""

    def __init__(self, section: str, names: Sequence[str], origins: Sequence[str], public_ports: Iterable[int]) -> None:
        """`section`: "http" or "ws", for error messages. `names`: further host names, `*.example.com` for all below a
        domain, `*` for any. `origins`: web origins whose pages may call, by CORS or by the websocket's list; their
        hosts are accepted as names, too. `public_ports`: ports that other machines can reach."""
        self._section = section
        self._origins = frozenset(origins)
        self._takes_any_origin = ANY in origins
        names = [*names, *(name for name in map(_host_of_origin, origins) if name is not None)]
        self._takes_any = ANY in names or self._takes_any_origin
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._public_ports = frozenset(public_ports)
        self._is_listed = bool(names)

    def check(self, scope: Scope) -> None:
        """Raise `forbidden` for a host or an origin that may not use a server without keys."""
        if not self._guards(scope.get("server")):
            return
        for name, value in scope["headers"]:
            if name == b"host":
                self._check_host(value.decode("latin-1"))
            elif name == b"origin":
                self._check_origin(value.decode("latin-1"))

    def _guards(self, server: tuple[str, int | None] | None) -> bool:
        """Return whether names are checked on the address of a connection. Web pages cannot reach a unix socket."""
        if server is None or server[1] is None or self._takes_any:
            return False
        if server[1] in self._public_ports:
            return self._is_listed
        return _is_loopback(server[0])

    def _check_host(self, value: str) -> None:
        host = _without_port(value.strip().lower())
        if host is None or not self._allows(host):
            shown = f" `{value[:100]}`" if host is not None else ""
            raise InferEngineError(
                "forbidden",
                f"This server asks for no API key, so it answers to this machine's own addresses and to listed names. "
                f"The host{shown} is none of them: use 127.0.0.1 or localhost, or list the name in "
                f"{self._section}.allowed_hosts{_example(self._section, host)}.",
            )

    def _check_origin(self, value: str) -> None:
        origin = value.strip().lower().rstrip("/")
        if origin in self._origins or self._takes_any_origin:
            return
        host = _host_of_origin(origin)
        if host is None or not self._allows(host):
            lists = "http.cors_origins" if self._section == "http" else "ws.origins"
            raise InferEngineError(
                "forbidden",
                "This server asks for no API key, so pages of other origins may not call it. The operator can list "
                f"this page's origin in {lists}.",
            )

    def _allows(self, host: str) -> bool:
        if host == "localhost" or host.endswith(".localhost") or host in self._names:
            return True
        if host.endswith(self._suffixes):
            return True
        return _is_address(host) if self._public_ports else _is_loopback(host)


class HostMiddleware:
    """ASGI middleware that refuses hosts and origins with 403 while no API keys are required.

    Several Host headers, and in HTTP/1.1 none, are refused with 400 always (RFC 9112, section 3.2): each of several may
    lead another proxy somewhere else."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, keys: KeyRing, refusals: RefusalMetrics) -> None:
        self._app = app
        self._hosts = hosts
        self._keys = keys
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse its host or origin."""
        if scope["type"] != "lifespan":
            try:
                num_hosts = sum(name == b"host" for name, _ in scope["headers"])
                if num_hosts > 1:
                    raise InvalidRequest("Host", "must be one header: this request has several")
                if not num_hosts and scope.get("http_version") == "1.1":
                    raise InvalidRequest("Host", "is missing, which HTTP/1.1 requires: send the header")
                if not self._keys.required:
                    self._hosts.check(scope)
            except InferEngineError as error:
                self._refusals.count("host")
                await (_refuse_page(send, error) if _is_page(scope) else refuse(scope, send, error))
                return
        await self._app(scope, receive, send)


async def refuse(scope: Scope, send: Send, error: InferEngineError) -> None:
    """Answer a request or a websocket handshake with an error."""
    body = error_body(error)
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    start: dict[str, Any] = {
        "type": f"{kind}.start",
        "status": error.http_status,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
    }
    await send(start)
    await send({"type": f"{kind}.body", "body": body})


def _is_page(scope: Scope) -> bool:
    """Return whether a browser asks for a page to show."""
    accepted = (value for name, value in scope["headers"] if name == b"accept")
    return scope["type"] == "http" and scope["method"] == "GET" and any(b"text/html" in value for value in accepted)


async def _refuse_page(send: Send, error: InferEngineError) -> None:
    """Answer a browser with the error as a page that people can read."""
    text = f"{_PAGE_HEAD}<h1>This address is not allowed</h1><p>{html.escape(error.message)}</p></html>"
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", str(len(text.encode())).encode()),
        (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def read_names(section: str, text: str) -> list[str]:
    """Return the host names of the comma-separated setting `allowed_hosts`. Raises ConfigError for anything else."""
    names = [item.strip().lower().rstrip(".") for item in text.split(",") if item.strip()]
    for name in names:
        bare = name.removeprefix("*.")
        if name != ANY and not _NAME.fullmatch(bare) and not _is_address(bare.strip("[]")):
            raise ConfigError(
                f"{section}.allowed_hosts", f"{name[:100]!r} is no host name: write names without scheme, port or path"
            )
    return [name.strip("[]") for name in names]


def read_origins(key: str, text: str) -> tuple[str, ...]:
    """Return the web origins of the comma-separated setting `key`, as browsers write them. Raises ConfigError for
    anything else: it would never match."""
    origins = [item.strip().lower().rstrip("/") for item in text.split(",") if item.strip()]
    for origin in origins:
        if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin):
            shown = f"{origin[:100]!r} is no origin: write https://app.example.com, or http://app.example.com:3000"
            raise ConfigError(key, f"{shown}, with commas between several")
    return tuple(_DEFAULT_PORT.sub(r"\1\2", origin) for origin in origins)


def is_named(host: str, names: Iterable[str]) -> bool:
    """Return whether a list of `read_names` contains this host."""
    return any(name in (ANY, host) or (name.startswith("*.") and host.endswith(name[1:])) for name in names)


def public_ports(listeners: Iterable[socket.socket]) -> list[int]:
    """Return the ports of the listeners that other machines can reach."""
    return [listener.getsockname()[1] for listener in listeners if is_public(listener)]


def _without_port(value: str) -> str | None:
    """Return the name or address in a Host header, None for an invalid one."""
    if value.startswith("["):
        address, closed, port = value[1:].partition("]")
        return address if closed and (not port or _PORT.fullmatch(port)) else None
    name, colon, port = value.partition(":")
    if colon and not _PORT.fullmatch(colon + port):
        return None
    name = name.removesuffix(".")
    return name if _NAME.fullmatch(name) else None


def _host_of_origin(origin: str) -> str | None:
    try:
        parts = urlsplit(origin)
        return parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:
        return None


def _example(section: str, host: str | None) -> str:
    """Return the option that allows this name; empty for what is no name."""
    return f" (start with --{section}.allowed_hosts {host[:100]})" if host and not _is_address(host) else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return bool(address.is_loopback or address.is_unspecified)  # connecting to 0.0.0.0 reaches the own machine

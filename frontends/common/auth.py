"""API keys and TLS files: who may use a front end, and with which rights.

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

Without keys a front end listens only where other machines cannot reach it (`check_protection`).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.errors import ConfigError, InferEngineError

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
            raise InferEngineError("unauthorized", "An API key is needed.")
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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

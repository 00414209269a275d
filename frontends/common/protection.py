"""What must hold before a front end listens where strangers may reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from frontends.common.keys import KeyRing
from inferengine.errors import ConfigError


def check_protection(section: str, listeners: Sequence[socket.socket], keys: KeyRing, *, allow_public: bool) -> None:
    """Raises ConfigError for an address beyond this machine without API keys, unless the operator says so."""
    if any(map(is_public, listeners)) and not keys.required and not allow_public:
        raise ConfigError(
            f"{section}.host",
            "others than this machine could reach this address, and nobody would be asked for a key: set "
            f"auth.keys_file ('inferengine keygen' makes keys), or {section}.allow_public = true behind a proxy "
            "or network that keeps strangers out",
        )


def is_public(listener: socket.socket) -> bool:
    """Whether others than this machine may reach it."""
    name = listener.getsockname()
    return not isinstance(name, str) and not ipaddress.ip_address(name[0].partition("%")[0]).is_loopback


class TlsFiles(NamedTuple):
    """PEM files; None where plain text is spoken. Without a key of its own the certificate's file holds it."""

    certificate: str | None = None
    key: str | None = None


def tls_files(section: str, certificate: str, key: str) -> TlsFiles:
    """Those of the configuration. Raises ConfigError for a file that is not there."""
    if not certificate:
        if key:
            raise ConfigError(f"{section}.tls_key", f"is of no use without {section}.tls_certificate")
        return TlsFiles()
    files = {"tls_certificate": certificate} | ({"tls_key": key} if key else {})
    for name, path in files.items():
        if not Path(path).is_file():
            raise ConfigError(f"{section}.{name}", "there is no such file")
    return TlsFiles(certificate, key or None)

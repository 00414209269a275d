"""CURVE, the encryption and authentication of ZeroMQ over TCP: key pairs in files, and which clients may connect.

Over unix sockets the file's mode is the protection. A key file is TOML with `public` and `secret`, each 40 characters
of Z85. The engine's list of clients is TOML, too, with a line `name = "public key"` for each. `answer` is the engine's
side of ZAP (ZeroMQ RFC 27): it accepts listed keys only.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from inferengine.config import Config
from inferengine.errors import ConfigError

Z85_CHARACTERS = 40
_VERSION = b"1.0"


class KeyPair(NamedTuple):
    """A public and a secret key, each 40 characters of Z85."""

    public: bytes
    secret: bytes


class ClientKeys(NamedTuple):
    """What a client needs: its own pair, and the public key of the engine that it means to speak to."""

    own: KeyPair
    engine: bytes


def new_pair() -> KeyPair:
    """Return a new random pair."""
    return KeyPair(*zmq.curve_keypair())


def write_pair(path: Path, pair: KeyPair) -> None:
    """Write a pair into a new file that only its owner may read. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f'public = "{pair.public.decode()}"\nsecret = "{pair.secret.decode()}"\n')


def read_pair(path: str) -> KeyPair:
    """Read a key file. Raises ConfigError, which never shows the content of the file."""
    values = _read("wire.curve_secret_file", path)
    pair = [_key("wire.curve_secret_file", name, values.get(name)) for name in ("public", "secret")]
    return KeyPair(*pair)


def read_clients(path: str) -> dict[bytes, str]:
    """Read the list of clients: their names by public key, in the 32 bytes that ZAP uses. Raises ConfigError."""
    key = "wire.curve_clients_file"
    return {z85.decode(_key(key, name, value)): name for name, value in _read(key, path).items()}


def client_keys(config: Config) -> ClientKeys | None:
    """Return the configured keys of a client; None if no engine's key is configured. Raises ConfigError."""
    wire = config.wire
    if not wire.curve_engine_key:
        return None
    if not wire.curve_secret_file:
        raise ConfigError("wire.curve_secret_file", "must name this client's own keys: 'inferengine keygen' makes them")
    engine = _key("wire.curve_engine_key", "the engine's public key", wire.curve_engine_key)
    return ClientKeys(read_pair(wire.curve_secret_file), engine)


def answer(frames: Sequence[bytes], clients: Mapping[bytes, str]) -> list[bytes]:
    """Return the reply to a ZAP request: [version, request id, domain, address, identity, mechanism, credentials…]."""
    known = len(frames) == 7 and frames[0] == _VERSION and frames[5] == b"CURVE" and frames[6] in clients
    request_id = frames[1] if len(frames) > 1 else b""
    name = clients[frames[6]] if known else ""
    status = (b"200", b"") if known else (b"400", b"this key is not on the list")
    return [_VERSION, request_id, *status, name.encode(), b""]


def _read(key: str, path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(key, f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError(key, "is not valid TOML") from None


def _key(key: str, name: str, value: Any) -> bytes:
    try:
        if isinstance(value, str) and len(value) == Z85_CHARACTERS and len(z85.decode(value.encode())) == 32:
            return value.encode()
    except (ValueError, KeyError, UnicodeEncodeError):
        pass
    raise ConfigError(key, f"{name} must be a key of {Z85_CHARACTERS} characters, as 'inferengine keygen' writes it")

"""usage: inferengine keygen --api NAME [--file FILE] [--tenant NAME] [--priority N] [--requests-per-minute N]
                          [--max-in-flight N] [--models NAME,NAME] [--admin]
       inferengine keygen --curve NAME [--folder FOLDER]

--api makes a key for the front ends and prints it, once: the entry for auth.keys_file holds its digest only. With
--file the entry is added to that file, otherwise it is printed too.
--curve makes a key pair for ZeroMQ over TCP: NAME.key for wire.curve_secret_file (of the engine, or of a client), and
prints the public key: the engine's for its clients' wire.curve_engine_key, a client's for the engine's list,
wire.curve_clients_file, one `NAME = "public key"` a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inferengine.errors import ConfigError, ExitCode

_WORDS = ("--api", "--curve", "--file", "--folder", "--tenant", "--models")
_NUMBERS = ("--priority", "--requests-per-minute", "--max-in-flight")


def run(arguments: Sequence[str]) -> int:
    """Make a key and say what it is for."""
    values = _read(arguments)
    if ("--api" in values) == ("--curve" in values):
        raise ConfigError("--api", "say either --api NAME or --curve NAME")
    return _api(values) if "--api" in values else _curve(values)


def _api(values: dict[str, Any]) -> int:
    from frontends.common import auth as keys

    file = values.pop("--file", None)
    name = values.pop("--api")
    if "--models" in values:
        values["--models"] = [model.strip() for model in values["--models"].split(",") if model.strip()]
    fields = {word[2:].replace("-", "_"): value for word, value in values.items()}
    if "folder" in fields:
        raise ConfigError("--folder", "is for --curve; the entry of an API key goes to --file FILE")
    key = keys.new_key()
    entry = keys.entry(name, key, **fields)
    if file is None:
        print(f"{key}\n\n# for the file that auth.keys_file names:\n{entry}", end="")
        return ExitCode.OK
    path = Path(file)
    is_new = not path.exists()
    if not is_new and name in [known.name for known in keys.read_keys(file).keys]:
        raise ConfigError("--api", f"{file} has a key of that name: choose another, or take its entry out first")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640), "a") as handle:
            handle.write(f"\n{entry}" if path.stat().st_size else entry)
        if is_new:
            _share_with_service(path)
    except OSError as error:
        raise ConfigError("--file", f"{file} cannot be written: {error.strerror}") from None
    keys.read_keys(file)
    print(key)
    print(f"The entry is in {file}; running front ends see it within a second.", file=sys.stderr)
    return ExitCode.OK


def _curve(values: dict[str, Any]) -> int:
    from inferengine.wire import curve

    name, folder = values.pop("--curve"), Path(values.pop("--folder", "."))
    if values:
        raise ConfigError(next(iter(values)), "is for --api")
    if not name or "/" in name or name.startswith("."):
        raise ConfigError("--curve", "NAME becomes a file's name: letters, digits, - and _")
    path, pair = folder / f"{name}.key", curve.new_pair()
    try:
        curve.write_pair(path, pair)
        _share_with_service(path)
    except FileExistsError:
        raise ConfigError("--curve", f"{path} exists: take another name, or remove it first") from None
    except OSError as error:
        raise ConfigError("--folder", f"{path} cannot be written: {error.strerror}") from None
    print(pair.public.decode())
    print(f"The pair is in {path}. Above is its public key.", file=sys.stderr)
    return ExitCode.OK


def _share_with_service(path: Path) -> None:
    """What root makes in a folder of another group, /etc/inferengine for one, is for the service that runs as that
    group: it could not read it otherwise."""
    group = path.absolute().parent.stat().st_gid
    if os.geteuid() == 0 and group != 0:
        os.chown(path, -1, group)
        path.chmod(0o640)


def _read(arguments: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--admin" and not equals:
            values[name] = True
            continue
        if name not in (*_WORDS, *_NUMBERS):
            raise ConfigError(word, "no such option: see 'inferengine keygen --help'")
        if not equals:
            value = next(words, "")
        if not value:
            raise ConfigError(name, "a value must follow")
        if name in _NUMBERS and not value.lstrip("-").isdigit():
            raise ConfigError(name, "must be a whole number")
        values[name] = int(value) if name in _NUMBERS else value
    return values

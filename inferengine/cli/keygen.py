"""`inferengine keygen`: API keys of the front ends, and CURVE key pairs for ZeroMQ over TCP."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from inferengine.cli.command import Arguments, Option, command
from inferengine.errors import ConfigError, ExitCode

OPTIONS = {
    "an API key for the front ends": (
        Option(
            "--api NAME", "make a key of this name and print it, once: the file gets only its digest", None, kind=str
        ),
        Option(
            "--file FILE",
            "add the entry to this file (auth.keys_file); without it the entry is printed",
            None,
            kind=str,
        ),
        Option("--tenant NAME", "the tenant that the key's requests count for", None, kind=str),
        Option("--priority N", "priority of the key's requests", None, kind=int, minimum=None),
        Option("--requests-per-minute N", "limit of new requests", None, kind=int, minimum=None),
        Option("--max-in-flight N", "limit of unfinished requests", None, kind=int, minimum=None),
        Option("--models NAME,NAME", "models that the key may use", None, kind=str),
        Option("--admin", "the key may use administrators' routes", False),
    ),
    "a key pair for ZeroMQ over TCP": (
        Option("--curve NAME", "make NAME.key and print its public key", None, kind=str),
        Option("--folder FOLDER", "where NAME.key goes; default: the current folder", None, kind=str),
    ),
}
USAGE = ("--api NAME [--file FILE] [options]", "--curve NAME [--folder FOLDER]")


@command(OPTIONS, usage=USAGE, takes_configuration=False)
def run(arguments: Arguments) -> int:
    """Make an API key for the front ends, or a CURVE key pair for ZeroMQ over TCP.

    NAME.key is for wire.curve_secret_file, of the engine or of a client. The public key is printed. That of the engine
    is for its clients' wire.curve_engine_key; that of a client is for the engine's list, wire.curve_clients_file, one
    `NAME = "public key"` a line.
    """
    values = {name: arguments.values[name] for name in arguments.given}
    if ("api" in values) == ("curve" in values):
        raise ConfigError("--api", "say either --api NAME or --curve NAME")
    return _make_api_key(values) if "api" in values else _make_curve_pair(values)


def _make_api_key(values: dict[str, Any]) -> int:
    from frontends.common import auth as keys

    file = values.pop("file", None)
    name = values.pop("api")
    if "models" in values:
        values["models"] = [model.strip() for model in values["models"].split(",") if model.strip()]
    if "folder" in values:
        raise ConfigError("--folder", "is for --curve; the entry of an API key goes to --file FILE")
    key = keys.new_key()
    entry = keys.entry(name, key, **values)
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


def _make_curve_pair(values: dict[str, Any]) -> int:
    from inferengine.wire import curve

    name, folder = values.pop("curve"), Path(values.pop("folder", "."))
    if values:
        raise ConfigError(f"--{next(iter(values)).replace('_', '-')}", "is for --api")
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
    """Give a file that root made in a folder of another group, such as /etc/inferengine, to that group.

    The service runs as that group and could not read the file otherwise.
    """
    group = path.absolute().parent.stat().st_gid
    if os.geteuid() == 0 and group != 0:
        os.chown(path, -1, group)
        path.chmod(0o640)

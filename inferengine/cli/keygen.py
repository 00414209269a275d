"""`inferengine keygen`: API keys of the front ends, and CURVE key pairs for ZeroMQ over TCP."""

from __future__ import annotations

import json
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
            "add the entry to this file (auth.keys_file), made with its folder where it is not there; without it the "
            "entry is printed",
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
        Option(
            "--folder FOLDER",
            "where NAME.key goes, made where it is not there; default: the current folder",
            None,
            kind=str,
        ),
    ),
    "the output": (Option("--json", "print it as JSON"),),
}
USAGE = ("--api NAME [--file FILE] [options]", "--curve NAME [--folder FOLDER]")


@command(OPTIONS, usage=USAGE, takes_configuration=False)
def run(arguments: Arguments) -> int:
    """Make an API key for the front ends, or a CURVE key pair for ZeroMQ over TCP.

    NAME.key is for wire.curve_secret_file, of the engine or of a client. The public key is printed. That of the engine
    is for its clients' wire.curve_engine_key; that of a client is for the engine's list, wire.curve_clients_file, one
    `NAME = "public key"` a line.
    """
    values = {name: arguments.values[name] for name in arguments.given if name != "json"}
    as_json = arguments.values["json"]
    if ("api" in values) == ("curve" in values):
        raise ConfigError("--api", "say either --api NAME or --curve NAME")
    return _make_api_key(values, as_json) if "api" in values else _make_curve_pair(values, as_json)


def _make_api_key(values: dict[str, Any], as_json: bool) -> int:
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
        if as_json:
            print(json.dumps({"name": name, "key": key, "file": None, "entry": entry}))
        else:
            print(f"{key}\n\n# for the file that auth.keys_file names:\n{entry}", end="")
        return ExitCode.OK
    path = Path(file)
    is_new = not path.exists()
    if not is_new and name in [known.name for known in keys.read_keys(file).keys]:
        raise ConfigError("--api", f"{file} has a key of that name: choose another, or take its entry out first")
    try:
        _make_folder(path.parent)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640), "a") as handle:
            handle.write(f"\n{entry}" if path.stat().st_size else entry)
        if is_new:
            _share_with_service(path)
    except OSError as error:
        raise ConfigError("--file", f"{file} cannot be written: {error.strerror}") from None
    keys.read_keys(file)
    print(json.dumps({"name": name, "key": key, "file": str(path)}) if as_json else key)
    print(f"The entry is in {file}; running front ends see it within a second.", file=sys.stderr)
    return ExitCode.OK


def _make_curve_pair(values: dict[str, Any], as_json: bool) -> int:
    from inferengine.wire import curve

    name, folder = values.pop("curve"), Path(values.pop("folder", "."))
    if values:
        raise ConfigError(f"--{next(iter(values)).replace('_', '-')}", "is for --api")
    if not name or "/" in name or name.startswith("."):
        raise ConfigError("--curve", "NAME becomes a file's name: letters, digits, - and _")
    path, pair = folder / f"{name}.key", curve.new_pair()
    try:
        _make_folder(folder)
        curve.write_pair(path, pair)
        _share_with_service(path)
    except FileExistsError:
        raise ConfigError("--curve", f"{path} exists: take another name, or remove it first") from None
    except OSError as error:
        raise ConfigError("--folder", f"{path} cannot be written: {error.strerror}") from None
    public = pair.public.decode()
    print(json.dumps({"name": name, "public_key": public, "file": str(path)}) if as_json else public)
    print(f"The pair is in {path}. Above is its public key.", file=sys.stderr)
    return ExitCode.OK


def _make_folder(folder: Path) -> None:
    """Make the folder, and those above it, for its owner and its group alone; one that is there stays as it is.

    Raises OSError.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o750)


def _share_with_service(path: Path) -> None:
    """Give a file that root made in a folder of another group, such as /etc/inferengine, to that group.

    The service runs as that group and could not read the file otherwise.
    """
    group = path.absolute().parent.stat().st_gid
    if os.geteuid() == 0 and group != 0:
        os.chown(path, -1, group)
        path.chmod(0o640)

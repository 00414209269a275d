"""`inferengine systemd`: compares and installs the systemd units for the Python that runs this command.

The units in the folder `systemd` name /opt/inferengine/.venv. The installed units name this interpreter instead: of a
virtual environment, pipx, uv, pyenv or the system. Folders of it below /root or /home are bind-mounted into the units'
view of the disk; nothing else there is visible to them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from inferengine.cli.command import Arguments, Option, command
from inferengine.errors import ConfigError, ExitCode

CONFIG = "/etc/inferengine/inferengine.toml"
CONFIG_OPTION = Option("--config FILE", "the configuration file that the units name", CONFIG)
COMPARE_OPTIONS = {"options": (CONFIG_OPTION, Option("--json", "print the findings as JSON"))}
OPTIONS = {
    "options": (
        CONFIG_OPTION,
        Option("--dry-run", "print the files and the commands, and change nothing"),
        Option("--root FOLDER", "write below this folder, as for an image, and run no command", None, kind=str),
        Option("--json", "print what is written and run as JSON"),
    )
}
PYTHON = "/opt/inferengine/.venv/bin/python"  # the interpreter that the units in the folder `systemd` name
DOCUMENT = "/opt/inferengine/docs/operations.md"
HIDDEN = ("/root", "/home", "/run/user")  # what ProtectHome= hides
DOCUMENT_URL = f"file:{DOCUMENT}"
EXAMPLE = "embedded.toml"
GROUP = "inferengine"
BEFORE_CONFIG = ("systemd-sysusers inferengine.conf", "systemd-tmpfiles --create inferengine.conf")
AFTER = ("systemctl daemon-reload",)
START = "systemctl enable --now inferengine-http.socket inferengine-ws.socket inferengine.target"


class Install(NamedTuple):
    """An installation of this package: its interpreter, as it was called, and the folders that it needs.

    `search`: a folder to add to PYTHONPATH because the interpreter does not find the package without it; empty: none.
    """

    python: str
    folders: tuple[Path, ...]
    search: str = ""


class File(NamedTuple):
    """A file to write. A `kept` file is not overwritten if it exists. `group`: a group that may read the file."""

    path: str
    text: str
    mode: int = 0o644
    group: str = ""
    kept: bool = False


@command(COMPARE_OPTIONS, takes_configuration=False)
def compare(arguments: Arguments) -> int:
    """Compare the units of this machine with those that `inferengine systemd install` would write.

    Prints one line for each file: same, absent, or differs with the first line that does. After an upgrade, or for
    another Python, files differ until they are installed again. The exit code is 1 if a file differs or is absent.
    Drop-ins (systemctl edit) are ignored.
    """
    found: dict[str, str] = {}
    differences: dict[str, str] = {}
    for file in units(data_folder(), this_install(), _config_of(arguments)):
        path = Path(file.path)
        if not path.exists():
            found[file.path] = "absent"
        elif file.kept or (text := path.read_text(encoding="utf-8")) == file.text:
            found[file.path] = "same"
        else:
            found[file.path] = "differs"
            differences[file.path] = f": {_first_difference(text, file.text)}"
    if arguments.values["json"]:
        print(json.dumps({"python": sys.executable, "files": found}, indent=1))
    else:
        print("\n".join(f"{grade:<8} {path}{differences.get(path, '')}" for path, grade in found.items()))
    return ExitCode.OK if set(found.values()) == {"same"} else ExitCode.CRASH


def _first_difference(text: str, wanted: str) -> str:
    """Return the first line of a file that is not the wanted one, and that one."""
    pairs = zip_longest(text.splitlines(), wanted.splitlines(), fillvalue="")
    line, due = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    return f"'{line}', would be '{due}'"


@command(OPTIONS, takes_configuration=False)
def install(arguments: Arguments) -> int:
    """Install the systemd units for the Python that runs this command. Needs root.

    Writes the units, the user `inferengine` and its folders (sysusers.d, tmpfiles.d), and an example configuration if
    there is none, and reloads systemd. Nothing is enabled or started; the command for that is printed. Drop-ins
    (systemctl edit) stay. Run it again after an upgrade, or with another Python.
    """
    root = arguments.values["root"]
    files = list(units(data_folder(), this_install(), _config_of(arguments)))
    commands = [] if root else [*BEFORE_CONFIG, *AFTER]
    if arguments.values["json"]:
        shown = [{**file._asdict(), "mode": f"{file.mode:04o}"} for file in files]
        print(json.dumps({"files": shown, "commands": commands, "start": START}, indent=1))
    elif arguments.values["dry_run"]:
        for file in files:
            kept = " unless it exists" if file.kept else ""
            print(f"# ---- {file.path} (mode {file.mode:04o}{kept})\n{file.text}")
        print("\n".join([*(f"# ---- run: {line}" for line in commands), f"# ---- then, to start: {START}"]))
    if arguments.values["dry_run"]:
        return ExitCode.OK
    _install(files, root)
    if not arguments.values["json"]:
        print(f"wrote {len(files)} files for {sys.executable}; dashboards and alerts are in {data_folder()}")
        print(f"to start: {START}")
    return ExitCode.OK


def _install(files: list[File], root: str | None) -> None:
    """Write the files, below `root` if that is given, else with systemd's commands. Raises ConfigError."""
    try:
        _write((file for file in files if not file.group), Path(root or "/"))
        for line in () if root else BEFORE_CONFIG:  # the user and the folders that the configuration's file needs
            _run(line)
        _write((file for file in files if file.group), Path(root or "/"))
        for line in () if root else AFTER:
            _run(line)
    except PermissionError as error:
        words = shlex.join([sys.executable, "-m", "inferengine.cli", "systemd", "install"])
        raise ConfigError("systemd install", f"{error.filename} cannot be written: sudo {words}") from None


def _config_of(arguments: Arguments) -> str:
    config = str(arguments.values["config"])
    if not Path(config).is_absolute():
        raise ConfigError("--config", f"must be an absolute path; got '{config}'")
    return config


def data_folder() -> Path:
    """Return the folder `systemd` of this checkout or of the installed package. Raises ConfigError if there is none."""
    checkout = Path(__file__).resolve().parents[2]
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    installed = [Path(sysconfig.get_path("data", scheme)) / "share" / "inferengine" for scheme in schemes]
    for base in (checkout, *installed):
        if (base / "systemd" / "inferengine.target").exists():
            return base / "systemd"
    raise ConfigError("systemd install", "the units are not installed with this package: install its wheel again")


def this_install() -> Install:
    """Return this interpreter, its folders and the package's."""
    packages = Path(__file__).resolve().parents[2]
    folders = (Path(sys.prefix), Path(sys.base_prefix), packages)
    probe = "import inferengine, pathlib; print(pathlib.Path(inferengine.__file__).resolve().parents[1])"
    # Under the conditions of a service: no user site-packages, no environment variables, another working directory.
    found = subprocess.run([sys.executable, "-E", "-s", "-P", "-c", probe], capture_output=True, text=True, cwd="/")
    search = "" if found.stdout.strip() == str(packages) else str(packages)
    return Install(sys.executable, folders, search)


def units(source: Path, found: Install, config: str = CONFIG) -> Iterator[File]:
    """Yield the files to write for an interpreter, made from those in the folder `systemd`."""
    for path in sorted(source.iterdir()):
        if path.suffix in (".service", ".socket", ".target"):
            text = _unit(path.read_text(), found, config, source.parent / "docs" / "operations.md")
            yield File(f"/etc/systemd/system/{path.name}", text)
    for kind in ("sysusers", "tmpfiles"):
        yield File(f"/etc/{kind}.d/inferengine.conf", (source / f"{kind}.conf").read_text())
    yield File(config, (source / "examples" / EXAMPLE).read_text(), 0o640, GROUP, kept=True)


def _unit(text: str, found: Install, config: str, document: Path) -> str:
    """Return a unit's text for an interpreter."""
    text = text.replace(DOCUMENT_URL, document.as_uri().replace("%", "%%") if document.exists() else DOCUMENT_URL)
    text = text.replace(PYTHON, _word(found.python, of_command=True))
    text = text.replace(CONFIG, _word(config, of_command=True))
    if (hidden := bound_folders(found.folders)) and "ProtectHome=" in text:
        lines = [
            "# Below /root and /home the units see this Python and nothing else.",
            "ProtectHome=tmpfs",
            f"BindReadOnlyPaths={' '.join(_word(str(folder)).replace(':', chr(92) + ':') for folder in hidden)}",
        ]
        text = re.sub(r"^ProtectHome=.*$", lambda _: "\n".join(lines), text, flags=re.MULTILINE)
    if found.search and "[Service]" in text:
        text = text.replace("[Service]\n", f"[Service]\nEnvironment={_word(f'PYTHONPATH={found.search}')}\n")
    return text


def bound_folders(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that ProtectHome= hides from units, as named and as resolved, without folders in others."""
    wanted = {place for folder in folders for place in (folder.absolute(), folder.resolve())}
    hidden = {place for place in wanted if any(place.is_relative_to(base) for base in HIDDEN)}
    return sorted(place for place in hidden if not any(place != other and other in place.parents for other in hidden))


def _word(text: str, *, of_command: bool = False) -> str:
    """Return a word for a unit's line: quoted if necessary, with systemd's special characters doubled."""
    text = text.replace("%", "%%").replace("$", "$$" if of_command else "$")
    if re.fullmatch(r"[-\w./%$=:@+]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _write(files: Iterable[File], root: Path) -> None:
    for file in files:
        path = root / file.path.lstrip("/")
        if file.kept and path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file.mode), "w", encoding="utf-8") as written:
            os.fchmod(written.fileno(), file.mode)
            written.write(file.text)
        if file.group and root == Path("/"):
            shutil.chown(path, group=file.group)


def _run(line: str) -> None:
    """Run a command. Raises ConfigError where it fails."""
    words = line.split()
    try:
        ran = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("systemd install", f"{words[0]} is not there: this machine has no systemd") from None
    if ran.returncode:
        raise ConfigError("systemd install", f"'{line}' failed: {(ran.stderr or ran.stdout).strip()}")

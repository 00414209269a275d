"""What every command line has in common: `[MODEL] [--config FILE] [--section.key VALUE ...]`.

What `inferengine up` shows: the children's lines with prefixes, and one line of start-up progress below them.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from inferengine import config as configuration
from inferengine.config import Config
from inferengine.errors import ConfigError
from inferengine.process import stdio as output


def resolve(arguments: Sequence[str], *, takes_model: bool = False, options: Sequence[str] = ()) -> Config:
    """The configuration that a command line asks for: flags over environment over file.

    `takes_model` allows one bare word, which becomes `model.path`. `options` are further words that this command
    knows; callers take them out of `arguments` beforehand, they are named here only to be suggested.
    Raises ConfigError for anything that no key, file or model accounts for.
    """
    flags, rest = configuration.parse_flags(arguments)
    file: str | None = None
    models: list[str] = []
    words = iter(rest)
    for word in words:
        if word == "--config" or word.startswith("--config="):
            file = word.partition("=")[2] or next(words, "")
            if not file:
                raise ConfigError("--config", "the name of a TOML file must follow")
        elif word.startswith("-"):
            raise ConfigError(word, f"no such option{_suggestion(word, options)}")
        else:
            models.append(word)
    if models and not takes_model:
        raise ConfigError(models[0], "this command takes no bare word; every flag starts with --section.key")
    if len(models) > 1:
        raise ConfigError(models[1], f"one model at most, and '{models[0]}' was given already")
    if models:
        if "model.path" in flags:
            raise ConfigError("--model.path", f"was given twice: as a flag and as '{models[0]}'")
        flags["model.path"] = models[0]
    return configuration.load(file, flags)


def output_file(option: str, name: str) -> Path:
    """A file that is to be written later: what would keep it from that is said before the work begins. Raises
    ConfigError."""
    path = Path(name)
    if path.is_dir():
        raise ConfigError(option, f"{name} is a folder: name a file")
    if not path.parent.is_dir():
        raise ConfigError(option, f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(option, f"{name} cannot be written")
    return path


def _suggestion(word: str, options: Sequence[str]) -> str:
    name = word.lstrip("-").partition("=")[0]
    keys = [key for key in list(configuration.keys()) if key.rpartition(".")[2] == name]
    if keys:
        return "; did you mean " + " or ".join(f"--{key}" for key in keys) + "?"
    known = [option.lstrip("-") for option in ("--config", "--help", *options)] + list(configuration.keys())
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean --{close[0]}?" if close else "; flags look like --section.key VALUE"


COLOURS = {"engine": "36", "http": "32", "ws": "35", "up": "1"}
BAR_CELLS = 24
SHARE = re.compile(r"(\d{1,3})\s?%")


class Terminal:
    """Writes to one stream. On a terminal progress is one line that moves; elsewhere a line per new phase or quarter.

    With `json_lines` every line of a child is passed on as it is, for collectors that parse it.
    """

    def __init__(self, stream: TextIO, *, json_lines: bool = False, name_width: int = 6) -> None:
        self._stream = stream
        self._moving = stream.isatty() and not json_lines
        self._json_lines = json_lines
        self._name_width = name_width
        self._progress = ""
        self._last_told: dict[str, tuple[str, int]] = {}
        self._last_line: dict[str, str] = {}

    def line(self, name: str, text: str) -> None:
        """A line that a child wrote."""
        self._last_line[name] = text
        self._write(text if self._json_lines else self._prefix(name) + text)

    def notice(self, text: str) -> None:
        """A line of the supervisor's own."""
        self._write(json.dumps({"source": "up", "message": text}) if self._json_lines else self._prefix("up") + text)

    def status(self, name: str, text: str) -> None:
        """A child's new sd_notify status, such as `loading weights 40 %`."""
        if self._moving:
            self._erase()
            self._progress = self._prefix(name) + with_bar(text)
            self._stream.write(self._progress)
            self._stream.flush()
            return
        if self._last_line.get(name, "").endswith(text):
            return  # just written by the child itself
        phase, share = split_share(text)
        told = (phase, (share or 0) // 25)
        if self._last_told.get(name) != told:
            self._last_told[name] = told
            self._write(json.dumps({"source": name, "status": text}) if self._json_lines else self._prefix(name) + text)

    def retry(self) -> bool:
        """Write what could not be written before. Returns whether something still waits."""
        return output.retry()

    def end_progress(self) -> None:
        """Take the moving line away: what it told is over."""
        self._erase()
        self._progress = ""
        self._stream.flush()

    def block(self, text: str) -> None:
        """Several lines without a prefix, for people to read and copy."""
        self.end_progress()
        self._stream.write(text + "\n")
        self._stream.flush()

    def _write(self, text: str) -> None:
        self._erase()
        self._stream.write(text + "\n" + self._progress)
        self._stream.flush()

    def _erase(self) -> None:
        if self._progress:
            self._stream.write("\r\x1b[2K")

    def _prefix(self, name: str) -> str:
        padded = f"{name:<{self._name_width}}"
        return f"\x1b[{COLOURS.get(name, '0')}m{padded} │\x1b[0m " if self._moving else f"{padded} | "


def split_share(text: str) -> tuple[str, int | None]:
    """`loading weights 40 %` → (`loading weights`, 40); without a share (text, None)."""
    found = SHARE.search(text)
    if found is None:
        return text, None
    return (text[: found.start()] + text[found.end() :]).strip(" :,-"), min(100, int(found.group(1)))


def with_bar(text: str) -> str:
    """The text with its share drawn as a bar."""
    phase, share = split_share(text)
    if share is None:
        return text
    filled = BAR_CELLS * share // 100
    return f"{phase:<20} {'█' * filled}{'░' * (BAR_CELLS - filled)} {share:3d} %"

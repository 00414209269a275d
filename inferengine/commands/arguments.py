"""What every command line has in common: `[MODEL] [--config FILE] [--section.key VALUE ...]`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from inferengine import config as configuration
from inferengine.config import Config
from inferengine.errors import ConfigError


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

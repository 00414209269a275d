"""A command of the command line: the options that it declares, the configuration's keys, and its help.

Every command line is `inferengine COMMAND [MODEL] [OPTIONS] [--config FILE] [--section.key VALUE ...]`. A command is a
function that takes `Arguments`; the decorator `command` declares its options and makes its docstring the help text:

    @command(options={"": (Option("--steps N", "how many steps", 20, minimum=1),)})
    def run(arguments: Arguments) -> int:
        \"\"\"Record steps of a running engine.\"\"\"

`output_file` and `connect` are for the commands that write a file or talk to a running engine.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inferengine import config as configuration
from inferengine.config import Config
from inferengine.errors import ConfigError, InferEngineError

if TYPE_CHECKING:  # most commands have no client: they start without pyzmq
    from inferengine.client import Client
    from inferengine.wire.messages import Welcome

HELP_COLUMNS = 110
CONNECT_TIMEOUT_S = 3.0
CONFIGURATION_HELP = (
    ("--config FILE", "TOML file with the configuration"),
    ("--section.key VALUE", "any key of the configuration; --help-all lists them here, 'inferengine config' as TOML"),
)
MOST_USED_KEYS = (
    "model.served_name",
    "model.dtype",
    "model.max_model_len",
    "model.quantization",
    "model.adapters",
    "engine.device",
    "engine.threads",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
    "cache.memory_fraction",
    "cache.dtype",
    "scheduler.policy",
    "speculation.method",
    "speculation.draft_model",
    "http.host",
    "http.port",
    "ws.port",
    "auth.keys_file",
    "log.level",
    "log.format",
)
# Flags of other engines that no key here accounts for → why, and what to do.
NOT_HERE = {
    "model": "the model is a bare word: inferengine up MODEL",
    "pipeline-parallel-size": "layers are divided instead: --engine.tensor_parallel",
    "n-gpu-layers": "a model runs on one device as a whole: --engine.device cuda",
    "trust-remote-code": "code of checkpoints is never run",
}
JSON_SWITCH = "--json"


class Option(NamedTuple):
    """One option of a command.

    `spec` is the flag with the name of its value, as `--rate R`; a flag alone is a switch. The default's type is the
    type of the value unless `kind` names it. Numbers are finite and at least `minimum` (None: any number). A
    `repeated` option takes one or more words, as often as it is given, and its value is the list of them. Of one whose
    value stands in brackets, as `--json [FILE]`, the value may be left out and is `-` then.
    """

    spec: str
    help: str
    default: Any = ""
    kind: type[Any] | None = None
    minimum: float | None = 0
    choices: tuple[str, ...] = ()
    repeated: bool = False

    @property
    def flag(self) -> str:
        """The flag with its dashes."""
        return self.spec.partition(" ")[0]

    @property
    def name(self) -> str:
        """The key of its value in `Arguments.values`."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return " " not in self.spec

    @property
    def may_stand_alone(self) -> bool:
        """Whether its value may be left out."""
        return " [" in self.spec

    def convert(self, text: str) -> Any:
        """Return the value of one word. Raises ConfigError that names the flag."""
        kind = self.kind or (str if self.repeated else type(self.default))
        if kind is str:
            if self.choices and text not in self.choices:
                raise ConfigError(self.flag, f"must be one of {', '.join(self.choices)}; got '{text}'")
            return text
        try:
            value: int | float = int(text) if kind is int else float(text)
            is_finite = math.isfinite(value)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ConfigError(self.flag, f"must be {wanted}; got '{text}'") from None
        except OverflowError:  # an integer that is too large for a float
            is_finite = False
        if not is_finite or (self.minimum == 0 and value < 0):
            raise ConfigError(self.flag, "must be neither negative nor infinite")
        if self.minimum is not None and value < self.minimum:
            raise ConfigError(self.flag, f"must be at least {self.minimum:g}")
        return value


class Arguments:
    """A command line as it was understood.

    `values` has every option of the command by name, `given` the names of those that the command line has. `read`
    reads the configuration from where it comes from; it raises ConfigError.
    """

    def __init__(self, values: Mapping[str, Any], given: frozenset[str], read: Callable[[], Config]) -> None:
        self.values = values
        self.given = given
        self.read = read

    @cached_property
    def config(self) -> Config:
        """The configuration as it was when first asked for. Raises ConfigError."""
        return self.read()


class Command:
    """A function with the declaration of its command line. Calling it with words parses them and runs the function."""

    def __init__(
        self,
        function: Callable[[Arguments], int],
        options: Mapping[str, Sequence[Option]],
        *,
        usage: Sequence[str],
        takes_model: bool,
        takes_configuration: bool,
        reads_late: bool,
        sections: Sequence[str],
        lists_keys: bool,
    ) -> None:
        self._function = function
        self._groups = options
        self._options = {option.flag: option for group in options.values() for option in group}
        self._usage = usage
        self._takes_model = takes_model
        self._takes_configuration = takes_configuration
        self._reads_late = reads_late
        self._sections = sections
        self._lists_keys = lists_keys

    def __call__(self, words: Sequence[str]) -> int:
        """Run the command and return its exit code. Raises ConfigError for a word that means nothing."""
        arguments = self.parse(words)
        if not self._reads_late:
            _ = arguments.config
        return self._function(arguments)

    def parse(self, words: Sequence[str]) -> Arguments:
        """Return the values of this command's options. Raises ConfigError that names the word and the remedy.

        Words that are left are for the configuration; `Arguments.config` raises for those that it does not know.
        """
        given, rest = self._take_options(words)
        values: dict[str, Any] = {
            option.name: False if option.is_switch else option.default for option in self._options.values()
        }
        if not self._takes_configuration:
            if rest:
                raise ConfigError(
                    rest[0], f"no such option{suggest(rest[0], list(self._options), or_else='see --help')}"
                )
            return Arguments(values | given, frozenset(given), Config)

        def read() -> Config:
            return resolve(rest, takes_model=self._takes_model, options=list(self._options))

        return Arguments(values | given, frozenset(given), read)

    def _take_options(self, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of this command's own options, and all other words."""
        given: dict[str, Any] = {}
        rest: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            flag, equals, text = word.partition("=")
            option = self._options.get(flag)
            if option is None:
                rest.append(word)
                continue
            if option.is_switch:
                if equals:
                    raise ConfigError(flag, "takes no value")
                given[option.name] = True
                continue
            if not equals and option.may_stand_alone and (not left or left[0].startswith("--")):
                text = "-"
            elif not equals:
                text = left.pop(0) if left else ""
            if not text:
                raise ConfigError(flag, "a value must follow")
            if not option.repeated:
                given[option.name] = option.convert(text)
                continue
            given.setdefault(option.name, []).append(option.convert(text))
            while left and not left[0].startswith("-"):
                given[option.name].append(option.convert(left.pop(0)))
        return given, rest

    @property
    def options(self) -> list[Option]:
        """The options of this command itself."""
        return list(self._options.values())

    @property
    def takes_model(self) -> bool:
        """Whether a bare word is the model."""
        return self._takes_model

    @property
    def takes_configuration(self) -> bool:
        """Whether the keys of the configuration are flags of it."""
        return self._takes_configuration

    def help(self, name: str, *, all_keys: bool = False) -> str:
        """Return the help text of the command under this name; `all_keys`: with every key of the configuration."""
        words = [
            *(["[MODEL]"] if self._takes_model else []),
            *(["[options]"] if self._options else []),
            *(["[--config FILE] [--section.key VALUE ...]"] if self._takes_configuration else []),
        ]
        lines = [f"usage: inferengine {name} {usage}" for usage in self._usage or [" ".join(words)]]
        lines = [lines[0], *(f"       {line.removeprefix('usage: ')}" for line in lines[1:])]
        groups = {
            title: [(option.spec, _with_default(option.help, option.default)) for option in group]
            for title, group in self._groups.items()
        }
        if self._takes_configuration:
            groups["the configuration"] = list(CONFIGURATION_HELP)
        if self._takes_configuration and all_keys:
            groups |= key_groups()
        elif self._sections:
            groups |= key_groups(self._sections)
        elif self._lists_keys:
            groups["the keys most used"] = most_used_keys()
        lines += ["", inspect.cleandoc(self._function.__doc__ or ""), *option_lines(groups)]
        return "\n".join(lines)


def option_lines(groups: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    """Return the options and their meanings as the lines of a help text, in groups under their titles."""
    width = max((len(spec) for group in groups.values() for spec, _ in group), default=0)
    lines: list[str] = []
    for title, group in groups.items():
        lines += ["", title] if title else [""]
        for spec, text in group:
            lines += textwrap.wrap(
                text,
                HELP_COLUMNS,
                initial_indent=f"  {spec:<{width}}  ",
                subsequent_indent=" " * (width + 4),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines


def most_used_keys() -> list[tuple[str, str]]:
    """Return the keys that most installations set, as flags with their meanings."""
    known = configuration.keys()
    return [(f"--{key}", _meaning(known[key])) for key in MOST_USED_KEYS]


def key_groups(sections: Collection[str] | None = None) -> dict[str, list[tuple[str, str]]]:
    """Return the keys of these sections (None: all) as flags with their meanings, under a title for each section."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, item in configuration.keys().items():
        section = key.partition(".")[0]
        if sections is None or section in sections:
            groups.setdefault(f"the configuration's section [{section}]", []).append((f"--{key}", _meaning(item)))
    return groups


def _meaning(item: dataclasses.Field[Any]) -> str:
    """Return the help of a key, with its choices and its default."""
    choices = item.metadata["choices"]
    text = f"{item.metadata['help']}; {configuration.allowed(item)}" if choices else item.metadata["help"]
    return _with_default(text, item.default)


def command(
    options: Mapping[str, Sequence[Option]] | None = None,
    *,
    usage: Sequence[str] = (),
    takes_model: bool = False,
    takes_configuration: bool = True,
    reads_late: bool = False,
    sections: Sequence[str] = (),
    lists_keys: bool = False,
) -> Callable[[Callable[[Arguments], int]], Command]:
    """Declare the command line of a function; its docstring becomes the help text.

    `options` are groups of options under their headings. `usage` replaces what follows the command's name in the usage
    lines. `takes_model` allows one bare word, which becomes `model.path`. With `reads_late` `Arguments.config`
    raises the errors of the configuration, inside the function. `sections` of the configuration are listed in the help;
    with `lists_keys` the keys most used.
    """

    def declare(function: Callable[[Arguments], int]) -> Command:
        return Command(
            function,
            options or {},
            usage=usage,
            takes_model=takes_model,
            takes_configuration=takes_configuration,
            reads_late=reads_late,
            sections=sections,
            lists_keys=lists_keys,
        )

    return declare


def resolve(words: Sequence[str], *, takes_model: bool = False, options: Sequence[str] = ()) -> Config:
    """Return the configuration that a command line asks for: flags over environment over file.

    `takes_model` allows one bare word, which becomes `model.path`. `options` are flags of the command, only to be
    suggested. Raises ConfigError for anything that no key, file or model accounts for.
    """
    flags, rest = configuration.parse_flags(words)
    file: str | None = None
    models: list[str] = []
    left = iter(rest)
    for word in left:
        if word == "--config" or word.startswith("--config="):
            file = word.partition("=")[2] or next(left, "")
            if not file:
                raise ConfigError("--config", "the name of a TOML file must follow")
        elif word.startswith("-"):
            known = ["--config", "--help", "--help-all", *options, *(f"--{key}" for key in list(configuration.keys()))]
            raise ConfigError(
                word, f"no such option{suggest(word, known, or_else='flags look like --section.key VALUE')}"
            )
        else:
            models.append(word)
    if models and not takes_model:
        raise ConfigError(models[0], "this command takes no bare word; flags look like --section.key VALUE")
    if len(models) > 1:
        raise ConfigError(models[1], f"one model at most, and '{models[0]}' was given already")
    if models:
        if "model.path" in flags:
            raise ConfigError("--model.path", f"was given twice: as a flag and as '{models[0]}'")
        flags["model.path"] = models[0]
    return configuration.load(file, flags)


JSON_LOG = Option("--json", "log as JSON lines: --log.format json")


def log_as_json(arguments: Arguments) -> Config:
    """Return the configuration of a service that logs as its flag JSON_LOG says. Raises ConfigError."""
    config = arguments.config
    return config.with_values(log={"format": "json"}) if arguments.values["json"] else config


def output_file(option: str, name: str) -> Path:
    """Return the path of a file that a command writes at its end. Raises ConfigError at once where it could not be
    written."""
    path = Path(name)
    if path.is_dir():
        raise ConfigError(option, f"{name} is a folder: name a file")
    if not path.parent.is_dir():
        raise ConfigError(option, f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(option, f"{name} cannot be written")
    return path


def connect(client: Client) -> Welcome:
    """Wait for the engine's WELCOME. Raises engine_unavailable, which names the address."""
    try:
        return client.connect(CONNECT_TIMEOUT_S)
    except InferEngineError as error:
        message = f"No engine answers at {client.address}: 'inferengine check' looks for the reason."
        raise InferEngineError(error.code, message) from None


def suggest(word: str, known: Sequence[str], *, or_else: str) -> str:
    """Return the end of a message about an unknown flag: the flags that may have been meant, or `or_else`."""
    flag = word.partition("=")[0].replace("_", "-") if "." not in word else word.partition("=")[0]
    if flag.lstrip("-") in NOT_HERE:
        return f"; {NOT_HERE[flag.lstrip('-')]}"
    options = difflib.get_close_matches(flag, [name for name in known if "." not in name], n=1, cutoff=0.7)
    keys = [f"--{key}" for key in configuration.nearest(flag, [name[2:] for name in known if "." in name])]
    close = options or keys
    return f"; did you mean {' or '.join(close)}?" if close else f"; {or_else}"


def _with_default(text: str, default: Any) -> str:
    if isinstance(default, bool):
        return f"{text} (default {str(default).lower()})" if default else text
    return f"{text} (default {default})" if default not in ("", 0, None, ()) else text

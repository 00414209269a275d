"""`inferengine completion`: scripts that complete commands, flags and values in bash, zsh and fish.

They are made of the table of commands and the configuration's keys, so they know what this version knows.
"""

from __future__ import annotations

import importlib
import shlex
from typing import NamedTuple

from inferengine import config as configuration
from inferengine.cli.command import CONFIGURATION_HELP, Arguments, Command, Option, command
from inferengine.config.model_path import NAMES
from inferengine.errors import ConfigError, ExitCode

SHELLS = ("bash", "zsh", "fish")


class Flag(NamedTuple):
    """A flag, what it means, and its values: a list of them, files, or any word."""

    name: str
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    is_file: bool = False


class CompletedCommand(NamedTuple):
    """A command with its flags. `own` are those of its own, beside the configuration's."""

    name: str
    summary: str
    own: list[Flag]
    takes_model: bool
    takes_configuration: bool


@command(usage=("bash | zsh | fish",), takes_model=True)
def run(arguments: Arguments) -> int:
    """Print a script that completes commands, flags, models and values for bash, zsh or fish.

    Keep it where the shell looks for it:

      bash   inferengine completion bash > ~/.local/share/bash-completion/completions/inferengine
      zsh    inferengine completion zsh > "${fpath[1]}/_inferengine"
      fish   inferengine completion fish > ~/.config/fish/completions/inferengine.fish
    """
    shell = arguments.config.model.path
    if shell not in SHELLS:
        raise ConfigError("SHELL", f"must be one of {', '.join(SHELLS)}; got '{shell}'")
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](commands(), configuration_flags()), end="")
    return ExitCode.OK


def commands() -> list[CompletedCommand]:
    """Return every command as its module declares it; one of two words adds its flags to that of the first."""
    from inferengine.cli.main import COMMANDS

    found: list[CompletedCommand] = []
    for name, entry in COMMANDS.items():
        declared: Command = getattr(importlib.import_module(f"inferengine.cli.{entry.module}"), entry.function)
        own = [_flag_of(option) for option in declared.options] + [Flag("--help", "explain the command", False)]
        first, _, second = name.partition(" ")
        if second:
            (of_first,) = (each for each in found if each.name == first)
            of_first.own.extend(flag for flag in own if flag.name not in {known.name for known in of_first.own})
            continue
        found.append(CompletedCommand(name, entry.summary, own, declared.takes_model, declared.takes_configuration))
    return found


def configuration_flags() -> list[Flag]:
    """Return the flags of the configuration: --config and every key."""
    config_file = Flag("--config", CONFIGURATION_HELP[0][1], True, is_file=True)
    return [config_file, Flag("--help-all", "explain the command and every key", False)] + [
        Flag(
            f"--{key}",
            item.metadata["help"],
            True,
            ("true", "false") if item.type == "bool" else tuple(map(str, item.metadata["choices"])),
            any(word in key for word in ("file", "folder", "path", "certificate", "tls_key", "uds")),
        )
        for key, item in configuration.keys().items()
    ]


def _flag_of(option: Option) -> Flag:
    is_file = any(word in option.spec for word in ("FILE", "FOLDER"))
    return Flag(option.flag, option.help, not option.is_switch, option.choices, is_file)


def bash(known: list[CompletedCommand], keys: list[Flag]) -> str:
    """Return a bash completion script."""
    lines = [
        "# Completion of inferengine for bash. Written by `inferengine completion bash`.",
        "_inferengine() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words="" models=""',
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" = 1 ]; then',
        f"        words={_quoted([each.name for each in known] + ['--help', '--help-all', '--version'])}",
        '        COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "        return",
        "    fi",
        '    case "$previous" in',
    ]
    for names, choices in _values([*keys, *(flag for each in known for flag in each.own)]):
        lines.append(
            f'        {"|".join(names)}) COMPREPLY=($(compgen -W {_quoted(choices)} -- "$current")); return ;;'
        )
    files = sorted({flag.name for flag in [*keys, *(flag for each in known for flag in each.own)] if flag.is_file})
    lines += [
        f'        {"|".join(files)}) COMPREPLY=($(compgen -f -- "$current")); return ;;',
        "    esac",
        f"    local keys={_quoted([flag.name for flag in keys])}",
        '    case "${COMP_WORDS[1]}" in',
    ]
    for each in known:
        models = f" models={_quoted(_bare_words(each))}" if each.takes_model else ""
        own = " ".join(flag.name for flag in each.own)
        lines.append(f'        {each.name}) words="{own}{" $keys" if each.takes_configuration else ""}"{models} ;;')
    lines += [
        "    esac",
        '    if [[ "$current" == -* ]]; then',
        '        COMPREPLY=($(compgen -W "$words" -- "$current"))',
        '    elif [ -n "$models" ]; then',
        '        COMPREPLY=($(compgen -W "$models" -- "$current") $(compgen -d -- "$current"))',
        "    fi",
        "}",
        "complete -o filenames -F _inferengine inferengine",
    ]
    return "\n".join(lines) + "\n"


def zsh(known: list[CompletedCommand], keys: list[Flag]) -> str:
    """Return a zsh completion function."""
    lines = [
        "#compdef inferengine",
        "# Completion of inferengine for zsh. Written by `inferengine completion zsh`.",
        "_inferengine() {",
        "    local -a commands flags keys models",
        f"    commands=({' '.join(_described(each.name, each.summary) for each in known)})",
        "    if (( CURRENT == 2 )); then",
        "        _describe -t commands command commands",
        "        compadd -- --help --help-all --version",
        "        return",
        "    fi",
        '    case "${words[CURRENT-1]}" in',
    ]
    for names, choices in _values([*keys, *(flag for each in known for flag in each.own)]):
        lines.append(f"        {'|'.join(names)}) compadd -- {' '.join(map(shlex.quote, choices))}; return ;;")
    files = sorted({flag.name for flag in [*keys, *(flag for each in known for flag in each.own)] if flag.is_file})
    lines += [
        f"        {'|'.join(files)}) _files; return ;;",
        "    esac",
        f"    keys=({' '.join(_described(flag.name, flag.help) for flag in keys)})",
        '    case "${words[2]}" in',
    ]
    for each in known:
        own = " ".join(_described(flag.name, flag.help) for flag in each.own)
        both = f'{own} "${{keys[@]}}"' if each.takes_configuration else own
        models = f"; models=({' '.join(_bare_words(each))})" if each.takes_model else ""
        lines.append(f"        {each.name}) flags=({both}){models} ;;")
    lines += [
        "    esac",
        '    if [[ "${words[CURRENT]}" == -* ]]; then',
        "        _describe -t flags flag flags",
        "    else",
        "        (( ${#models} )) && compadd -- $models",
        "        _files",
        "    fi",
        "}",
        'if [ "$funcstack[1]" = "_inferengine" ]; then _inferengine "$@"; else compdef _inferengine inferengine; fi',
    ]
    return "\n".join(lines) + "\n"


def fish(known: list[CompletedCommand], keys: list[Flag]) -> str:
    """Fish completions."""
    lines = [
        "# Completion of inferengine for fish. Written by `inferengine completion fish`.",
        "complete -c inferengine -f",
        "complete -c inferengine -n __fish_use_subcommand -l help -d 'explain the commands'",
        "complete -c inferengine -n __fish_use_subcommand -l version -d 'print the version'",
    ]
    lines += [
        f"complete -c inferengine -n __fish_use_subcommand -a {each.name} -d {_fish_quoted(each.summary)}"
        for each in known
    ]
    for each in known:
        when = f"-n '__fish_seen_subcommand_from {each.name}'"
        lines += [_fish_flag(when, flag) for flag in each.own]
        if each.takes_model:
            lines.append(f"complete -c inferengine {when} -a {_fish_quoted(' '.join(_bare_words(each)))}")
        if each.takes_model and each.name != "completion":
            lines.append(f"complete -c inferengine {when} -F")
    configured = " ".join(each.name for each in known if each.takes_configuration)
    lines += [_fish_flag(f"-n '__fish_seen_subcommand_from {configured}'", flag) for flag in keys]
    return "\n".join(lines) + "\n"


def _fish_flag(when: str, flag: Flag) -> str:
    value = f" -x -a {_fish_quoted(' '.join(flag.choices))}" if flag.choices else " -r -F" if flag.is_file else " -x"
    name = flag.name.removeprefix("--")
    return f"complete -c inferengine {when} -l {name}{value if flag.takes_value else ''} -d {_fish_quoted(flag.help)}"


def _values(flags: list[Flag]) -> list[tuple[list[str], tuple[str, ...]]]:
    """Return the flags that take one of some values, those with equal values together."""
    of: dict[tuple[str, ...], list[str]] = {}
    for flag in flags:
        if flag.choices and flag.name not in of.setdefault(flag.choices, []):
            of[flag.choices].append(flag.name)
    return [(names, choices) for choices, names in of.items()]


def _bare_words(of: CompletedCommand) -> list[str]:
    return list(SHELLS) if of.name == "completion" else list(NAMES)


def _quoted(words: list[str] | tuple[str, ...]) -> str:
    return shlex.quote(" ".join(words))


def _described(name: str, text: str) -> str:
    """Return a word for zsh's _describe."""
    return shlex.quote(f"{name}:{text}")


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

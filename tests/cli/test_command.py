"""The one parser of all commands: options, switches, repeated options, and the help made of their declaration."""

from __future__ import annotations

import pytest

from inferengine.cli.command import Arguments, Command, Option, command
from inferengine.errors import ConfigError

OPTIONS = {
    "options": (
        Option("--steps N", "how many", 20, minimum=1),
        Option("--rate R", "requests per second", 1.5),
        Option("--shift N", "any number", None, kind=int, minimum=None),
        Option("--shape KIND", "one of two", "round", choices=("round", "flat")),
        Option("--quiet", "say less"),
        Option("--fail T", "any number of times", (), repeated=True),
    )
}


def make_command(**declaration: bool) -> Command:
    @command(OPTIONS, sections=("auth",), **declaration)
    def run(arguments: Arguments) -> int:
        """Do what the test does."""
        return len(arguments.given)

    return run


def test_options_without_words_have_their_defaults() -> None:
    arguments = make_command().parse([])
    assert arguments.values == {
        "steps": 20,
        "rate": 1.5,
        "shift": None,
        "shape": "round",
        "quiet": False,
        "fail": (),
    }
    assert arguments.given == frozenset()


def test_values_follow_as_a_word_or_after_an_equals_sign() -> None:
    values = make_command().parse(["--steps", "3", "--rate=2", "--shift=-4", "--quiet", "--shape", "flat"]).values
    assert (values["steps"], values["rate"], values["shift"], values["quiet"], values["shape"]) == (
        3,
        2.0,
        -4,
        True,
        "flat",
    )


def test_a_repeated_option_collects_the_words_of_every_occurrence() -> None:
    values = make_command().parse(["--fail", "1", "2", "--quiet", "--fail=3"]).values
    assert values["fail"] == ["1", "2", "3"]


def test_options_of_the_command_stand_between_those_of_the_configuration() -> None:
    arguments = make_command().parse(["--http.port", "1", "--steps", "2", "--ws.port=3"])
    assert (arguments.config.http.port, arguments.values["steps"], arguments.config.ws.port) == (1, 2, 3)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--steps"], "--steps: a value must follow"),
        (["--steps="], "--steps: a value must follow"),
        (["--steps", "1.5"], "--steps: must be a whole number; got '1.5'"),
        (["--steps", "0"], "--steps: must be at least 1"),
        (["--rate", "-1"], "--rate: must be neither negative nor infinite"),
        (["--rate", "nan"], "--rate: must be neither negative nor infinite"),
        (["--steps", "1" * 400], "--steps: must be neither negative nor infinite"),
        (["--shift", "1" * 400], "--shift: must be neither negative nor infinite"),
        (["--shape", "square"], "--shape: must be one of round, flat; got 'square'"),
        (["--quiet=yes"], "--quiet: takes no value"),
    ],
)
def test_a_bad_value_names_the_option(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_command().parse(words)


@pytest.mark.parametrize("takes_configuration", [True, False])
def test_an_unknown_option_suggests_the_nearest(takes_configuration: bool) -> None:
    with pytest.raises(ConfigError, match="--step: no such option; did you mean --steps"):
        make_command(takes_configuration=takes_configuration)(["--step", "3"])


def test_a_command_that_reads_late_runs_before_the_configuration_is_checked() -> None:
    assert make_command(reads_late=True)(["--quiet", "--no.such", "1"]) == 1
    with pytest.raises(ConfigError, match=r"--no\.such: no such key"):
        make_command()(["--no.such", "1"])


def test_the_help_has_the_docstring_the_options_and_the_keys_of_the_sections() -> None:
    text = make_command().help("try")
    assert text.startswith("usage: inferengine try [options] [--config FILE] [--section.key VALUE ...]\n")
    assert "Do what the test does." in text
    assert "--steps N" in text
    assert "how many (default 20)" in text
    assert "--auth.keys_file" in text

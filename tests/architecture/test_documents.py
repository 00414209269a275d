"""What the documents say about the code is read off the code."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inferengine import config
from inferengine.cli import main as cli
from inferengine.errors import KINDS, ExitCode
from inferengine.sampling_params import NAMES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_reference_is_up_to_date() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "configuration_reference"), "--check"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_local_link_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_and_command_that_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    keys = config.keys()
    flags = set(re.findall(r"--([a-z]+\.[a-z_]+)", text))
    assert [flag for flag in flags if flag not in keys] == []
    commands = set(re.findall(r"[`/ ]inferengine ([a-z][a-z-]+)\b(?= |`)", text)) - {"is", "may"}
    assert [command for command in commands if command not in cli.COMMANDS] == []


def test_every_sampling_parameter_has_its_line_and_every_test_named_there_exists() -> None:
    text = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| `(\w+)` \|(.*)$", text, re.MULTILINE))
    names = {"bad_words_ids": "bad_words"}  # words in HTTP, their tokens on the wire
    assert "`bad_words_ids`" in text
    assert [name for item in NAMES if (name := names.get(item, item)) not in lines] == []
    assert [name for name, line in lines.items() if len(line.split(" | ")) < 3] == []  # definition, range, test
    for file, function in re.findall(r"`(test_\w+)\.py: (\w+)`", text):
        sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(f"{file}.py")]
        assert any(f"def {function}(" in source for source in sources), (file, function)


def test_every_key_that_operations_names_exists() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    sections = {name.partition(".")[0] for name in list(config.keys())}
    named = {word for word in re.findall(r"`([a-z]+\.[a-z_]+)", text) if word.partition(".")[0] in sections}
    assert named
    assert [word for word in named if word not in config.keys() and not word.endswith(".target")] == []  # noqa: SIM118


def test_operations_lists_every_exit_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    table = text[text.index("## Exit codes") : text.index("## Signals")]
    listed = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert listed == {value for name, value in vars(ExitCode).items() if name.isupper()}


def test_error_codes_named_in_operations_exist() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[45]\d\d `([a-z_]+)`", text))
    assert named
    assert named <= set(KINDS)


def test_every_module_and_function_on_the_path_of_a_request_exists() -> None:
    """A name is written `module`, `module:function` or `module:Class.method`."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    path = text[text.index("## The path of a request") : text.index("## Glossary")]
    names = re.findall(r"`((?:inferengine|frontends)[.a-z_]+)(?::([A-Za-z_.]+))?`", path)
    assert len(names) > 15
    for module, attribute in names:
        found = importlib.import_module(module)
        for name in attribute.split(".") if attribute else []:
            assert hasattr(found, name), f"CONTRIBUTING.md names {module}:{attribute}"
            found = getattr(found, name)


def test_every_folder_of_the_map_exists_and_every_folder_is_on_it() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("## Map") : text.index("## The path of a request")]
    first_cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    named = {name.rstrip("/").removeprefix("inferengine/") for name in re.findall(r"`([a-z_/]+/)`", first_cells)}
    there = {path.name for path in (ROOT / "inferengine").iterdir() if (path / "__init__.py").exists()}
    assert there - named == set()
    assert [name for name in named if not (ROOT / name).is_dir() and not (ROOT / "inferengine" / name).is_dir()] == []


def test_every_file_that_a_how_to_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    how_to = text[text.index("## How to") :]
    files = set(re.findall(r"`([a-z_]+/[a-z_/0-9]+\.(?:py|md))`", how_to))
    assert len(files) > 15
    assert [name for name in files if not (ROOT / name).exists() and not (ROOT / "inferengine" / name).exists()] == []


@pytest.mark.parametrize("package", ["inferengine", "frontends"])
def test_every_file_that_is_no_code_is_packaged_too(package: str) -> None:
    """What an installed copy would lack: a checkout has every file, a wheel only those that pyproject.toml names."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][package]
    packaged = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
    there = {path for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert sorted(str(path.relative_to(ROOT)) for path in there - packaged) == []

"""What the documents say about the code is read off the code."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inferengine import config
from inferengine.cli import main as cli
from inferengine.cli.command import Command
from inferengine.errors import KINDS, ExitCode
from inferengine.sampling_params import NAMES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "cli.md"),  # that is made of --help
    ROOT / "inferengine" / "wire" / "PROTOCOL.md",
]
BASES = [ROOT, *(ROOT / "inferengine" / part for part in ("", "engine", "executor")), ROOT / "frontends"]  # of paths
EXAMPLES = {
    ".../clients.toml",
    "gauntlet-found/3.json",
    "inferengine/models/families/NAME.py",
    "site/",
}  # files that the reader makes
OLD_NAMES = {"engine/link", "engine/outbox", "executor/speculation"}  # in the changelog


def commands_of(document: Path) -> list[str]:
    """Return what stands between backticks: each line of a block, and each span."""
    fence = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
    text = document.read_text(encoding="utf-8")
    lines = [line for block in fence.findall(text) for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", fence.sub("", text))]
    return [part.strip() for line in [*lines, *spans] for part in re.split(r"\s(?:#|\||&&)\s", line)]


def module_file(name: str) -> Path | None:
    """Return the file that `python -m NAME` runs; None: there is none."""
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{name}.__main__")
    return Path(found.origin) if found is not None and found.origin else None


def program_text(path: Path, seen: set[Path]) -> str:
    """Return the source of a program and of the modules of this repository's tools that it uses."""
    if path in seen or not path.is_file():
        return ""
    seen.add(path)
    text = path.read_text(encoding="utf-8")
    used = [
        ROOT / f"{name.replace('.', '/')}/__main__.py" for name in re.findall(r"-m ((?:tests|benchmarks)[.\w]*)", text)
    ]
    used += [ROOT / f"{name.replace('.', '/')}.py" for name in re.findall(r"-m ((?:tests|benchmarks)[.\w]*)", text)]
    if "python" in text[:40] or path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom):
                continue
            module = node.module or ""
            if node.level or module.partition(".")[0] in ("benchmarks", "scripts", "tests"):
                folder = path.parents[node.level - 1] if node.level else ROOT
                place = folder / module.replace(".", "/")
                used += [place.with_suffix(".py"), *(place / f"{name.name}.py" for name in node.names)]
    return text + "".join(program_text(each, seen) for each in used)


def test_the_configuration_reference_is_up_to_date() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "configuration_reference"), "--check"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_the_model_reference_is_up_to_date() -> None:
    program = [sys.executable, str(ROOT / "scripts" / "model_reference"), "--check"]
    assert subprocess.run(program, check=False).returncode == 0, "run scripts/model_reference"


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_module_that_is_run_exists(document: Path) -> None:
    named = {name for text in commands_of(document) for name in re.findall(r"\bpython3? -m ([.\w]+)", text)}
    assert [name for name in named if module_file(name) is None] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_option_of_a_command_exists(document: Path) -> None:
    """Of a script or a module it is looked for in its source, and in those of the tools that it imports."""
    missing = []
    for text in commands_of(document):
        run = re.search(
            r"\bpython3? -m ((?:benchmarks|tests)[.\w]*)|\bscripts/([-.\w]+)"
            r"|\binferengine ([a-z][a-z-]+(?: [a-z][a-z0-9]*)?)",
            text,
        )
        if run is None:
            continue
        module, script, name = run.groups()
        if name is not None and name not in cli.COMMANDS:  # of two words only some are commands
            name = name.partition(" ")[0]
        if name is not None and name not in cli.COMMANDS:
            continue
        if name is not None:
            entry = cli.COMMANDS[name]
            command: Command = getattr(importlib.import_module(f"inferengine.cli.{entry.module}"), entry.function)
            known = command.help(name) + " --help"
        else:
            file = module_file(module) if module is not None else ROOT / "scripts" / script
            known = program_text(file, set()) if file is not None else ""
        options = re.findall(r"(?<![-\w])(--[a-z][-a-z0-9]*)(?![-.\w])", text[run.end() :])
        missing += [(text, option) for option in options if not re.search(rf"{option}(?![-.\w])", known)]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_command_with_options_has_those_that_its_program_requires(document: Path) -> None:
    missing = []
    for text in commands_of(document):
        run = re.match(r"python -m (benchmarks\.[\w.]+) .*?--", text)
        file = module_file(run[1]) if run is not None else None
        program = "" if file is None else file.read_text(encoding="utf-8")
        if "add_subparsers" not in program:
            required = re.findall(r'add_argument\("(--[-a-z]+)"[^\n]*\brequired=True', program)
            missing += [(text, option) for option in required if not re.search(rf"{option}(?![-\w])", text)]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_that_is_named_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    files = re.findall(
        r"(?<![-\w./:])((?:[-\w.]+/)+[-\w.]+\.(?:py|jsonl?|md|toml|ya?ml|m?js|ts|svg|service|socket))\b", text
    )
    folders = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]*)`", text)
    named = {*files, *folders} - EXAMPLES - (OLD_NAMES if document.name == "CHANGELOG.md" else set())
    bases = [*BASES, document.parent, ROOT / "tests"]
    absent = [
        name for name in named if not any((base / name).exists() or (base / f"{name}.py").exists() for base in bases)
    ]
    assert [name for name in absent if not re.search(r"(?:^|/)\d+/|-N\.", name)] == []  # a port; one of several


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

"""The rules of the house, read off the syntax tree. Each rule takes files and returns what breaks it, one line each.

Knows nothing about pytest: test_house.py applies the rules to this repository, test_rules_bite.py to small
counterexamples.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.architecture.layers import HEAVY, LAYERS, LIGHT_PARTS, RUNTIME_DOORS

CLOCKS = {"time", "datetime", "random", "secrets", "uuid"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_ATTRIBUTES = {("torch", "load"), ("os", "system"), ("os", "popen")}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj"}
UNSAFE_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}
REQUEST_TYPE = "inferengine.core.sequence.Request"
REQUEST_MAKERS = ("inferengine.engine.io.intake",)


class Source(NamedTuple):
    """One Python file under its dotted module name."""

    module: str
    tree: ast.Module
    is_package: bool = False


class Import(NamedTuple):
    """One imported name: `module` is what is loaded, `name` what is taken from it ("" for the module itself)."""

    module: str
    name: str
    line: int
    inside_function: bool


def parse(module: str, text: str, *, is_package: bool = False) -> Source:
    return Source(module, ast.parse(text), is_package)


def read_tree(root: Path, *packages: str) -> list[Source]:
    """Return every Python file of these packages under `root`."""
    sources: list[Source] = []
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            sources.append(parse(module, path.read_text(encoding="utf-8"), is_package=is_package))
    return sources


def imports(source: Source) -> list[Import]:
    """Return everything that the file imports, relative imports resolved, `if TYPE_CHECKING` included."""
    found: list[Import] = []
    for node, inside in _walk(source.tree, False):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, "", node.lineno, inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(source, node)
            found += [Import(module, alias.name, node.lineno, inside) for alias in node.names]
    return found


def broken_layers(sources: Iterable[Source]) -> list[str]:
    """Return imports that run up or sideways."""
    sources = list(sources)
    known = {source.module for source in sources}
    broken: list[str] = []
    for source in sources:
        part = _part(source.module)
        for item in imports(source):
            target = _target(item, known)
            if target.split(".")[0] not in ("inferengine", "frontends"):
                continue
            other = _part(target)
            if other != part and other not in LAYERS[part] and not _covered(other, LAYERS[part]):
                broken.append(f"{source.module}:{item.line} imports {target}: {part} may not import {other}")
    return broken


def heavy_imports(sources: Iterable[Source]) -> list[str]:
    """Return imports of torch, triton or transformers where a process must stay light, and the runtime outside its
    doors."""
    broken: list[str] = []
    for source in sources:
        if not _under(source.module, LIGHT_PARTS):
            continue
        for item in imports(source):
            if item.inside_function and _under(source.module, RUNTIME_DOORS):
                continue
            if item.module.split(".")[0] in HEAVY:
                broken.append(f"{source.module}:{item.line} imports {item.module}")
            elif _under(item.module, ("inferengine.executor", "inferengine.models")):
                broken.append(
                    f"{source.module}:{item.line} imports {item.module} outside a function of {RUNTIME_DOORS}"
                )
    return broken


def cycles(sources: Iterable[Source]) -> list[str]:
    """Return groups of modules that import each other, lazy imports included."""
    sources = list(sources)
    known = {source.module for source in sources}
    graph: dict[str, set[str]] = {source.module: set() for source in sources}
    for source in sources:
        graph[source.module] = {
            target for item in imports(source) if (target := _target(item, known)) in known and target != source.module
        }
    return [" <-> ".join(sorted(group)) for group in _strongly_connected(graph) if len(group) > 1]


def clocks_in_core(sources: Iterable[Source]) -> list[str]:
    """Return uses of clocks and chance in the core: both are injected."""
    return [
        f"{source.module}:{item.line} imports {item.module}"
        for source in sources
        if _under(source.module, ("inferengine.core", "inferengine.engine.core"))
        for item in imports(source)
        if item.module.split(".")[0] in CLOCKS
    ]


def environment_reads(sources: Iterable[Source]) -> list[str]:
    """Return reads of the process's environment outside environment.py."""
    names = {"environ", "environb", "getenv", "putenv"}
    broken: list[str] = []
    for source in sources:
        if source.module == "inferengine.config.environment":
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in names and _is_name(node.value, "os"):
                broken.append(f"{source.module}:{node.lineno} reads os.{node.attr}")
        broken += [
            f"{source.module}:{item.line} imports os.{item.name}"
            for item in imports(source)
            if item.module == "os" and item.name in names
        ]
    return broken


def unsafe_code(sources: Iterable[Source]) -> list[str]:
    """Return what turns bytes into code: pickle and its kin, eval, exec, torch.load, a shell."""
    broken: list[str] = []
    for source in sources:
        where = source.module
        broken += [
            f"{where}:{item.line} imports {item.module}"
            for item in imports(source)
            if item.module.split(".")[0] in UNSAFE_MODULES or (item.module, item.name) in UNSAFE_ATTRIBUTES
        ]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in UNSAFE_ATTRIBUTES:
                    broken.append(f"{where}:{node.lineno} uses {node.value.id}.{node.attr}")
                elif node.attr in UNSAFE_METHODS:
                    broken.append(f"{where}:{node.lineno} uses {node.attr}")
            elif isinstance(node, ast.Call):
                if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
                    broken.append(f"{where}:{node.lineno} calls {node.func.id}")
                broken += [
                    f"{where}:{node.lineno} passes {keyword.arg}=True"
                    for keyword in node.keywords
                    if keyword.arg in UNSAFE_KEYWORDS
                    and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)
                ]
    return broken


def requests_made_elsewhere(sources: Iterable[Source]) -> list[str]:
    """Return requests made elsewhere: only engine.io.intake turns a wire message into a core Request: no other file
    that knows the wire makes one."""
    broken: list[str] = []
    for source in sources:
        items = imports(source)
        if _under(source.module, REQUEST_MAKERS) or not any(
            _under(item.module, ("inferengine.wire",)) for item in items
        ):
            continue
        if not any(f"{item.module}.{item.name}" == REQUEST_TYPE for item in items):
            continue
        broken += [
            f"{source.module}:{node.lineno} makes a core Request beside the wire"
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and _is_name(node.func, "Request")
        ]
    return broken


def missing_docstrings(sources: Iterable[Source]) -> list[str]:
    """Return public modules that do not say what they are. An empty __init__ has nothing to say."""
    return [
        source.module
        for source in sources
        if source.tree.body
        and not source.module.rpartition(".")[2].startswith("_")
        and not ast.get_docstring(source.tree)
    ]


def missing_public_docstrings(sources: Iterable[Source]) -> list[str]:
    """Return public classes, functions and methods of public classes without a docstring."""
    return [
        f"{source.module}:{node.lineno} {node.name}"
        for source in sources
        for node in _public_definitions(source.tree)
        if not ast.get_docstring(node)
    ]


NO_VERBS = {"A", "An", "As", "Each", "Every", "How", "Its", "Of", "The", "What", "Whether", "Where"}


def docstrings_without_verb(sources: Iterable[Source]) -> list[str]:
    """Return functions whose docstring begins as a noun does, and not with what the function does.

    Properties are read as values. Kernels' sources are left out: their hash names measured tables.
    """
    return [
        f"{source.module}:{node.lineno} {node.name}: {docstring.splitlines()[0]}"
        for source in sources
        if not source.module.startswith("inferengine.kernels.cuda.")
        for node in _functions(source)
        if (docstring := ast.get_docstring(node))
        and docstring.split(maxsplit=1)[0] in NO_VERBS
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def repeated_file_names(sources: Iterable[Source], allowed: Mapping[str, set[str]]) -> list[str]:
    """Return modules of one part of the tree that share a file name. `allowed`: names by part that may be shared."""
    places: dict[tuple[str, str], list[str]] = {}
    for source in sources:
        if not source.is_package:
            places.setdefault((_part(source.module), source.module.rpartition(".")[2]), []).append(source.module)
    return [
        f"{name}: {', '.join(modules)}"
        for (part, name), modules in places.items()
        if len(modules) > 1 and name not in allowed.get(part, ())
    ]


def repeated_class_names(sources: Iterable[Source], allowed: Mapping[str, set[str]]) -> list[str]:
    """Return public classes of one part of the tree that share a name. `allowed`: names by part that may be shared."""
    places: dict[tuple[str, str], list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault((_part(source.module), node.name), []).append(source.module)
    return [
        f"{name}: {', '.join(modules)}"
        for (part, name), modules in places.items()
        if len(modules) > 1 and name not in allowed.get(part, ())
    ]


def crowded_folders(sources: Iterable[Source], limit: int) -> list[str]:
    """Return packages below the top level with more than `limit` modules and packages."""
    entries: dict[str, set[str]] = {}
    for source in sources:
        package, _, name = source.module.rpartition(".")
        if "." in package and not name.startswith("__"):
            entries.setdefault(package, set()).add(name)
    return [f"{package} has {len(names)} entries" for package, names in entries.items() if len(names) > limit]


def tests_that_cannot_fail(sources: Iterable[Source]) -> list[str]:
    """Test functions without an assert, `pytest.raises`, or a call to a helper that checks: one named for it, or one of
    the same file or imported from another of `sources` that can fail itself."""
    sources = list(sources)
    checking = {(source.module, node.name) for source in sources for node in _helpers(source) if _can_fail(node, set())}
    toothless: list[str] = []
    for source in sources:
        known = {name for module, name in checking if module == source.module}
        known |= {item.name for item in imports(source) if (item.module, item.name) in checking}
        toothless += [
            f"{source.module}:{node.lineno} {node.name}"
            for node in _functions(source)
            if node.name.startswith("test_") and not _can_fail(node, known)
        ]
    return toothless


def _public_definitions(
    tree: ast.Module | ast.ClassDef,
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public_definitions(node)


def _functions(source: Source) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _helpers(source: Source) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in _functions(source) if not node.name.startswith("test_")]


def _can_fail(function: ast.AST, helpers: set[str]) -> bool:
    return any(isinstance(node, ast.Assert) or _is_check(node, helpers) for node in ast.walk(function))


def _is_check(node: ast.AST, helpers: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name) and node.func.id in helpers:
        return True
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("raises", "fail", "warns", "assert_close") or name.lstrip("_").startswith(
        ("assert_", "check", "expect", "wait_for", "until")
    )


def _walk(node: ast.AST, inside: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        deeper = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, inside
        yield from _walk(child, deeper)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    base = parts[: len(parts) - node.level + (1 if source.is_package else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _target(item: Import, known: set[str]) -> str:
    """Return what an import loads: `from package import module` loads the module; `from module import name` the
    module."""
    deeper = f"{item.module}.{item.name}"
    return deeper if deeper in known else item.module


def _part(module: str) -> str:
    return max((part for part in LAYERS if _under(module, (part,))), key=len, default=module)


def _covered(part: str, allowed: tuple[str, ...]) -> bool:
    return any(part.startswith(prefix + ".") for prefix in allowed if prefix != "inferengine")


def _under(module: str, prefixes: Iterable[str]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _strongly_connected(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the components, by Kosaraju: depth-first order of the graph, then components of its reverse."""
    order: list[str] = []
    seen: set[str] = set()
    for root in graph:
        stack: list[tuple[str, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(target, False) for target in graph[node] if target not in seen]
    reverse: dict[str, set[str]] = {node: set() for node in graph}
    for node, targets in graph.items():
        for target in targets:
            reverse[target].add(node)
    components: list[set[str]] = []
    placed: set[str] = set()
    for root in reversed(order):
        component: set[str] = set()
        frontier = [root]
        while frontier:
            node = frontier.pop()
            if node not in placed:
                placed.add(node)
                component.add(node)
                frontier += reverse[node]
        if component:
            components.append(component)
    return components

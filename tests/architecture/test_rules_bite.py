"""Each rule of rules.py finds its small counterexample and leaves its innocent twin alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.architecture import rules

Rule = Callable[[Iterable[rules.Source]], list[str]]

CASES: list[tuple[Rule, str, str, str]] = [  # rule, module, guilty text, innocent text
    (
        rules.broken_layers,
        "inferengine.wire.link",
        "from inferengine.core.sequence import Request",
        "from inferengine.errors import bounded",
    ),
    (
        rules.broken_layers,
        "inferengine.core.scheduler.scheduler",
        "import inferengine.wire.messages",
        "from inferengine.core import executor as plan",
    ),
    (
        rules.broken_layers,
        "frontends.http.app",
        "from inferengine.engine.io.intake import Intake",
        "from inferengine.client import Client",
    ),
    (
        rules.broken_layers,
        "frontends.http.app",
        "from frontends.websocket import process as server",
        "from frontends.common import auth",
    ),
    (
        rules.broken_layers,
        "inferengine.layers.attention",
        "def f():\n    from inferengine.models import llama",
        "def f():\n    from inferengine.kernels import ops",
    ),
    (
        rules.broken_layers,
        "inferengine.core.scheduler.scheduler",
        "from ...engine import service",
        "from .plan import StepPlan",
    ),
    (
        rules.broken_layers,
        "inferengine.engine.core",
        "from inferengine.wire import messages",
        "from inferengine.core.executor import StepPlan",
    ),
    (rules.heavy_imports, "inferengine.text.tokenizer", "import torch", "import tokenizers"),
    (rules.heavy_imports, "frontends.http.app", "def f():\n    import transformers.models", "import starlette"),
    (
        rules.heavy_imports,
        "inferengine.engine.process",
        "from inferengine.executor.torch_executor import Runner",
        "def f():\n    from inferengine.executor.torch_executor import Runner",
    ),
    (rules.clocks_in_core, "inferengine.core.scheduler.queues", "from time import monotonic", "import heapq"),
    (rules.clocks_in_core, "inferengine.core.scheduler.queues", "import random", "import bisect"),
    (rules.environment_reads, "inferengine.engine.service", "import os\nos.environ['A']", "import os\nos.getpid()"),
    (rules.environment_reads, "frontends.http.app", "import os\nx = os.getenv('A')", "import os\nx = os.sep"),
    (rules.environment_reads, "frontends.http.app", "from os import environ", "from os import path"),
    (rules.unsafe_code, "inferengine.wire.messages", "import pickle", "import msgpack"),
    (rules.unsafe_code, "inferengine.wire.messages", "from marshal import loads", "from json import loads"),
    (rules.unsafe_code, "inferengine.wire.messages", "eval('1')", "model.eval()"),
    (rules.unsafe_code, "inferengine.wire.messages", "exec(code)", "executor.execute(code)"),
    (rules.unsafe_code, "inferengine.models.weights", "import torch\ntorch.load(f)", "import torch\ntorch.zeros(1)"),
    (rules.unsafe_code, "inferengine.models.weights", "from torch import load", "from torch import zeros"),
    (rules.unsafe_code, "inferengine.wire.sockets", "socket.recv_pyobj()", "socket.recv()"),
    (rules.unsafe_code, "inferengine.cli.up", "run('x', shell=True)", "run('x', shell=False)"),
    (rules.unsafe_code, "inferengine.cli.up", "run('x', shell=yes)", "run(['x'])"),
    (
        rules.unsafe_code,
        "inferengine.models.weights",
        "from_pretrained(p, trust_remote_code=True)",
        "from_pretrained(p, local_files_only=True)",
    ),
    (
        rules.requests_made_elsewhere,
        "inferengine.engine.io.publisher",
        "from inferengine.wire import messages\nfrom inferengine.core.sequence import Request\nr = Request(1)",
        "from inferengine.wire import messages\nfrom inferengine.core.sequence import Request\ndef f(r: Request): ...",
    ),
    (rules.missing_docstrings, "inferengine.wire.messages", "x = 1", '"""What it is."""\nx = 1'),
    (
        rules.missing_public_docstrings,
        "inferengine.wire.messages",
        "class A:\n    '''It.'''\n    def b(self): ...",
        "class A:\n    '''It.'''\n    def _b(self): ...",
    ),
    (
        rules.missing_public_docstrings,
        "inferengine.wire.messages",
        "def a(): ...",
        "def a():\n    '''Do it.'''\n    def b(): ...",
    ),
    (
        rules.docstrings_without_verb,
        "inferengine.wire.messages",
        "def a():\n    '''The size of it.'''",
        "def a():\n    '''Return the size of it.'''\n@property\ndef b():\n    '''The size of it.'''",
    ),
    (rules.tests_that_cannot_fail, "tests.core.test_x", "def test_a():\n    run()", "def test_a():\n    assert run()"),
    (
        rules.tests_that_cannot_fail,
        "tests.core.test_x",
        "def walk():\n    run()\ndef test_a():\n    walk()",
        "def walk():\n    assert run()\ndef test_a():\n    walk()",
    ),
    (
        rules.tests_that_cannot_fail,
        "tests.core.test_x",
        "class T:\n    async def test_a(self):\n        x = 1",
        "class T:\n    async def test_a(self):\n        with pytest.raises(E):\n            x()",
    ),
]


@pytest.mark.parametrize(("rule", "module", "guilty", "innocent"), CASES)
def test_rule_tells_guilty_from_innocent(rule: Rule, module: str, guilty: str, innocent: str) -> None:
    assert len(rule([rules.parse(module, guilty)])) == 1
    assert rule([rules.parse(module, innocent)]) == []


def test_a_cycle_is_found_through_a_lazy_import() -> None:
    a = rules.parse("inferengine.core.a", "from inferengine.core import b")
    b = rules.parse("inferengine.core.b", "def f():\n    from inferengine.core.c import g")
    c = rules.parse("inferengine.core.c", "from inferengine.core.a import x")
    alone = rules.parse("inferengine.core.alone", "from inferengine.core import a")
    assert rules.cycles([a, b, c, alone]) == ["inferengine.core.a <-> inferengine.core.b <-> inferengine.core.c"]
    assert rules.cycles([a, b, alone]) == []


def test_engine_link_may_make_requests() -> None:
    text = "from inferengine.wire import messages\nfrom inferengine.core.sequence import Request\nr = Request(1)"
    assert rules.requests_made_elsewhere([rules.parse("inferengine.engine.io.intake", text)]) == []


def test_names_may_repeat_in_other_parts_and_where_they_are_allowed() -> None:
    text = "class Answer: ..."
    wire, text_part, text_too = (
        rules.parse(module, text)
        for module in ("inferengine.wire.format", "inferengine.text.a.format", "inferengine.text.b.format")
    )
    assert rules.repeated_file_names([wire, text_part], {}) == []
    assert rules.repeated_class_names([wire, text_part], {}) == []
    assert len(rules.repeated_file_names([text_part, text_too], {})) == 1
    assert len(rules.repeated_class_names([text_part, text_too], {})) == 1
    assert rules.repeated_file_names([text_part, text_too], {"inferengine.text": {"format"}}) == []
    assert rules.repeated_class_names([text_part, text_too], {"inferengine.text": {"Answer"}}) == []


def test_a_folder_is_crowded_above_the_limit() -> None:
    files = [rules.parse(f"inferengine.wire.{name}", "") for name in ("a", "b", "c", "__main__")]
    assert rules.crowded_folders(files, 2) == ["inferengine.wire has 3 entries"]
    assert rules.crowded_folders(files, 3) == []

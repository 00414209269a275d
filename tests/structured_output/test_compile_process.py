"""Grammars are tried out in a process that can be killed: nothing that somebody asks for keeps others waiting."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferengine.config import LimitsConfig
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.structured_output.build import Builder
from inferengine.structured_output.build import Vocabulary as BuilderVocabulary
from inferengine.structured_output.compile_process import SECOND_S, CompileProcess, FrameReader
from inferengine.structured_output.spec import GrammarSpec
from tests.structured_output.builders import Vocabulary

WAIT_S = 60.0  # for what takes a second on a machine of one's own
ROOT = Path(__file__).resolve().parents[2]


def of_everything(first: int) -> GrammarSpec:
    """Return a grammar that grows exponentially while it is compiled, and takes gigabytes."""
    patterns = [{"pattern": f".*{first + number}.*"} for number in range(100)]
    return GrammarSpec("json_schema", json.dumps({"type": "string", "allOf": patterns}))


@pytest.fixture
def vocabulary() -> Iterator[Vocabulary]:
    made = Vocabulary("byte_level", grammar_compile_s=30.0, grammar_memory_mib=1024)
    yield made
    made.compiler.close()


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
        except (OSError, IndexError):  # it has ended
            continue
    return found


def processor_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def server(vocabulary: Vocabulary) -> int:
    wait_until(lambda: vocabulary.compiler.process.pid is not None)
    pid = vocabulary.compiler.process.pid
    assert pid is not None
    return pid


def test_known_and_new_grammars_do_not_wait_for_ones_that_never_end(vocabulary: Vocabulary) -> None:
    """Two schemas kept both compile threads for good: every other grammar was refused."""
    compiler = vocabulary.compiler
    compiler.compile(GrammarSpec("regex", "[a-z]+"))
    tickets = [compiler.submit(of_everything(first), lambda result: None) for first in (10, 11)]
    wait_until(lambda: all(compiler.is_slow(ticket) for ticket in tickets))
    compiler.compile(GrammarSpec("regex", "[a-z]+"))
    compiler.compile(GrammarSpec("regex", "[0-9]+"))
    assert all(compiler.is_slow(ticket) for ticket in tickets), "they are compiled still"


def test_a_grammar_that_nobody_waits_for_is_killed(vocabulary: Vocabulary) -> None:
    compiler = vocabulary.compiler
    tickets = [compiler.submit(of_everything(first), lambda result: None) for first in (10, 11)]
    wait_until(lambda: all(compiler.is_slow(ticket) for ticket in tickets))
    pid = server(vocabulary)
    assert children(pid)
    for ticket in tickets:
        compiler.cancel(ticket)
    wait_until(lambda: not children(pid))
    assert not compiler._unknown


def test_of_two_who_wait_for_the_same_grammar_one_may_leave(vocabulary: Vocabulary) -> None:
    compiler, answered = vocabulary.compiler, threading.Event()
    spec = GrammarSpec("json_schema", json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(300)}}))
    leaving = compiler.submit(spec, lambda result: None)
    compiler.submit(spec, lambda result: answered.set())
    compiler.cancel(leaving)
    assert answered.wait(WAIT_S)
    assert compiler.num_compiled == 1


def test_what_takes_too_long_is_refused_and_known_from_then_on() -> None:
    vocabulary = Vocabulary("byte_level", grammar_compile_s=0.2)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"could not be compiled in 0.2 s: simplify it"):
            vocabulary.compiler.compile(of_everything(10))
    assert vocabulary.compiler.process._next_id == 1, "tried out once"
    vocabulary.compiler.close()


def test_a_tool_whose_schema_takes_too_long_is_any_object() -> None:
    vocabulary = Vocabulary("byte_level", grammar_compile_s=0.2)
    slow = {"properties": {"a": json.loads(of_everything(100).source)}, "required": ["a"], "x-tool": "slow"}
    spec = GrammarSpec("lark", f"start: arguments\narguments: %json {json.dumps({'type': 'object', **slow})}\n")
    matcher = vocabulary.compiler.compile(spec)
    assert all(map(matcher.accept, vocabulary.fast.encode('{"b":1}', add_special_tokens=False).ids))
    vocabulary.compiler.close()


def test_what_takes_too_much_memory_is_refused() -> None:
    vocabulary = Vocabulary("byte_level", grammar_compile_s=30.0, grammar_memory_mib=16)
    with pytest.raises(InvalidRequest, match="needs more than 16 MiB of memory"):
        vocabulary.compiler.compile(of_everything(10))
    vocabulary.compiler.compile(GrammarSpec("regex", "a"))
    vocabulary.compiler.close()


def test_a_process_that_dies_is_started_again_and_what_it_did_is_done_again(vocabulary: Vocabulary) -> None:
    compiler = vocabulary.compiler
    results: list[object] = []
    tickets = [compiler.submit(of_everything(first), results.append) for first in (10, 11)]
    wait_until(lambda: all(compiler.is_slow(ticket) for ticket in tickets))
    first = server(vocabulary)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: compiler.process.pid not in (None, first))
    compiler.compile(GrammarSpec("regex", "a"))
    assert not results
    second = server(vocabulary)
    os.kill(second, signal.SIGKILL)  # whatever was there both times may be why
    wait_until(lambda: len(results) == 2)
    assert {error.code for error in results if isinstance(error, InferEngineError)} == {"engine_unavailable"}
    compiler.compile(GrammarSpec("regex", "b"))


def test_a_trial_that_the_system_kills_says_nothing_about_its_grammar(vocabulary: Vocabulary) -> None:
    """Where memory is short, the kernel takes these processes first."""
    compiler = vocabulary.compiler
    results: list[object] = []
    ticket = compiler.submit(of_everything(10), results.append)
    wait_until(lambda: compiler.is_slow(ticket) and bool(children(server(vocabulary))))
    for child in children(server(vocabulary)):
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: bool(results))
    assert isinstance(results[0], InferEngineError)
    assert (results[0].code, results[0].field) == ("overloaded", "grammar")
    assert results[0].retry_after_s
    assert compiler.cache.trial_result(ticket.key) is None


def test_what_is_tried_again_goes_to_the_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies in the moment in which it has taken a grammar: the thread that wrote it is not at the next one
    before that is known."""
    may_start, first_is_left = threading.Event(), threading.Event()
    processes: list[FakeProcess] = []

    class FakeProcess:
        def __init__(self, *_args: object, **_options: object) -> None:
            processes.append(self)
            self.is_first = len(processes) == 1
            self.messages: list[dict[str, object]] = []
            reading, self.writing = os.pipe()
            self.stdin, self.stdout = self, os.fdopen(reading, "rb", buffering=0)
            if not self.is_first:
                assert may_start.wait(WAIT_S)

        def write(self, frame: bytes) -> None:
            self.messages += FrameReader().feed(frame)
            if self.is_first and len(self.messages) == 2:
                os.close(self.writing)
                wait_until(lambda: len(processes) == 2)

        def flush(self) -> None:
            """Do nothing: nothing is kept back."""

        def close(self) -> None:
            if self.is_first:
                first_is_left.set()
            else:
                os.close(self.writing)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    process = CompileProcess(BuilderVocabulary("{}", 16, [0]), LimitsConfig())
    id = process.submit("", GrammarSpec("regex", "a"), lambda _: None)
    wait_until(lambda: first_is_left.is_set() or (bool(processes) and len(processes[0].messages) > 2))
    may_start.set()
    wait_until(lambda: len(processes[1].messages) == 2)
    assert [message.get("id") for message in processes[1].messages] == [None, id]
    assert len(processes[0].messages) == 2
    process.close()
    wait_until(lambda: processes[1].stdout.closed)


def test_the_compile_process_ends_with_the_engine_however_that_ends() -> None:
    """Neither the process nor what it compiles outlives a SIGKILL of whoever started it."""
    program = """
import sys, time
from tests.structured_output.builders import Vocabulary
from tests.structured_output.test_compile_process import of_everything, wait_until
compiler = Vocabulary("byte_level", grammar_compile_s=300.0, grammar_memory_mib=8192).compiler
ticket = compiler.submit(of_everything(10), lambda result: None)
wait_until(lambda: compiler.is_slow(ticket))
print(compiler.process.pid, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    assert owner.stdout is not None
    pid = int(next(line for line in owner.stdout if line.strip()))  # making a vocabulary prints empty lines
    wait_until(lambda: bool(children(pid)))
    (compiling,) = children(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not is_alive(pid) and not is_alive(compiling))
    assert not is_alive(compiling)


def test_a_compilation_ends_with_a_killed_compile_process() -> None:
    vocabulary = Vocabulary("byte_level", grammar_compile_s=300.0, grammar_memory_mib=8192)
    vocabulary.compiler.submit(of_everything(10), lambda result: None)
    pid = server(vocabulary)
    wait_until(lambda: any(processor_s(child) > 2 * SECOND_S for child in children(pid)))  # its last slice, of 300 s
    (compiling,) = children(pid)
    os.kill(pid, signal.SIGKILL)
    try:
        wait_until(lambda: not is_alive(compiling))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(compiling, signal.SIGKILL)
        vocabulary.compiler.close()


def test_an_idle_compile_process_sleeps(vocabulary: Vocabulary) -> None:
    vocabulary.compiler.compile(GrammarSpec("regex", "a"))
    pid = server(vocabulary)

    def switches() -> str:
        return next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("vol"))

    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S")
    before = switches()
    time.sleep(1.0)
    assert switches() == before


def test_the_compile_process_imports_neither_torch_nor_zmq() -> None:
    program = (
        "import sys, inferengine.structured_output.compile_process; print({'torch', 'zmq', 'numpy'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == "set()"


def test_a_model_that_names_no_end_of_sequence_takes_the_tokenizers() -> None:
    tokenizer = (ROOT / "inferengine/assets/embedded/tokenizer.json").read_text()
    builder = Builder(BuilderVocabulary(tokenizer, 4096, []))
    assert not builder.build(GrammarSpec("regex", "[a-z]+")).matcher.is_error()

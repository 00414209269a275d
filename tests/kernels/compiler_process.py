"""Programs that compile kernels for a card where there is none: children of one process that imports torch once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Compile = Callable[..., subprocess.CompletedProcess[str]]

# Reads a JSON list [program, arguments, file for stdout, file for stderr] a line, and answers with the exit status.
# Triton takes the machine for one with a Hopper card.
PARENT = """
import json, os, sys
import torch
import triton
import triton.language
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Card:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

driver.set_active(Card())

for line in sys.stdin:
    program, arguments, *files = json.loads(line)
    child = os.fork()
    if child == 0:
        for descriptor, path in enumerate(files, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.argv[1:] = arguments
        status = 1
        try:
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def stop_before_ptx() -> None:
    """Compile kernels to LLVM's instructions alone, unoptimized: how much shared memory they take is known by then."""
    from triton import knobs

    def cut(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        for stage, made in (("ptx", ""), ("cubin", b"")):
            stages[stage] = lambda source, metadata, made=made: metadata.update(name="kernel") or made

    def hook(*arguments: Any) -> Any:
        return cut(*arguments) if arguments else ("before ptx", "before ptx")  # the latter is part of the cache's key

    knobs.runtime.add_stages_inspection_hook = hook
    os.environ["DISABLE_LLVM_OPT"] = "1"


@contextmanager
def compiler_process(folder: Path) -> Iterator[Compile]:
    """Yield `compile(program, *arguments)`, which runs a program without Triton's interpreter and returns what it
    wrote."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            files = [folder / "stdout", folder / "stderr"]
            requests.write(json.dumps([program, arguments, *map(str, files)]) + "\n")
            requests.flush()
            status = int(answers.readline())
            return subprocess.CompletedProcess(command, status, *(file.read_text() for file in files))

        yield run  # leaving closes its standard input, which ends it

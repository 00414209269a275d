"""A real executor for benchmarks that drive EngineCore by hand, and a record of what its steps took.

Needs torch and the runtime, and none of the wire: it runs where there is no pyzmq.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.shapes import SHAPES
from inferengine.config import load
from inferengine.core.executor import Capacity, Executor, Progress, StepFuture, StepPlan, StepResult
from inferengine.core.scheduler.scheduler import SchedulerOptions, StepOutput
from inferengine.engine.core import EngineCore
from inferengine.executor.torch_executor import build_executor
from inferengine.simulation.cost_model import CapturedSteps, StepShape, shape_of


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--model FOLDER` and `--shape NAME`; with neither: the embedded model."""
    parser.add_argument("--model", type=Path, help="checkpoint folder; neither this nor --shape: the embedded model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="as --engine.device")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: this thread's own time; with --engine.threads 1"
    )


@contextmanager
def open_executor(
    arguments: argparse.Namespace, flags: Mapping[str, str], **sections: Mapping[str, Any]
) -> Iterator[tuple[Executor, Capacity, dict[str, Any]]]:
    """Provide a loaded and warm executor, its capacity, and what a report should say about it."""
    with tempfile.TemporaryDirectory() as scratch:
        model: dict[str, Any] = {}
        if arguments.shape:
            (Path(scratch) / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
            model = {"path": scratch, "load_format": "dummy"}
        elif arguments.model:
            model = {"path": str(arguments.model)}
        if arguments.device:
            sections = {**sections, "engine": {"device": arguments.device, **sections.get("engine", {})}}
        config = load(flags=flags).with_values(model=model, **sections)
        if arguments.clock == "cpu" and config.engine.threads != 1:
            raise SystemExit("--clock cpu counts one thread's time: add --engine.threads 1")
        executor: Any = build_executor(config)
        try:
            capacity = executor.load(_silent)
            executor.warm_up(_silent)
            yield executor, capacity, environment(executor, arguments, capacity)
        finally:
            executor.close()


def environment(executor: Any, arguments: argparse.Namespace, capacity: Capacity) -> dict[str, Any]:
    """Return the device, versions and sizes."""
    on_cuda = executor.device.type == "cuda"
    name = arguments.shape or (arguments.model.name if arguments.model else "embedded")
    return {
        "model": name,
        "device": torch.cuda.get_device_name() if on_cuda else f"{platform.machine()} CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": str(executor.dtype).removeprefix("torch."),
        "max_in_flight": executor.max_in_flight,
        "clock": arguments.clock,
        "num_blocks": capacity.groups[0].num_blocks,
        "block_size": capacity.block_size,
    }


@contextmanager
def switched(executor: Any, *, graphs: bool, overlap: bool) -> Iterator[None]:
    """Switch parts of an executor off for a while: loading another one takes longer than most runs."""
    before = executor.graphs, executor.mixed, executor.max_in_flight
    if not graphs:
        executor.graphs = executor.mixed = None
    executor.max_in_flight = 2 if overlap else 1
    try:
        yield
    finally:
        executor.graphs, executor.mixed, executor.max_in_flight = before


def captured_steps(executor: Any) -> CapturedSteps | None:
    """Return what the executor pads steps to. None: it has no CUDA graphs."""
    graphs, mixed = getattr(executor, "graphs", None), getattr(executor, "mixed", None)
    if graphs is None:
        return None
    shapes = [] if mixed is None else mixed.shapes
    prompt_rows = max((shape.num_rows - shape.decodes for shape in shapes), default=0)
    pairs = sorted(((shape.decodes, shape.prompt_tokens) for shape in shapes), key=sum)
    return CapturedSteps(tuple(graphs.sizes), tuple(pairs), prompt_rows)


class Pause:
    """How long a pause of the clock was."""

    seconds = 0.0


class Clock:
    """Seconds. `wall` is real time. `cpu` is what this thread computed plus what it would have slept: it shows what the
    engine does on a core of its own though others use the machine. For a model on the CPU with one thread."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._slept_s = 0.0
        self._paused_s = 0.0

    def now(self) -> float:
        return self._running_s() + self._slept_s - self._paused_s

    def sleep(self, seconds: float) -> None:
        """Sleep until `now` is so much later."""
        if self.kind == "wall":
            time.sleep(max(0.0, seconds))
        else:
            self._slept_s += max(0.0, seconds)

    @contextmanager
    def paused(self) -> Iterator[Pause]:
        """Stop the clock: what is done inside takes no time."""
        pause, begin = Pause(), self._running_s()
        try:
            yield pause
        finally:
            pause.seconds = self._running_s() - begin
            self._paused_s += pause.seconds

    def _running_s(self) -> float:
        return time.perf_counter() if self.kind == "wall" else time.thread_time()


WAITED_S = 2e-4  # a result waited for longer than fetching it takes: the device was still at work


class TimedStep(NamedTuple):
    """A step and how long it took. `overlapped`: the step before was under way when it was launched."""

    shape: StepShape  # with its seconds, those of the host, and whose they are
    end_s: float
    overlapped: bool


class _UnderWay:
    """A step that was launched: its shape, when that began, and what the host did from then on without waiting."""

    __slots__ = ("host_s", "launch_s", "overlapped", "shape")

    def __init__(self, shape: StepShape, launch_s: float, overlapped: bool) -> None:
        self.shape, self.launch_s, self.overlapped, self.host_s = shape, launch_s, overlapped, 0.0


class _Waited:
    """Implements `core.executor.StepFuture` around another one: tells how long its result was waited for."""

    def __init__(self, future: StepFuture, watch: Stopwatch) -> None:
        self._future, self._watch = future, watch

    def done(self) -> bool:
        return self._future.done()

    def provide_masks(self, words: bytearray) -> None:
        self._future.provide_masks(words)

    def result(self) -> StepResult:
        return self._watch.wait(self._future)


class Stopwatch:
    """Implements `core.executor.Executor` around another one: notes each step's shape, and how long it took: from its
    launch, scheduling included, or from the news of the step before where that was later, to its news. With two steps
    in flight that is the time between results, which is what a stream sees. It is the device's time where the host
    waited for both results; what the host did without waiting is noted beside it.
    """

    def __init__(self, executor: Executor, clock: Callable[[], float] = time.perf_counter) -> None:
        self.max_in_flight = executor.max_in_flight
        self._clock = clock
        self.steps: list[TimedStep] = []
        self._executor = executor
        self._under_way: deque[_UnderWay] = deque()
        self._last_slots: list[int] | None = None
        self._launch_s = self._news_s = 0.0
        self._waited_s = self._last_waited_s = 0.0  # for the last result, and for the one before
        self._total_waited_s = 0.0

    def load(self, progress: Progress) -> Capacity:
        return self._executor.load(progress)

    def warm_up(self, progress: Progress) -> None:
        self._executor.warm_up(progress)

    def execute(self, plan: StepPlan) -> StepFuture:
        shape = shape_of(plan, self._last_slots)
        self._last_slots = plan.slots
        item = _UnderWay(shape, self._launch_s, bool(self._under_way))
        self._under_way.append(item)
        future = self._executor.execute(plan)
        return future if self.max_in_flight == 1 else _Waited(future, self)

    def flush(self) -> None:
        self._executor.flush()

    def close(self) -> None:
        """Do nothing: the executor belongs to whoever opened it."""

    def step(self, core: EngineCore) -> StepOutput | None:
        """Run one step of `core`, whose executor this is. The time that its news came is `news_s`."""
        self._launch_s = self._clock()
        last, waited_s = self._under_way[-1] if self._under_way else None, self._total_waited_s
        output = core.step()
        now = self._clock()
        if self.max_in_flight > 1 and self._under_way and self._under_way[-1] is not last:
            self._under_way[-1].host_s = now - self._launch_s - (self._total_waited_s - waited_s)
        if output is not None and output.layout != -1 and self._under_way:
            item = self._under_way.popleft()
            waited = min(self._waited_s, self._last_waited_s) > WAITED_S or self.max_in_flight == 1
            shape = item.shape._replace(
                seconds=now - max(item.launch_s, self._news_s), host_s=item.host_s, is_device_time=waited
            )
            self.steps.append(TimedStep(shape, now, item.overlapped))
        if output is not None:
            self._news_s = now
        return output

    def wait(self, future: StepFuture) -> StepResult:
        """Return a step's result, and how long it was waited for."""
        begin = self._clock()
        result = future.result()
        self._last_waited_s, self._waited_s = self._waited_s, self._clock() - begin
        self._total_waited_s += self._waited_s
        return result

    @property
    def news_s(self) -> float:
        return self._news_s


def plain_options(capacity: Capacity, **changes: Any) -> SchedulerOptions:
    """Return scheduler options without prefix cache, so that no request lives off another one's work."""
    values: dict[str, Any] = {"prefix_caching": False, "max_running_to_force": capacity.max_forced_rows, **changes}
    return SchedulerOptions(capacity.max_num_batched_tokens, capacity.max_num_seqs, **values)


def raise_failure(error: BaseException) -> None:
    """Raise the failure, as EngineCore's `on_failure`: in a benchmark nothing may fail."""
    raise error


def _silent(phase: str, share: float) -> None:
    pass

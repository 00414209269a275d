"""Run an engine process: from a configuration to serving, and from its end to an exit code."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

from inferengine.config import Config, keep_compiled_kernels
from inferengine.config.model_path import weight_paths
from inferengine.core.executor import Executor
from inferengine.engine.model_info import ModelCard, read_model_card
from inferengine.engine.service import EngineService
from inferengine.errors import ConfigError, DoesNotFit, ExitCode, InferEngineError, Unreachable
from inferengine.observability import logging as logs
from inferengine.process import stdio
from inferengine.process.listen import AddressTaken
from inferengine.process.reload import Reload
from inferengine.process.system import Notifier, Watchdog, read_ahead

logger = logging.getLogger(__name__)

GARBAGE_OBJECTS = 50_000  # made before cycles are looked for; Python's 700 come and go in a step, freed without
TURN_S = 0.2  # between two looks whether a lent device is gone
LEAVE_S = 8.0  # within which an engine that failed sends its last messages and exits, whatever still hangs
EXECUTORS = ("torch", "onnx", "remote", "upstream")
EXECUTORS_GROUP = "inferengine.executors"  # entry points: each makes an Executor of a Config
MEMORY_ERRORS = ("OutOfMemoryError", "MemoryError")


def run_engine(config: Config, reload: Reload | None = None) -> int:
    """Serve until a signal, and end the process with the exit code; one that cannot begin returns its own. Must be
    called in the main thread."""
    logs.configure(config.log)
    gc.disable()  # until the model is loaded: imports and loading make a million objects and hardly any garbage
    gc.set_threshold(GARBAGE_OBJECTS, 20, 20)
    notifier = Notifier.from_environment()
    try:
        card = read_model_card(config)
        service = EngineService(
            config,
            card,
            lambda: build_executor(config, card),
            notifier=notifier,
            watchdog=Watchdog.from_environment(notifier, time.monotonic),
            exit_code_of=exit_code_of,
        )
    except AddressTaken as error:
        return _refuse(notifier, str(error), ExitCode.ADDRESS)
    except ConfigError as error:
        return _refuse(notifier, str(error), ExitCode.MODEL if error.field == "model.path" else ExitCode.USAGE)
    except InferEngineError as error:
        return _refuse(notifier, str(error), ExitCode.MODEL)
    if config.model.load_format != "dummy":
        read_ahead(weight_paths(card.folder))  # torch takes seconds to import meanwhile
    serve(service, reload)


def exit_code_of(error: BaseException) -> int:
    """Return which exit code an error while loading deserves."""
    if isinstance(error, DoesNotFit):
        return ExitCode.MEMORY
    if isinstance(error, Unreachable):
        return ExitCode.CRASH
    if isinstance(error, ConfigError):
        return ExitCode.MODEL if error.field == "model.path" else ExitCode.USAGE
    if type(error).__name__ in MEMORY_ERRORS:
        return ExitCode.MEMORY
    if isinstance(error, InferEngineError | OSError | ValueError | KeyError):
        return ExitCode.MODEL
    return ExitCode.CRASH


def build_executor(config: Config, card: ModelCard | None = None) -> Any:
    """Build what `engine.executor` names, not loaded yet: an Executor or a Relay. It may import what takes seconds:
    call it in the loop's thread. Raises ConfigError where there is no executor of this name, or a package that it needs
    is missing."""
    name = config.engine.executor
    if name == "torch":
        try:
            return build_torch_executor(config)
        except ModuleNotFoundError as error:
            raise _missing("engine", error) from None
    if name == "onnx":
        try:
            from inferengine.executor.onnx.model import load_onnx_model, resolve
        except ModuleNotFoundError as error:
            raise _missing(name, error) from None
        return build_torch_executor(resolve(config), load_onnx_model)
    if name == "remote":
        try:
            from inferengine.executor.remote.remote_executor import RemoteExecutor
        except ModuleNotFoundError as error:
            raise _missing(name, error) from None
        return RemoteExecutor(config)
    if name == "upstream":
        try:
            from inferengine.engine.upstream.relay import UpstreamLoop
        except ModuleNotFoundError as error:
            raise _missing(name, error) from None
        return UpstreamLoop(config, card or read_model_card(config))
    found = [point for point in entry_points(group=EXECUTORS_GROUP) if point.name == name]
    if not found:
        others = sorted({point.name for point in entry_points(group=EXECUTORS_GROUP)})
        names = ", ".join([*EXECUTORS, *others])
        raise ConfigError("engine.executor", f"there is no executor {name!r}: one of {names}")
    build: Callable[[Config], Executor] = found[0].load()
    return build(config)


def run_executor(config: Config) -> int:
    """Lend the executor of this configuration over gRPC until a signal. Must be called in the main thread."""
    logs.configure(config.log)
    try:
        from inferengine.executor.remote.executor_server import ExecutorServer
    except ModuleNotFoundError as error:
        raise _missing("remote", error) from None
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    server = ExecutorServer(config, lambda: build_torch_executor(config))
    server.start()
    while not stopped.wait(TURN_S) and not server.lost.is_set():
        continue
    server.stop()
    return ExitCode.CRASH if server.lost.is_set() else ExitCode.OK


def _missing(name: str, error: ModuleNotFoundError) -> ConfigError:
    message = f"needs the package {error.name}: pip install 'inferengine[{name}]'"
    return ConfigError("engine.executor", message)


def build_torch_executor(config: Config, load: Any = None) -> Executor:
    """Build the torch executor, and log its memory plan. `load`: TorchExecutor's, where it is not its own. Raises
    DoesNotFit before anything of the model is read, unless `engine.check_memory` is off."""
    from inferengine.executor.early_start import start_early

    start_early(config.engine.device)  # first: this process imports torch next
    size = config.engine.tensor_parallel
    ranks: Any = None
    if size > 1:
        from inferengine.executor.parallel.ranks import Ranks

        ranks = Ranks(size)  # likewise
    try:
        return _build(config, ranks, load)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _build(config: Config, ranks: Any, load: Any) -> Executor:
    """Build the torch executor. `ranks`: executor/parallel/ranks.py's Ranks, or None."""
    from inferengine.executor.memory import fit
    from inferengine.executor.memory.plan import device_memory, make_plan, plan_lines
    from inferengine.executor.settings import executor_settings
    from inferengine.executor.torch_executor import TorchExecutor

    settings = executor_settings(config)
    if settings.device.type == "cuda" and (complaint := keep_compiled_kernels()):
        logger.warning("%s", complaint)
    plan = make_plan(settings, device_memory(settings.device))
    each = f", each of {settings.tensor_parallel} ranks" if ranks is not None else ""
    logger.info("memory plan%s:\n%s", each, "\n".join(plan_lines(plan)))
    try:
        fit.require_fit(settings, plan)
    except DoesNotFit as error:
        if config.engine.check_memory:
            raise
        logger.warning("%s", error)
    if settings.draft_folder is not None:
        logger.info("speculative decoding: draft model %s", settings.draft_folder.name)
    executor: Executor
    if ranks is None:
        executor = TorchExecutor(settings) if load is None else TorchExecutor(settings, load=load)
    else:
        from inferengine.executor.parallel.executor import ParallelExecutor  # and torch.distributed

        executor = ParallelExecutor(config, settings, ranks)
    return executor


def serve(service: EngineService, reload: Reload | None = None) -> NoReturn:
    """Start it, pass signals on to it and end the process with its exit code. Must be called in the main thread.

    `reload`: what SIGHUP does; without it the signal is not handled."""
    events: SimpleQueue[int | None] = SimpleQueue()  # its put is safe inside a signal handler
    if reload is not None:
        reload.on_signal = lambda: events.put(signal.SIGHUP)

    def on_signal(number: int, frame: FrameType | None) -> None:
        events.put(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    # By a thread of C: it needs no interpreter, whose lock a call into the device may keep. It does not wait for a
    # reader of standard error.
    errors = stdio.not_blocking(sys.stderr.fileno())
    service.start(
        on_end=lambda: events.put(None),
        on_failure=lambda: faulthandler.dump_traceback_later(LEAVE_S, exit=True, file=errors),
    )
    num_signals = 0
    while (event := events.get()) is not None:
        if event == signal.SIGHUP:
            if reload is not None:
                reload.run_if_due()
            continue
        num_signals += 1
        if num_signals == 1:
            logger.info("%s: finishing what runs", signal.Signals(event).name)
            service.drain()
        else:
            service.abort()
    code = service.wait(0.0)
    _leave(ExitCode.CRASH if code is None else code)


def _leave(code: int) -> NoReturn:
    """Exit without the interpreter's own shutdown: it waits for threads that are stuck in the device or in loading, and
    Triton's bindings print a hundred lines of leaks. Everything is closed by now."""
    logging.shutdown()
    stdio.finish()
    os._exit(code)


def _refuse(notifier: Notifier, message: str, code: int) -> int:
    print(f"inferengine engine: {message}", file=sys.stderr, flush=True)
    notifier.send(f"STATUS={message}")
    notifier.close()
    return code

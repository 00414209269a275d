"""The soak tells growth from noise, a fault of the product from the consequence of a fault, and one end from two."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.kill_streams import Case
from benchmarks.soak import batches, disturbances, mixed, report, service, storms, verdict
from benchmarks.soak.asks import Asker, Result
from benchmarks.soak.disturbances import Disturbances
from benchmarks.soak.faults import WEIGHTS, Faults
from benchmarks.soak.load import filling_prompts
from benchmarks.soak.samples import client_sockets, memory_on_cards, process_figures
from benchmarks.soak.service import CLOCK_FOLDER, make_key
from benchmarks.soak.verdict import WARM_UP_S, judge, theil_sen, verdicts
from inferengine.structured_output import compile_process
from tests.core.builders import Run, make_capacity, make_request
from tests.engine.builders import wait_until

CASE = Case("sse", "sse", {"prompt": "x", "n": 2})
ENDS = [{"index": 0, "text": "one", "finish_reason": "stop"}, {"index": 1, "text": "two", "finish_reason": "length"}]


def minutes(count: int, value: Callable[[int], float]) -> list[tuple[float, float]]:
    return [(minute / 60, value(minute)) for minute in range(count)]


def sample(t: float, *, evictions: int = 1, **figures: float) -> dict[str, Any]:
    none = {"p50_s": None, "p99_s": None}
    return {
        "engine": {"evictions": evictions},
        "t": t, "processes": [{"name": "engine", "life": 0, "pid": 1, **figures}], "load_average": 1.0, "requests": {},
        "errors": {}, "first_token": none, "between_tokens": none,
    }  # fmt: skip


# -- the verdict -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_flat_and_a_leak_in_the_same_noise_is_growing(seed: int) -> None:
    draw = random.Random(seed)
    noise = [draw.gauss(0.0, 1.0) for _ in range(40)]
    assert judge("rss_mib", minutes(40, lambda minute: 200 + noise[minute]))["verdict"] == "flat"
    leaking = judge("rss_mib", minutes(40, lambda minute: 200 + noise[minute] + 0.25 * minute))
    assert leaking["verdict"] == "growing"
    assert leaking["low"] <= 15.0 <= leaking["high"]


def test_a_step_that_stays_is_not_growing_forever() -> None:
    """A cache that is filled once after the warm-up."""
    assert judge("rss_mib", minutes(40, lambda minute: 220 if minute > 10 else 219))["verdict"] == "flat"


def test_descriptors_that_are_never_given_back_are_growing() -> None:
    assert judge("descriptors", minutes(30, lambda minute: 30 + minute // 3))["verdict"] == "growing"


def test_memory_that_has_come_to_rest_does_not_grow() -> None:
    storms = {3: 1.3, 6: 4.1}  # what two bursts of connections added, and a third no more
    level = list(itertools.accumulate([59.3, *(storms.get(minute, 0.02) for minute in range(1, 16))]))
    assert judge("rss_mib", minutes(16, lambda minute: level[minute]))["verdict"] == "flat"
    assert judge("rss_mib", minutes(16, lambda minute: 59.3 + minute // 4))["verdict"] == "growing", "each burst adds"


def test_without_enough_minutes_there_is_no_verdict() -> None:
    assert judge("rss_mib", minutes(9, lambda minute: 10.0 * minute))["verdict"] == "too short"


def test_the_slope_of_a_line_is_its_own_with_its_outliers() -> None:
    points = minutes(30, lambda minute: 1000.0 if minute == 15 else 2.0 * minute)
    slope = theil_sen(points)
    assert slope.per_hour == pytest.approx(120.0)


def test_the_warm_up_of_a_life_is_left_out() -> None:
    samples = [
        sample(t, rss_mib=100 + min(t, WARM_UP_S), pss_mib=90, descriptors=20, threads=4) for t in range(0, 2400, 10)
    ]
    (engine,) = verdicts(samples)
    assert engine["rss_mib"]["verdict"] == "flat"
    assert engine["rss_mib"]["median"] == 100 + WARM_UP_S


def test_a_cache_that_is_written_for_the_first_time_is_not_growth() -> None:
    """Its memory is part of the plan, and ends with the first eviction."""
    figures = {"pss_mib": 90, "descriptors": 20, "threads": 4}
    filling = [sample(t, rss_mib=100 + t / 60, evictions=0, **figures) for t in range(0, 1800, 10)]
    full = [sample(t, rss_mib=130, evictions=7, **figures) for t in range(1800, 3000, 10)]
    (engine,) = verdicts(filling + full)
    assert (engine["rss_mib"]["verdict"], engine["rss_mib"]["minutes"]) == ("flat", 20)
    assert engine["cache_full_after_s"] == 1800
    leaking = [sample(t, rss_mib=100 + t / 60, evictions=7, **figures) for t in range(1800, 3000, 10)]
    (engine,) = verdicts(filling + leaking)
    assert engine["rss_mib"]["verdict"] == "growing"


def test_an_engine_whose_cache_was_never_full_is_not_judged() -> None:
    samples = [sample(t, evictions=0, rss_mib=100, pss_mib=90, descriptors=20, threads=4) for t in range(0, 3600, 10)]
    assert verdicts(samples) == []


def test_a_soak_fills_the_cache_of_an_engine_that_has_never_evicted() -> None:
    """One after the other, its prompts take every block, and one for the second time."""
    run = Run(make_capacity(num_blocks=256, block_size=16, max_model_len=2048), budget=1024)
    for uid, prompt in enumerate(filling_prompts(256, 16, random.Random(1))):
        assert run.scheduler.snapshot().num_evictions == 0
        run.submit(make_request(uid, prompt, max_tokens=1)).to_end()
    assert run.scheduler.snapshot().num_evictions > 0


def run_of(device: str = "cpu", *, complete: bool = True) -> dict[str, Any]:
    return {
        "seconds": 3600.0, "rate": 1.0, "seed": 1, "device": device, "own_disk": True, "requests": 5, "compared": 4,
        "batches": 1, "faults": {"kill ws": 1}, "fault_list": [{"name": "kill ws", "back_after_s": 2.0}],
        "totals": {"sse n, ended": 4, "wire n, lost": 1}, "windows": [], "unexpected": [], "unclean": [],
        "complete": complete,
    }  # fmt: skip


def test_a_growing_process_fails_the_run() -> None:
    run = run_of()
    steady = [sample(t, rss_mib=100, pss_mib=90, descriptors=20, threads=4) for t in range(0, 3600, 10)]
    assert report.result(run, steady)["passed"]
    growing = [sample(t, rss_mib=100 + t / 60, pss_mib=90, descriptors=20, threads=4) for t in range(0, 3600, 10)]
    found = report.result(run, growing)
    assert (found["passed"], found["growing"]) == (False, ["engine 0: rss_mib"])
    assert found["outcomes"] == {"ended": 4, "lost": 1}


def test_memory_that_other_programs_share_is_not_judged() -> None:
    """PSS falls and rises as others map the same files."""
    figures = {"rss_mib": 100, "descriptors": 20, "threads": 4}
    samples = [sample(t, pss_mib=90 + t / 60, **figures) for t in range(0, 3600, 10)]
    assert report.result(run_of(), samples)["growing"] == []


def test_an_engine_that_takes_ever_more_of_a_card_fails_the_run() -> None:
    figures = {"rss_mib": 100, "descriptors": 20, "threads": 4}
    samples = [sample(t, device_mib=2000 + t / 20, **figures) for t in range(0, 3600, 10)]
    found = report.result(run_of("cuda"), samples)
    assert (found["passed"], found["growing"]) == (False, ["engine 0: device_mib"])
    memory = found["minutes"]["engine device_mib"]
    assert memory[0] < 2003 < 2170 < memory[-1]


def test_what_the_heap_has_in_use_is_told_and_fails_no_run() -> None:
    figures = {"rss_mib": 100, "descriptors": 20, "threads": 4, "python_blocks": 700_000}
    samples = [sample(t, in_use_mib=50 + t / 60, **figures) for t in range(0, 3600, 10)]
    found = report.result(run_of(), samples)
    assert found["passed"]
    assert (
        found["longest"]["engine"]["in_use_mib"]["verdict"],
        found["longest"]["engine"]["python_blocks"]["verdict"],
    ) == (
        "growing",
        "flat",
    )


def test_a_run_is_flat_only_if_every_lasting_part_was_judged() -> None:
    parts = ("engine", "http worker", "http", "ws", "up")

    def samples(lasting: tuple[str, ...]) -> list[dict[str, Any]]:
        figures = {"rss_mib": 100, "descriptors": 20, "threads": 4}
        made = []
        for t in range(0, 3600, 10):
            life = t // 600  # of those that are killed every ten minutes
            rows = [{"name": name, "life": 0 if name in lasting else life, "pid": 1, **figures} for name in parts]
            made.append({**sample(t), "processes": rows})
        return made

    found = report.result(run_of(), samples(parts))
    assert (found["verdict"], found["not_judged"]) == ("flat", [])
    found = report.result(run_of(), samples(("http", "up")))
    assert (found["verdict"], found["not_judged"]) == ("too short", ["engine", "http worker", "ws"])


def test_a_run_that_was_cut_short_has_not_passed() -> None:
    figures = {"rss_mib": 100, "descriptors": 20, "threads": 4}
    samples = [sample(t, **figures) for t in range(0, 1200, 10)]
    found = report.result(run_of(complete=False), samples)
    assert (found["passed"], found["complete"], found["requests"]) == (False, False, 5)


@pytest.mark.parametrize("minutes_of_run", [20.1, 30.0, 60.0, 120.0])
def test_kills_end_early_enough_for_a_verdict_on_whoever_was_killed_last(minutes_of_run: float) -> None:
    seconds = 60.0 * minutes_of_run
    kills_s = mixed.kill_time_s(seconds, None)
    assert 0.0 < kills_s <= mixed.KILLS * seconds
    figures = {"rss_mib": 100, "descriptors": 20, "threads": 4}
    samples = [sample(t, **figures) for t in range(int(kills_s), int(seconds), 10)]
    assert judge("rss_mib", verdict.by_minute(verdict.lives(samples)["engine", 0], "rss_mib"))["verdict"] == "flat"


def test_each_kind_of_kill_comes_before_other_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for which no process is old enough yet comes later."""
    done: list[str] = []
    faults = Faults(SimpleNamespace(disk=SimpleNamespace(is_own=True)), Disturbances(), seed=3)  # type: ignore[arg-type]

    async def do(name: str) -> bool:
        done.append(name)
        if len(done) == 12:
            raise InterruptedError
        return len(done) != 1

    async def no_pause(seconds: float) -> None:
        return None

    monkeypatch.setattr(faults, "do", do)
    monkeypatch.setattr("benchmarks.soak.faults.asyncio.sleep", no_pause)
    with pytest.raises(InterruptedError):
        asyncio.run(faults.some(float("inf"), float("inf")))
    kinds = {name for name in WEIGHTS if name.startswith("kill")}
    assert set(done[1 : len(kinds) + 1]) == kinds
    assert done[len(kinds)] == done[0]


def test_a_card_s_memory_is_read_by_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '41, 512\\n42, 100\\n41, 8\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert memory_on_cards() == {41: 520.0, 42: 100.0}
    program.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert memory_on_cards() == {}


@pytest.mark.parametrize(
    ("parent", "command", "name"),
    [
        ("up", ["python", "-m", "inferengine.cli", "engine"], "engine"),
        ("http", ["python", "-m", "inferengine.cli", "http"], "http worker"),
        ("engine", ["python", "-m", compile_process.__name__], "grammars"),
        ("engine", ["python", "-c", "compile kernels"], "engine child"),
    ],
)
def test_of_an_engine_s_children_one_compiles_grammars(parent: str, command: list[str], name: str) -> None:
    """Killing one that compiles kernels is no fault of the list: an engine that starts would fail."""
    assert service._name(parent, [word.encode() for word in command]) == name


def test_a_connection_that_a_client_holds_open_is_no_descriptor_of_the_service_s() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = process_figures(os.getpid(), client_sockets([port]))["descriptors"]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        with accepted:
            assert process_figures(os.getpid(), client_sockets([port]))["descriptors"] == before + 1  # the client's own
            client.close()
            assert (
                process_figures(os.getpid(), client_sockets([port]))["descriptors"] == before + 1
            )  # closed there alone


def test_a_process_writes_what_its_heap_has_in_use(tmp_path: Path) -> None:
    """The engine's process; of an HTTP front end its forked workers."""
    code = (
        "import os, time; big = b'x' * (64 << 20); os.fork() if 'http' in __import__('sys').argv else 0; time.sleep(60)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(CLOCK_FOLDER),
        "SOAK_HEAP": str(tmp_path),
        "SOAK_HEAP_EVERY_S": "0.1",
    }
    for name in ("engine", "http"):
        with subprocess.Popen([sys.executable, "-c", code, name], env=environment, start_new_session=True) as process:
            try:
                wait_until(lambda: any(path.suffix == "" for path in tmp_path.iterdir()))
                (written,) = {path.with_suffix("") for path in tmp_path.iterdir()}
                figures = json.loads(written.read_text())
                assert (written.name == str(process.pid)) == (name == "engine")
                assert 64 < figures["in_use_mib"] < 256
                assert figures["python_blocks"] > 1000
            finally:
                os.killpg(process.pid, signal.SIGKILL)
        for path in tmp_path.iterdir():
            path.unlink()


# -- what a fault explains ---------------------------------------------------------------------------------------------


def test_a_fault_explains_what_ended_during_it_or_soon_after(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(disturbances.time, "monotonic", lambda: now[0])
    faults = Disturbances()
    place = faults.begin("kill http worker")
    now[0] = 110.0
    assert faults.touched("kill http", 105.0)
    assert not faults.touched("kill ws", 105.0)
    faults.end(place)
    assert faults.touched("http", 110.0 + disturbances.SETTLES_S)
    assert not faults.touched("http", 110.0 + disturbances.SETTLES_S + 1)


def test_a_line_of_a_batch_that_is_missing_double_or_different_is_found() -> None:
    texts = {number: f"text {number}" for number in range(batches.LINES)}

    def line(number: int) -> dict[str, Any]:
        if batches.is_refused(number):
            return {"custom_id": str(number), "response": {"status_code": 400, "body": {}}}
        body = {"choices": [{"text": texts[number]}]}
        return {"custom_id": str(number), "response": {"status_code": 200, "body": body}}

    whole = [line(number) for number in range(batches.LINES)]
    assert batches.compare(whole, texts) == []
    assert batches.compare(whole[1:], texts)
    assert batches.compare([*whole, line(0)], texts)
    assert batches.compare(whole, {**texts, 0: "another"}) == ["line 0: another text"]


# -- reading strictly --------------------------------------------------------------------------------------------------


def ask(events: list[str], manner: str = "read") -> Result:
    """Return what the client makes of this answer of an HTTP front end."""

    async def asked() -> Result:
        service: Any = SimpleNamespace(http="http://front-end", engine="ipc:///nowhere")
        asker = Asker(service)
        text = "".join(f"data: {event}\n\n" for event in events)
        answer = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
        asker.http = httpx.AsyncClient(transport=answer, base_url="http://front-end")
        try:
            return await asker.ask(CASE, manner, make_key("a"), random.Random(1))
        finally:
            await asker.close()

    made: Awaitable[Result] = asked()
    return asyncio.run(made)  # type: ignore[arg-type]


def test_a_stream_with_one_end_for_each_choice_has_ended() -> None:
    found = ask([*(json.dumps({"choices": [end]}) for end in ENDS), "[DONE]"])
    assert (found.kind, found.texts) == ("ended", [("one", "stop"), ("two", "length")])


@pytest.mark.parametrize(
    "events",
    [
        [json.dumps({"choices": ENDS}), json.dumps({"choices": ENDS[:1]}), "[DONE]"],
        [json.dumps({"choices": [ENDS[0], {"index": 1, "text": "two"}]}), "[DONE]"],
        [json.dumps({"choices": ENDS}), "[DONE]", "[DONE]"],
        [json.dumps({"choices": ENDS[:1]}), json.dumps({"error": {"code": "engine_error"}}), "[DONE]"],
    ],
    ids=["two ends", "no end", "after [DONE]", "an error"],
)
def test_a_stream_without_exactly_one_end_is_wrong(events: list[str]) -> None:
    assert ask(events).kind == "wrong"


def test_a_stream_without_done_is_lost() -> None:
    assert ask([json.dumps({"choices": ENDS})]).kind == "lost"


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_the_wall_clock_of_a_process_follows_the_file_and_its_monotonic_clock_does_not(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("<d", 3600.0))
    program = (
        "import struct, sys, time; wall, steady = time.time(), time.monotonic();"
        f"open({str(clock)!r}, 'r+b').write(struct.pack('<d', -3600.0));"
        "print(wall - time.time(), wall - time.time_ns() / 1e9, time.monotonic() - steady)"
    )
    environment = {**os.environ, "PYTHONPATH": str(CLOCK_FOLDER), "SOAK_CLOCK": str(clock)}
    shown = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    back, back_ns, passed = map(float, shown.stdout.split())
    assert back == pytest.approx(7200.0, abs=60.0)
    assert back_ns == pytest.approx(7200.0, abs=60.0)
    assert passed < 60.0


def test_storms_that_are_told_to_end_leave_no_process(tmp_path: Path) -> None:
    log = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.soak", "--storms", "1"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    front_end = b"inferengine.cli\0ws"
    wait_until(lambda: any(front_end in words for words in commands_of_session(process.pid)))
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM, log.read_text()
    wait_until(lambda: not commands_of_session(process.pid))


def test_a_process_that_is_started_as_sigterm_comes_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(["sleep", "100"], **options))
        signal.raise_signal(signal.SIGTERM)
        return started[0]

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    monkeypatch.setattr("benchmarks.soak.storms.subprocess.Popen", start)
    try:
        with pytest.raises(SystemExit):
            storms._of_front_end("ws", "ipc:///nowhere", tmp_path, 1)
        assert started[0].poll() is not None
    finally:
        signal.signal(signal.SIGTERM, before)
        started[0].kill()


def commands_of_session(session: int) -> list[bytes]:
    """Return the command lines of the processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, of_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                found.append((entry / "cmdline").read_bytes())
    return found

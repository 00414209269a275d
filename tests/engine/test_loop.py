"""The loop without sockets: what can be asked while its news are on their way."""

from __future__ import annotations

import time
from array import array

from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.scheduler.scheduler_state import SchedulerSnapshot
from inferengine.core.sequence import Request
from inferengine.engine.core import EngineCore
from inferengine.engine.lifecycle import Lifecycle
from inferengine.engine.loop import EngineLoop, LoopOutput
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import small_capacity


def test_who_hears_of_the_last_end_and_asks_finds_the_engine_idle() -> None:
    capacity = small_capacity()
    options = SchedulerOptions(capacity.max_num_batched_tokens, capacity.max_num_seqs)
    core = EngineCore(SimulatedExecutor(capacity), capacity, options, clock=time.monotonic)
    snapshots: list[SchedulerSnapshot] = []

    def post(news: LoopOutput) -> None:
        if news.output.finished:
            snapshots.append(loop.snapshot)
        if len(snapshots) == 2:
            loop.stop()

    loop = EngineLoop(core, Lifecycle(engine="e", epoch=bytes(8), clock=time.monotonic), post=post)
    for uid in (1, 2):
        params = SamplingParams(ignore_eos=True)
        loop.submit([Request(uid=uid, prompt_ids=array("I", range(20)), params=params, max_tokens=40 * uid)])
    loop.run()
    assert [snapshot.num_running for snapshot in snapshots[1:]] == [0]
    assert [snapshot.num_blocks_held for snapshot in snapshots[1:]] == [0]

"""The mixed soak: the whole service under mixed load for hours, while faults come at seeded random moments.

It alternates: CYCLE_S of load and faults, then a quiet window in which every request must end and every KV block come
back. Kills of whole processes fall in the first part of the time, `--kills`, so that at its end each process has lived
long enough for a verdict on its memory. The first faults are one of each kind of kill.

After each quiet window run.json is written, so that a run that is cut short can be judged as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.soak.asks import Asker
from benchmarks.soak.disturbances import Disturbances
from benchmarks.soak.faults import Faults
from benchmarks.soak.load import Load
from benchmarks.soak.samples import Sampler
from benchmarks.soak.service import Service
from benchmarks.soak.verdict import LEAST_LIFE_S
from inferengine.bench.environment import environment

SAMPLE_S = 10.0
CYCLE_S = 150.0
KILLS = 0.6  # most of the time in which processes are killed, as a share
END_S = 450.0  # how long open requests may take to end in a quiet window
CLEAN_S = 75.0  # how long their remains may stay: a detached request is kept for wire.resume_ttl_s


def kill_time_s(seconds: float, share: float | None) -> float:
    """Return for how long processes are killed in a run: a share of it, or as long as leaves each enough time to be
    judged. A run that is too short for that has no verdict anyway."""
    if share is not None:
        return share * seconds
    return min(KILLS * seconds, seconds - LEAST_LIFE_S) if seconds > LEAST_LIFE_S else KILLS * seconds


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self._environment = environment(seed=options.seed)
        self.disturbances = Disturbances()
        self.unclean: list[str] = []
        self.windows: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Do the whole run. Leaves its files in the folder."""
        options = self.options
        service = self._service = Service(self.folder, device=options.device, threads=options.threads, blocks=1024)
        try:
            await asyncio.to_thread(service.wait_ready)
            asker = Asker(service)
            await asker.wire.connect(60.0)
            await asker.second.connect(60.0)
            load = Load(service, asker, self.disturbances, options.rate, options.seed)
            await load.make_references()
            print(f"{len(load.references)} references", flush=True)
            with (self.folder / "samples.jsonl").open("w") as file:
                sampler = Sampler(service, load, file)
                faults = Faults(service, self.disturbances, options.seed)
                began_s = time.monotonic()

                def keep(*, complete: bool = False) -> None:
                    self._keep(load, faults, time.monotonic() - began_s, complete=complete)

                await self._cycles(load, faults, sampler, began_s, keep)
            ended_s = time.monotonic()
            await asker.close()
            code = await asyncio.to_thread(service.stop)
            with contextlib.suppress(OSError):
                shutil.copy(service.log, self.folder / "service.log")
        finally:
            service.close()
        if code != 0:
            self.unclean.append(f"`up` ended with exit code {code}")
        self._keep(load, faults, ended_s - began_s, complete=True)

    def _keep(self, load: Load, faults: Faults, seconds: float, *, complete: bool) -> None:
        """Write run.json: what there is so far, without the samples."""
        document = {
            "environment": self._environment,
            "complete": complete,
            "seconds": round(seconds, 1),
            "rate": self.options.rate,
            "seed": self.options.seed,
            "device": self.options.device,
            "own_disk": self._service.disk.is_own,
            "requests": sum(load.totals.values()),
            "compared": load.compared,
            "batches": load.batches,
            "totals": dict(sorted(load.totals.items())),
            "faults": dict(sorted(faults.counts.items())),
            "fault_list": faults.done,
            "windows": self.windows,
            "unexpected": load.unexpected + faults.unexpected,
            "unclean": self.unclean,
        }
        new = self.folder / "run.json.new"
        new.write_text(json.dumps(document, indent=1))
        new.rename(self.folder / "run.json")

    async def _cycles(
        self, load: Load, faults: Faults, sampler: Sampler, began_s: float, keep: Callable[[], None]
    ) -> None:
        end_s = began_s + self.options.hours * 3600.0
        kill_until_s = began_s + kill_time_s(self.options.hours * 3600.0, self.options.kills)
        loading = asyncio.create_task(load.run(end_s))
        sampling = asyncio.create_task(self._sample(sampler, load))
        try:
            if self.options.faults:
                await faults.each(self.options.faults.split(","))
                load.paused = True
                await self._quiet(load, sampler)
                return
            while (now := time.monotonic()) < end_s:
                await faults.some(min(now + self.options.cycle_s, end_s), kill_until_s)
                load.paused = True
                await self._quiet(load, sampler)
                load.paused = False
                keep()
        finally:
            loading.cancel()
            sampling.cancel()
            await asyncio.gather(loading, sampling, return_exceptions=True)

    async def _sample(self, sampler: Sampler, load: Load) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            engine = (await asyncio.to_thread(sampler.take))["engine"]
            if engine is not None and engine["evictions"] == 0:  # a new engine
                load.fill_cache(engine["num_blocks"], engine["block_size"])

    async def _quiet(self, load: Load, sampler: Sampler) -> None:
        """Check that every request ends and leaves nothing behind."""
        began_s = time.monotonic()
        while load.open and time.monotonic() < began_s + END_S:
            await asyncio.sleep(0.2)
        ended_s = time.monotonic()
        if load.open:
            self.unclean.append(f"{len(load.open)} requests did not end within {END_S:g} s")
        left: Any = "no figures"
        while time.monotonic() < ended_s + CLEAN_S:
            stats = await asyncio.to_thread(sampler.stats)
            if stats is not None:
                left = {"requests": stats["active_requests"], "blocks": stats["cache"]["used_pages"]}
                if not any(left.values()):
                    break
            await asyncio.sleep(0.5)
        else:
            self.unclean.append(f"after a quiet window there are left: {left}")
            print("UNCLEAN", time.strftime("%H:%M:%S"), self.unclean[-1], flush=True)
        clean_s = time.monotonic()
        while (orphans := self._service.orphans()) and time.monotonic() < clean_s + CLEAN_S:
            await asyncio.sleep(0.5)
        if orphans:
            self.unclean.append(f"processes {orphans} are left of parents that were killed")
        await asyncio.sleep(2.0)
        sample = await asyncio.to_thread(lambda: sampler.take(quiet=True))
        self.windows.append(
            {
                "t": sample["t"],
                "ended_after_s": round(ended_s - began_s, 1),
                "clean_after_s": round(clean_s - ended_s, 1),
            }
        )
        print(time.strftime("%H:%M:%S"), "quiet", self.windows[-1], json.dumps(dict(load.totals))[-300:], flush=True)


def raise_file_limit() -> None:
    """Raise the limit of open files as far as the system allows: a storm opens a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65_536)), hard))


def run(options: argparse.Namespace, folder: Path) -> None:
    """Do a mixed soak. Leaves samples.jsonl, run.json and service.log in `folder`."""
    raise_file_limit()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").unlink(missing_ok=True)  # of a run before, which samples of this one do not belong to
    asyncio.run(Soak(options, folder).run())

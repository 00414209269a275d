"""The mixed soak: the whole service under mixed load for hours, while faults come at seeded random moments.

It alternates: CYCLE_S of load and faults, then a quiet window in which every request must end and every KV block come
back. Kills of whole processes fall in the first part of the time, `--kills`, so that at its end each process has lived
long enough for a verdict on its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.soak.asks import Asker
from benchmarks.soak.disturbances import Disturbances
from benchmarks.soak.faults import Faults
from benchmarks.soak.load import Load
from benchmarks.soak.samples import Sampler
from benchmarks.soak.service import Service
from inferengine.bench.environment import environment

SAMPLE_S = 10.0
CYCLE_S = 150.0
KILLS = 0.6
END_S = 450.0  # how long open requests may take to end in a quiet window
CLEAN_S = 75.0  # how long their remains may stay: a detached request is kept for wire.resume_ttl_s


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.disturbances = Disturbances()
        self.unclean: list[str] = []
        self.windows: list[dict[str, Any]] = []

    async def run(self) -> dict[str, Any]:
        """Do the whole run. Returns its results, without the samples."""
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
                await self._cycles(load, faults, sampler, began_s)
                seconds = time.monotonic() - began_s
            await asker.close()
            code = await asyncio.to_thread(service.stop)
            with contextlib.suppress(OSError):
                shutil.copy(service.log, self.folder / "service.log")
        finally:
            service.close()
        if code != 0:
            self.unclean.append(f"`up` ended with exit code {code}")
        return {
            "seconds": round(seconds, 1),
            "rate": options.rate,
            "seed": options.seed,
            "device": options.device,
            "own_disk": service.disk.is_own,
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

    async def _cycles(self, load: Load, faults: Faults, sampler: Sampler, began_s: float) -> None:
        end_s = began_s + self.options.hours * 3600.0
        loading = asyncio.create_task(load.run(end_s))
        sampling = asyncio.create_task(self._sample(sampler, load))
        try:
            if self.options.faults:
                await faults.each(self.options.faults.split(","))
                load.paused = True
                await self._quiet(load, sampler)
                return
            while (now := time.monotonic()) < end_s:
                kills = now < began_s + self.options.kills * self.options.hours * 3600.0
                await faults.some(min(now + self.options.cycle_s, end_s), kills=kills)
                load.paused = True
                await self._quiet(load, sampler)
                load.paused = False
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


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Do a mixed soak. Leaves samples.jsonl, run.json and service.log in `folder`."""
    raise_file_limit()
    folder.mkdir(parents=True, exist_ok=True)
    document = {"environment": environment(seed=options.seed), **asyncio.run(Soak(options, folder).run())}
    (folder / "run.json").write_text(json.dumps(document, indent=1))
    return document

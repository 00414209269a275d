"""An engine tells how close its steps come to what its device allows, where its executor knows the device."""

from __future__ import annotations

from inferengine.client import Client
from inferengine.core.step_time import AttentionGroup, DevicePeaks, ModelWork, Roofline
from inferengine.engine.service import EngineService
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import address_of, run_service, small_capacity, wait_until

WORK = ModelWork(1e6, 0.0, 1.0, 1.0, (AttentionGroup(1.0, 1.0, None),))


class KnownDevice(SimulatedExecutor):
    """A device that reads 2 GB/s, so that no step of WORK can take less than half a millisecond."""

    def roofline(self) -> Roofline:
        return Roofline(WORK, DevicePeaks(2e9, 1e15, "test"))


def run_some(service: EngineService) -> Client:
    client = Client(address_of(service))
    client.connect()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    stream = client.submit(range(1, 20), params).streams[0]
    assert sum(len(delta.token_ids) for delta in stream) == 8
    return client


def test_stats_and_status_tell_the_share_of_each_phase() -> None:
    def build() -> KnownDevice:
        return KnownDevice(small_capacity(), step_s=0.001)

    with run_service(build) as service:
        client = run_some(service)
        stats = client.admin("stats")
        wait_until(lambda: bool((client.status or {}).get("roofline_share")))
        assert client.status is not None
        client.close()
    assert set(stats["roofline_share"]) == set(client.status["roofline_share"]) == {"prefill", "decode"}
    assert all(0 < share <= 0.51 for share in stats["roofline_share"].values()), "a step takes twice the least time"
    roofline = stats["roofline"]
    assert (roofline["steps"], roofline["peak_source"]) == ({"prefill": 1, "decode": 7}, "test")
    assert roofline["step_seconds"]["decode"] >= 7 * 0.001
    assert roofline["least_seconds"]["decode"] >= 7 * 0.0005


def test_an_executor_that_knows_no_device_tells_nothing() -> None:
    with run_service() as service:
        client = run_some(service)
        stats = client.admin("stats")
        client.close()
    assert (stats["roofline_share"], stats["roofline"]) == ({}, {})

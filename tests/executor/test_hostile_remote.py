"""A device over gRPC that answers what no device does: the engine hears at once that it is lost, and why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from inferengine.config import Config
from inferengine.core.executor import BlockUpdates, Capacity, DeviceLost, StepPlan, StepResult
from inferengine.executor.remote import payloads
from inferengine.executor.remote.remote_executor import MOST_TEXT, RemoteExecutor
from tests.engine.builders import VOCAB_SIZE, small_capacity, wait_until

CAPACITY = small_capacity()
DESCRIPTION = {"capacity": CAPACITY, "max_in_flight": 1, "dtype": "float32", "device": "cpu"}
PLAN = StepPlan(0, [3, 4], [5, 9], [1, 1], [True, True], 2, 2, [], [BlockUpdates([], [], [])])
DRAFTS = PLAN._replace(counts=[3, 1], num_tokens=4, num_drafts=[2, 0])
STEP_TIMEOUT_S = 60.0
Answers = Callable[[], Iterator[bytes]]


def says(*messages: bytes) -> Answers:
    return lambda: iter(messages)


LOADED, READY, NOTHING = says(payloads.encode("loaded", DESCRIPTION)), says(payloads.encode("ready")), says()


class FakeDevice:
    """A gRPC server whose answers the test chooses."""

    def __init__(
        self,
        *,
        load: Answers = LOADED,
        begin: Answers = READY,
        step: Answers = NOTHING,
    ) -> None:
        def steps(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            yield from begin()
            for _ in requests:
                yield from step()

        methods = {
            "Load": grpc.unary_stream_rpc_method_handler(lambda request, context: load()),
            "WarmUp": grpc.unary_stream_rpc_method_handler(lambda request, context: iter(())),
            "Steps": grpc.stream_stream_rpc_method_handler(steps),
        }
        self._server = grpc.server(ThreadPoolExecutor(4), options=payloads.CHANNEL_OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(payloads.SERVICE, methods),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        remote = {"address": f"127.0.0.1:{port}", "step_timeout_s": STEP_TIMEOUT_S}
        self.executor = RemoteExecutor(Config().with_values(remote=remote))

    def __enter__(self) -> RemoteExecutor:
        return self.executor

    def __exit__(self, *_: object) -> None:
        self.executor.close()
        self._server.stop(0).wait()


def begin(executor: RemoteExecutor) -> Capacity:
    capacity = executor.load(lambda phase, share: None)
    executor.warm_up(lambda phase, share: None)
    return capacity


def described(**changes: Any) -> bytes:
    return payloads.encode("loaded", {**DESCRIPTION, **changes})


def test_what_a_device_says_of_itself_is_taken() -> None:
    with FakeDevice() as executor:
        assert begin(executor) == CAPACITY


@pytest.mark.parametrize(
    "answer",
    [
        (b"\xff\xff\xff",),
        (),
        (payloads.encode("loaded", [1, 2]),),
        (payloads.encode("loaded", {"capacity": CAPACITY}),),
        (payloads.encode("progress"), described()),
        (described(capacity=CAPACITY._replace(max_num_seqs=0)),),
        (described(capacity=CAPACITY._replace(block_size=-1)),),
        (described(capacity=CAPACITY._replace(groups=[])),),
        (described(capacity=CAPACITY._replace(has_states=True, num_snapshots=-1)),),
        (described(capacity=CAPACITY._replace(has_states=True, num_snapshots=10**15)),),
        (described(capacity=CAPACITY._replace(groups=[CAPACITY.groups[0]._replace(num_blocks=10**15)])),),
        (described(max_in_flight=0),),
        (described(roofline=[1, 2]),),
    ],
    ids=[
        "bytes",
        "nothing",
        "no map",
        "missing keys",
        "odd progress",
        "no slots",
        "negative blocks",
        "no groups",
        "negative snapshots",
        "snapshots beyond any memory",
        "blocks beyond any memory",
        "no steps in flight",
        "odd roofline",
    ],
)
def test_a_description_that_no_device_gives_names_the_address_and_the_remedy(answer: tuple[bytes, ...]) -> None:
    named = pytest.raises(DeviceLost, match=r"127\.0\.0\.1:\d+ answers Load .*: compare versions")
    with FakeDevice(load=says(*answer)) as executor, named:
        executor.load(lambda phase, share: None)


@pytest.mark.parametrize("answer", [b"\xff\xff", payloads.encode("hello")])
def test_a_stream_that_does_not_begin_with_ready_is_no_device_s(answer: bytes) -> None:
    with FakeDevice(begin=says(answer)) as executor, pytest.raises(DeviceLost, match=r"answers Steps .*: compare"):
        begin(executor)


def result(*fields: Any) -> bytes:
    return payloads.encode("result", fields)


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xfe",
        payloads.encode(),
        payloads.encode("hello", 1),
        payloads.encode("error", "X"),
        result(),
        result([7]),
        result([7, 7, 7]),
        result([7, VOCAB_SIZE]),
        result([7, -1]),
        result([7, 7], {2: [[-0.5, 1, [1], [-0.5]]]}),
        result([7, 7], None, {9: "NOT_A_NUMBER"}),
        result([7, 7], None, {0: "NO_SUCH"}),
        result([7, 7], None, None, [2, 0]),
        result([7, 7], None, None, None, {-1: []}),
        result([7, 7], None, None, None, None, {5: b"\0"}),
    ],
    ids=[
        "bytes",
        "empty",
        "another kind",
        "half an error",
        "no fields",
        "a token too few",
        "a token too many",
        "a token beyond the vocabulary",
        "a token below 0",
        "log-probabilities of no row",
        "a failure of no row",
        "an unknown failure",
        "counts that cannot be",
        "prompt log-probabilities of no row",
        "an embedding of no row",
    ],
)
def test_what_is_no_result_of_its_step_loses_the_device_at_once(message: bytes) -> None:
    heard: list[BaseException] = []
    with FakeDevice(step=says(message)) as executor:
        executor.on_lost(heard.append)
        begin(executor)
        began_s = time.monotonic()
        with pytest.raises(DeviceLost, match="sent what is no result") as lost:
            executor.execute(PLAN).result()
        assert time.monotonic() - began_s < STEP_TIMEOUT_S / 2
        assert len(str(lost.value)) <= MOST_TEXT
        with pytest.raises(DeviceLost):
            executor.execute(PLAN)
    assert heard == [lost.value]


@pytest.mark.parametrize(("counts", "is_one"), [([3, 1], True), ([1, 1], True), ([4, 1], False), ([1, 2], False)])
def test_rows_emit_at_most_their_draft_tokens_and_one(counts: list[int], is_one: bool) -> None:
    found = StepResult([7] * sum(counts), num_emitted=counts)
    with FakeDevice(step=says(payloads.encode_result(found))) as executor:
        begin(executor)
        future = executor.execute(DRAFTS)
        if is_one:
            assert future.result() == found
        else:
            with pytest.raises(DeviceLost):
                future.result()


def test_a_result_that_no_step_waits_for_loses_the_device() -> None:
    twice = payloads.encode_result(StepResult([7, 7]))
    heard: list[BaseException] = []
    with FakeDevice(step=says(twice, twice)) as executor:
        executor.on_lost(heard.append)
        begin(executor)
        assert executor.execute(PLAN).result().token_ids == [7, 7]
        wait_until(lambda: bool(heard))
        with pytest.raises(DeviceLost):
            executor.execute(PLAN)


def test_a_device_s_error_is_cut() -> None:
    with FakeDevice(step=says(payloads.encode("error", "E" * 10**6, "m", False))) as executor:
        begin(executor)
        with pytest.raises(RuntimeError, match="on the remote device") as error:
            executor.execute(PLAN).result()
    assert len(str(error.value)) <= MOST_TEXT

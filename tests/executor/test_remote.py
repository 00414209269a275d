"""A device that is lent over gRPC gives what a local one gives; one that is lost ends its engine, not its requests."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from inferengine.config import Config
from inferengine.core.executor import BlockUpdates, Capacity, DeviceLost, Progress, StepPlan, StepResult, TokenLogprobs
from inferengine.core.sequence import RowFailure
from inferengine.errors import ConfigError, ExitCode, Unreachable
from inferengine.executor.remote import payloads
from inferengine.executor.remote.executor_server import ExecutorServer
from inferengine.executor.remote.remote_executor import RemoteExecutor
from inferengine.executor.torch_executor import build_executor
from inferengine.llm import LLM
from inferengine.sampling_params import SamplingParams
from tests.core.builders import ThirdsGrammar
from tests.engine.builders import RawClient, address_of, run_service, wait_until
from tests.executor.engine import Engine
from tests.models.checkpoints import SHAPES, make_model, model_of, save

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
EMBEDDED = {"engine": {"device": "cpu", **SIZES}, "cache": {"num_blocks": 64}}


class WarmRemote(RemoteExecutor):
    """The builder of engines loads and does not warm up."""

    def load(self, progress: Progress) -> Capacity:
        capacity = super().load(progress)
        self.warm_up(progress)
        return capacity


@contextmanager
def lent(config: Config) -> Iterator[Config]:
    """Lend a device of this configuration in a thread, and yield how an engine names it."""
    config = config.with_values(remote={"listen": "127.0.0.1:0"})
    server = ExecutorServer(config, lambda: build_executor(config))
    server.start()
    try:
        yield config.with_values(remote={"address": f"127.0.0.1:{server.port}", "connect_timeout_s": 20.0})
    finally:
        server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def remotely() -> Iterator[Callable[..., Engine]]:
    """Yield what makes engines whose device is lent."""
    devices: list[Any] = []
    executors: list[RemoteExecutor] = []

    def lend(config: Config) -> RemoteExecutor:
        device = lent(config)
        devices.append(device)
        executors.append(WarmRemote(device.__enter__()))
        return executors[-1]

    def make(*args: Any, **options: Any) -> Engine:
        engine = Engine(*args, build=lend, **options)
        assert isinstance(engine.executor, RemoteExecutor)
        return engine

    yield make
    for executor in executors:
        executor.close()
    for device in devices:
        device.__exit__(None, None, None)


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(10, 300) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    ("engine", "values"),
    [
        ({}, {}),
        ({}, {"temperature": 0.9, "seed": 7, "top_k": 40, "frequency_penalty": 0.5}),
        ({"num_blocks": 12, "prefix_caching": False}, {}),  # preemption
        ({"num_blocks": 12, "preemption": "swap", "swap_is_cheap": True}, {"temperature": 0.8, "seed": 3}),
    ],
    ids=["greedy", "sampled", "preempted", "swapped"],
)
def test_outputs_are_those_of_a_local_device(
    folder: Path, remotely: Callable[..., Engine], engine: dict[str, Any], values: dict[str, Any]
) -> None:
    prompts = prompts_of(20, 7, 31, 12)
    expected = Engine(folder, **engine).generate(prompts, 24, **values)
    assert remotely(folder, **engine).generate(prompts, 24, **values) == expected


def test_a_prefix_of_a_model_with_states_begins_from_a_snapshot_on_the_device(
    tmp_path: Path, remotely: Callable[..., Engine]
) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    folder = save(model_of("Lfm2Config", {**SHAPES, "hidden_size": 60, "head_dim": 10, **layers}), tmp_path)
    prompt = prompts_of(40)[0]
    engines = [Engine(folder), remotely(folder)]
    for engine in engines:
        engine.generate([prompt], 4)
        uid = engine.submit([*prompt, 11], 6)
        engine.run()
        assert engine.finished[uid].num_cached == 32
    assert engines[0].outputs == engines[1].outputs


def test_a_cached_prefix_and_log_probabilities_are_those_of_a_local_device(
    folder: Path, remotely: Callable[..., Engine]
) -> None:
    prompt = prompts_of(40)[0]
    engines = [Engine(folder), remotely(folder)]
    for engine in engines:
        engine.generate([prompt], 4)
        uid = engine.submit([*prompt, 11], 6, logprobs=3, prompt_logprobs=2)
        vector = engine.embed(prompt)
        engine.run()
        assert engine.finished[uid].reason == "length"
        assert engine.embeddings[vector]
    assert engines[0].outputs == engines[1].outputs
    assert engines[0].logprobs == engines[1].logprobs
    assert engines[0].prompt_logprobs == engines[1].prompt_logprobs
    assert engines[0].embeddings == engines[1].embeddings


@pytest.mark.parametrize("values", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_rows_with_and_without_a_grammar_are_those_of_a_local_device(
    folder: Path, remotely: Callable[..., Engine], values: dict[str, Any]
) -> None:
    """Masks are sent after the step that they belong to."""
    prompts = prompts_of(9, 14, 5)
    engines = [Engine(folder), remotely(folder)]
    for engine in engines:
        engine.submit(prompts[0], 12, grammar=ThirdsGrammar(), **values)
        engine.submit(prompts[1], 16, **values)
        engine.submit(prompts[2], 14, grammar=ThirdsGrammar(), **values)
        engine.run()
    assert engines[0].outputs == engines[1].outputs
    for uid in (1, 3):
        output = engines[1].outputs[uid]
        assert ThirdsGrammar().validate(output) == len(output) > 5


CHATS = [[{"role": "user", "content": text}] for text in ("What is a KV cache?", "Hello!", "What is 12 + 30?")]
ASKED = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=20),
    "penalties": SamplingParams(temperature=0.7, top_k=20, seed=3, frequency_penalty=0.4, max_tokens=20),
    "log-probabilities": SamplingParams(temperature=0.0, logprobs=2, max_tokens=12),
}


@pytest.fixture(scope="module")
def local_llm() -> Iterator[LLM]:
    with LLM(**EMBEDDED, speculation={"method": "none"}) as llm:
        yield llm


@pytest.fixture(scope="module", params=["none", "ngram", "draft"])
def remote_llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Yield an LLM on a device elsewhere, without and with draft tokens; both sides are told the method."""
    config = Config().with_values(**EMBEDDED, speculation={"method": request.param, "max_drafts": 3})
    with lent(config) as there, LLM(config=there.with_values(engine={"executor": "remote"})) as llm:
        yield llm


@pytest.mark.parametrize("name", ASKED)
def test_the_class_llm_gives_on_a_remote_device_what_it_gives_on_its_own(
    local_llm: LLM, remote_llm: LLM, name: str
) -> None:
    expected = [result.choices[0] for result in local_llm.chat(CHATS, ASKED[name])]
    found = [result.choices[0] for result in remote_llm.chat(CHATS, ASKED[name])]
    assert [choice.token_ids for choice in found] == [choice.token_ids for choice in expected]
    for left, right in zip(found, expected, strict=True):
        ours, theirs = left.logprobs or [], right.logprobs or []
        assert [item.logprob for item in ours] == pytest.approx([item.logprob for item in theirs], abs=1e-4)


def test_a_remote_device_drafts_what_its_draft_model_proposes(remote_llm: LLM) -> None:
    remote_llm.chat(CHATS, ASKED["greedy"])
    method = remote_llm.config.speculation.method
    num_accepted = remote_llm.core.scheduler.snapshot().num_drafts_accepted
    assert remote_llm.capacity.has_draft_model == (method == "draft")
    assert method != "draft" or num_accepted > 0


def test_an_output_of_a_remote_device_matches_its_grammar(local_llm: LLM, remote_llm: LLM) -> None:
    """With draft tokens each of them has a mask of its own."""
    pattern = "(red|green|blue), (one|two|three) [a-z]{3,9}\\."
    for params in (ASKED["greedy"], ASKED["sampled"]):
        expected = [result.choices[0] for result in local_llm.chat(CHATS, params, guided_regex=pattern)]
        found = [result.choices[0] for result in remote_llm.chat(CHATS, params, guided_regex=pattern)]
        assert [choice.text for choice in found] == [choice.text for choice in expected]
        assert all(re.fullmatch(pattern, choice.text) for choice in found)


def test_the_device_stays_loaded_for_the_next_engine(folder: Path) -> None:
    config = Config().with_values(
        model={"path": str(folder)}, engine={"device": "cpu", **SIZES}, cache={"num_blocks": 32, "block_size": 8}
    )
    with lent(config) as there:
        first = WarmRemote(there)
        first.load(lambda phase, share: None)
        second = WarmRemote(there)
        with pytest.raises(DeviceLost, match="another engine"):
            second.load(lambda phase, share: None)
        second.close()
        first.close()
        phases: list[str] = []
        deadline = time.monotonic() + 20.0
        while True:  # the device hears of the first one's end a moment later
            third = WarmRemote(there)
            try:
                third.load(lambda phase, share: phases.append(phase))
                break
            except DeviceLost:
                third.close()
                assert time.monotonic() < deadline
                time.sleep(0.01)
        third.close()
        assert set(phases) == {"waiting for the remote device"}


def test_another_model_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = save(make_model("gpt2"), tmp_path / "other")
    config = Config().with_values(model={"path": str(folder)}, engine={"device": "cpu"})
    with lent(config) as there:
        executor = RemoteExecutor(there.with_values(model={"path": str(other)}))
        with pytest.raises(ConfigError) as refusal:
            executor.load(lambda phase, share: None)
        executor.close()
    assert refusal.value.field == "model.path"


def test_a_device_that_is_not_there_is_named(folder: Path) -> None:
    remote = {"address": "127.0.0.1:1", "connect_timeout_s": 0.2}
    executor = RemoteExecutor(Config().with_values(model={"path": str(folder)}, remote=remote))
    with pytest.raises(Unreachable) as refusal:  # with an exit code after which the engine is started again
        executor.load(lambda phase, share: None)
    executor.close()
    assert refusal.value.field == "remote.address"


def test_beyond_this_host_a_device_is_lent_to_certificates_only(folder: Path) -> None:
    config = Config().with_values(model={"path": str(folder)}, remote={"listen": "0.0.0.0:0"})
    with pytest.raises(ConfigError) as refusal:
        ExecutorServer(config, lambda: build_executor(config))
    assert refusal.value.field == "remote.listen"


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a certificate with")
def test_certificates_are_asked_for_on_both_sides(folder: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    tls = {"tls_ca": str(certificate), "tls_certificate": str(certificate), "tls_key": str(key)}
    config = Config().with_values(
        model={"path": str(folder)},
        engine={"device": "cpu", **SIZES},
        cache={"num_blocks": 32, "block_size": 8},
        remote=tls,
    )
    with lent(config) as there:
        executor = WarmRemote(there)
        assert executor.load(lambda phase, share: None).max_num_seqs == SIZES["max_num_seqs"]
        executor.close()
        for missing in ({"tls_certificate": "", "tls_key": ""}, dict.fromkeys(tls, "")):
            stranger = RemoteExecutor(there.with_values(remote={**missing, "connect_timeout_s": 0.5}))
            with pytest.raises((ConfigError, DeviceLost)):
                stranger.load(lambda phase, share: None)
            stranger.close()


def test_a_step_that_fails_there_fails_here(folder: Path, remotely: Callable[..., Engine]) -> None:
    engine = remotely(folder)
    future = engine.executor.execute(make_broken_plan())
    with pytest.raises(RuntimeError, match="on the remote device"):
        future.result()
    assert len(engine.generate(prompts_of(5), 3)[0]) == 3


def make_broken_plan() -> Any:
    return StepPlan(0, [99], [0], [1], [True], 1, 1, [], [BlockUpdates([99], [0], [0])])


def test_a_result_survives_the_wire() -> None:
    row = TokenLogprobs(-0.5, 2, [1, 2], [-0.25, -0.5])
    result = StepResult([1, 2], {0: [row]}, {1: RowFailure.NOT_A_NUMBER}, [1, 1], {2: [row]}, {3: b"\0\1"})
    kind, parts = payloads.decode(payloads.encode_result(result))
    assert (kind, payloads.read_result(parts[0])) == ("result", result)


def test_a_message_is_the_one_that_the_proto_file_publishes() -> None:
    proto = (Path(payloads.__file__).parent / "executor.proto").read_text()
    package = re.search(r"^package (.+);", proto, re.MULTILINE)
    methods = re.findall(r"rpc (\w+)\((?:stream )?google\.protobuf\.BytesValue\)", proto)
    assert package is not None
    assert f"{package.group(1)}.Executor" == payloads.SERVICE
    assert methods == ["Load", "WarmUp", "Steps"]
    assert BytesValue.FromString(payloads.encode("flush")).value == b"\x91\xa5flush"


def test_what_is_no_message_breaks_its_own_stream_only(folder: Path) -> None:
    config = Config().with_values(
        model={"path": str(folder)}, engine={"device": "cpu", **SIZES}, cache={"num_blocks": 32, "block_size": 8}
    )
    with lent(config) as there:
        executor = WarmRemote(there)
        executor.load(lambda phase, share: None)
        executor._outbox.put(b"\xff\xff")
        with pytest.raises(DeviceLost):
            executor.execute(make_broken_plan()).result()
        executor.close()
        with grpc.insecure_channel(there.remote.address) as channel:
            answer = channel.unary_stream(f"/{payloads.SERVICE}/WarmUp")(payloads.encode())
            assert list(answer) == []


def test_an_engine_ends_when_the_process_that_computes_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flags = ["--remote.listen", "127.0.0.1:0", "--engine.device", "cpu", "--engine.max_num_seqs", "4"]
    flags += ["--engine.max_num_batched_tokens", "64", "--cache.num_blocks", "64", "--speculation.method", "none"]
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "inferengine.cli", "executor", *flags],
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        wait_until(lambda: "lent on port" in log.read_text() or child.poll() is not None, 90.0)
        found = re.search(r"lent on port (\d+)", log.read_text())
        assert found is not None, log.read_text()
        remote = {"address": f"127.0.0.1:{found.group(1)}"}
        config = Config().with_values(remote=remote)
        with run_service(lambda: RemoteExecutor(config), remote=remote) as service:
            assert service.lifecycle.state == "READY", service.lifecycle.last_error
            client = RawClient(address_of(service))
            client.submit(1, max_tokens=900)
            wait_until(lambda: service.loaded.loop.stats.num_output_tokens > 3)
            os.kill(child.pid, signal.SIGKILL)
            row = client.collect({1}).done[1][0]
            assert (row.reason, row.detail[0]) == ("error", "engine_restarted")
            assert service.wait(60.0) == ExitCode.CRASH
            client.close()
    finally:
        child.kill()
        child.wait(30)

"""From SUBMIT to ACCEPT or REJECT: everything a direct producer can get wrong is answered at once, by name."""

from __future__ import annotations

import time
from typing import Any

import pytest
import zmq

from inferengine.core.sequence import choice_seed
from inferengine.engine.io.intake import TEXT_TIMEOUT_S, PendingSubmission, PendingSubmissions
from inferengine.engine.io.publisher import SubmittedRequest
from inferengine.engine.service import EngineService
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor
from inferengine.wire import messages
from inferengine.wire.messages import Accept, Attach, Credit, Hello, Kind, Pong, Reject, Step, Submit, Welcome
from tests.engine.builders import VOCAB_SIZE, RawClient, check_idle, run_held, run_service, small_capacity, wait_until
from tests.engine.conftest import Connect

ID = bytes(range(16))


def test_a_request_gives_exactly_its_tokens_and_one_terminal_row(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    client.submit(1, max_tokens=5, prompt=[1, 2, 3])
    collected = client.collect({1})
    (done,) = collected.done[1]
    assert len(collected.tokens[1]) == 5
    assert (done.reason, done.prompt_tokens, done.completion_tokens) == ("length", 3, 5)
    accept = collected.accepts[1][0]
    assert collected.accepts[1] == [Accept(accept.id, 1, 3, 1, False, seed=accept.seed)]
    check_idle(engine)


def test_mixed_lengths_give_exact_counts(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    lengths = {stream: 1 + stream * 7 % 40 for stream in range(1, 60)}
    for stream, length in lengths.items():
        client.submit(stream, max_tokens=length)
    collected = client.collect(set(lengths))
    assert {stream: len(tokens) for stream, tokens in collected.tokens.items()} == lengths
    check_idle(engine)


def test_choices_speak_on_neighbouring_streams_with_draws_of_their_own(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    client.submit(10, max_tokens=6, params={"n": 3, "seed": 5})
    collected = client.collect({10, 11, 12})
    assert collected.accepts[10][0].n == 3
    assert len({tuple(collected.tokens[stream]) for stream in (10, 11, 12)}) == 3
    check_idle(engine)


def test_a_seed_gives_the_same_tokens_again(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    for stream in (1, 2, 3):
        client.submit(stream, params={"seed": 7 if stream < 3 else 8})
    tokens = client.collect({1, 2, 3}).tokens
    assert tokens[1] == tokens[2] != tokens[3]


def test_seeds_of_choices_and_neighbours_do_not_meet() -> None:
    seeds = [choice_seed(seed, choice) for seed in range(50) for choice in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert choice_seed(42, 0) == 42


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"params": {"temperature": -1}}, "invalid_request", "params.temperature"),
        ({"params": {"top_p": 0}}, "invalid_request", "params.top_p"),
        ({"params": {"top_k": -5}}, "invalid_request", "params.top_k"),
        ({"params": {"top_k": 2**31}}, "invalid_request", "params.top_k"),
        ({"params": {"temperature": 10**19}}, "invalid_request", "params.temperature"),
        ({"params": {"min_tokens": 2**62, "max_tokens": None}}, "context_length_exceeded", "min_tokens"),
        ({"params": {"max_tokens": 0}}, "invalid_request", "params.max_tokens"),
        ({"params": {"max_tokens": "many"}}, "invalid_request", "params.max_tokens"),
        ({"params": {"n": 1000}}, "invalid_request", "params.n"),
        ({"params": {"stop": ["x"]}}, "invalid_request", "params.stop"),
        ({"params": {"stop": [""]}, "reply": "text"}, "invalid_request", "params.stop"),
        ({"params": {"logprobs": 1000}}, "invalid_request", "params.logprobs"),
        ({"params": {"max_tokens": 5000}}, "context_length_exceeded", "max_tokens"),
        ({"prompt": [1] * 1024}, "context_length_exceeded", "prompt"),
        ({"text": ""}, "invalid_request", "text"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content"),
        ({"stream": 2**32 - 1}, "invalid_request", "stream"),
    ],
)
def test_a_bad_field_is_refused_by_name(
    engine: EngineService, connect: Connect, fields: dict[str, Any], code: str, field: str
) -> None:
    client = connect(engine)
    fields = dict(fields)
    stream = fields.pop("stream", 3)
    client.submit(stream, id=ID, **fields)
    reject = client.expect(Reject)
    assert (reject.id, reject.stream, reject.code, reject.field) == (ID, stream, code, field)
    assert 0 < len(reject.message) <= 1000
    client.submit(4)
    assert len(client.collect({4}).tokens[4]) == 4
    check_idle(engine)


def test_a_penalty_that_the_device_cannot_hold_is_refused_in_the_engine(
    engine: EngineService, connect: Connect
) -> None:
    client = connect(engine)
    client.submit(1, params={"repetition_penalty": 1e-308})
    reject = client.expect(Reject)
    assert (reject.code, reject.field) == ("invalid_request", "params.repetition_penalty")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1, VOCAB_SIZE]},
        {"prompt": [2**32 - 1]},
        {"params": {"stop_token_ids": [VOCAB_SIZE]}},
        {"params": {"allowed_token_ids": [-1]}},
        {"params": {"logit_bias": {str(VOCAB_SIZE): 1.0}}},
    ],
)
def test_an_id_outside_the_vocabulary_is_refused_in_the_engine_whatever_the_field(
    engine: EngineService, connect: Connect, fields: dict[str, Any]
) -> None:
    client = connect(engine)
    client.submit(1, **fields)
    reject = client.expect(Reject)
    assert reject.code == "invalid_request"
    assert "vocabulary" in reject.message


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_blocks_nobody(connect: Connect) -> None:
    capacity = small_capacity(num_blocks=8)  # 128 tokens
    with run_service(lambda: SimulatedExecutor(capacity)) as engine:
        client = connect(engine)
        client.submit(1, prompt=[1] * 200)
        client.submit(2, max_tokens=8)
        collected = client.collect({1, 2})
        assert collected.rejects[1][0].code == "prompt_never_fits"
        assert len(collected.tokens[2]) == 8
        check_idle(engine)


def test_demand_above_the_pool_finishes_every_request(connect: Connect) -> None:
    capacity = small_capacity(num_blocks=12)  # 192 tokens, of which each request wants 60
    with run_service(lambda: SimulatedExecutor(capacity)) as engine:
        client = connect(engine)
        for stream in range(1, 31):
            client.submit(stream, max_tokens=50, prompt=[stream] * 10)
        collected = client.collect(set(range(1, 31)))
        assert {len(tokens) for tokens in collected.tokens.values()} == {50}
        assert {rows[0].reason for rows in collected.done.values()} == {"length"}
        assert engine.core is not None
        assert engine.core.scheduler.stats.num_preemptions > 0
        check_idle(engine)


def test_top_k_zero_and_minus_one_mean_off(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    client.submit(1, params={"top_k": 0})
    client.submit(2, params={"top_k": -1})
    assert {rows[0].reason for rows in client.collect({1, 2}).done.values()} == {"length"}


def test_a_full_queue_is_refused_with_a_time_to_come_back(connect: Connect) -> None:
    with run_held(small_capacity(max_num_seqs=1), scheduler={"max_queued_requests": 2}) as (engine, device):
        client = connect(engine)
        for stream in range(1, 8):
            client.submit(stream, max_tokens=3)
        client.settle()
        device.let()
        collected = client.collect(set(range(1, 8)))
        refused = [rows[0] for rows in collected.rejects.values()]
        assert refused
        assert all(row.code == "overloaded" and row.retryable and (row.retry_after_ms or 0) > 0 for row in refused)
        assert len(collected.done) + len(refused) == 7
        assert len(collected.done) >= 3
        check_idle(engine)


def test_a_tenant_has_its_own_limit(connect: Connect) -> None:
    with run_held(scheduler={"max_tenant_requests": 1}) as (engine, device):
        client = connect(engine)
        for stream, tenant in ((1, "a"), (2, "a"), (3, "b")):
            client.submit(stream, tenant=tenant)
        client.settle()
        device.let()
        collected = client.collect({1, 2, 3})
        assert [row.code for rows in collected.rejects.values() for row in rows] == ["rate_limited"]
        assert set(collected.rejects) == {2}


@pytest.mark.parametrize(
    ("loud", "quiet"), [({}, {}), ({"share": ["a"]}, {"share": ["b"]}), ({"share": ["a", "x"]}, {"share": ["a", "y"]})]
)
def test_producers_share_the_engine_and_those_without_a_name_by_connection(
    connect: Connect, loud: dict[str, Any], quiet: dict[str, Any]
) -> None:
    with run_held(small_capacity(max_num_seqs=1)) as (engine, device):
        flood, one = connect(engine), connect(engine)
        for stream in range(1, 21):
            flood.submit(stream, max_tokens=4, **loud)
        flood.settle()
        one.submit(1, max_tokens=4, **quiet)
        one.settle()
        device.let(16)  # the flood takes 80
        assert [row.reason for row in one.collect({1}).done[1]] == ["length"]
        device.let()
        flood.collect(set(range(1, 21)))
        check_idle(engine)


def test_a_share_is_divided_from_the_tenant_to_the_client_s_names(connect: Connect) -> None:
    with run_held() as (engine, device):
        client = connect(engine)
        client.submit(1, tenant="team", share=["10.0.0.1", "user", "more"])
        client.submit(2, share=["10.0.0.1", "user"])
        client.submit(3, tenant="team")
        client.submit(4)
        client.settle()
        shares = [submission.share for submission in engine.io.publisher.submissions.values()]
        device.let()
        client.collect({1, 2, 3, 4})
    own = client.socket.getsockopt(zmq.ROUTING_ID).hex()
    assert shares == [("team", "10.0.0.1", "user"), ("10.0.0.1", "user", ""), ("team", "", ""), (own, "", "")]


def test_errors_are_told_during_a_step_that_does_not_end(connect: Connect) -> None:
    with run_held() as (engine, _):
        client = connect(engine)
        client.submit(1, max_tokens=1)
        wait_until(lambda: engine.core is not None and bool(engine.core.scheduler.running))
        client.submit(2, params={"temperature": 9})
        client.send_frames([messages.header(Kind.SUBMIT), b"\xc1"])
        client.ping(9)
        assert client.expect(Reject).field == "params.temperature"
        assert client.expect(Reject).code == "protocol_error"
        assert client.expect(Pong).nonce == 9
        assert not [message for message in client.pending if isinstance(message, Step)]


class TestIds:
    def test_the_same_id_twice_never_runs_twice(self, connect: Connect) -> None:
        with run_service(step_s=0.005) as engine:
            client = connect(engine)
            client.submit(1, id=ID, max_tokens=10)
            client.submit(2, id=ID, max_tokens=10)
            collected = client.collect({1, 2})
            assert collected.tokens[1] == collected.tokens[2]
            assert collected.accepts[2][0].attached
            assert engine.core is not None
            assert engine.core.scheduler.stats.num_submitted == 1

    def test_an_id_that_has_ended_is_read_again_not_run_again(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.submit(1, id=ID, max_tokens=6)
        first = client.collect({1}).tokens[1]
        client.submit(2, id=ID, max_tokens=6)
        assert client.collect({2}).tokens[2] == first
        assert engine.core is not None
        assert engine.core.scheduler.stats.num_submitted == 1

    def test_a_submission_sent_twice_on_one_stream_is_accepted_twice_and_heard_once(self, connect: Connect) -> None:
        with run_held() as (engine, device):
            client = connect(engine)
            message = client.submit(1, id=ID, max_tokens=5)
            client.send(message)
            client.settle()
            device.let()
            collected = client.collect({1})
            assert len(collected.tokens[1]) == 5
            assert [accept.attached for accept in collected.accepts[1]] == [False, True]

    def test_an_id_that_was_refused_is_free_again(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.submit(1, id=ID, params={"temperature": 9})
        assert client.expect(Reject).code == "invalid_request"
        client.submit(1, id=ID, max_tokens=3)
        assert len(client.collect({1}).tokens[1]) == 3

    def test_a_stream_number_in_use_is_refused(self, connect: Connect) -> None:
        with run_held() as (engine, _):
            client = connect(engine)
            client.submit(5, max_tokens=10, params={"n": 2, "temperature": 1.0})
            client.submit(6)
            reject = client.expect(Reject)
            assert (reject.code, reject.field, reject.stream) == ("conflict", "stream", 6)

    def test_an_unknown_id_cannot_be_attached(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.send(Attach(ID, 1))
        assert client.expect(Reject).code == "not_found"


class TestProtocol:
    def test_the_first_message_is_hello(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine, greet=False)
        client.submit(1, id=ID)
        reject = client.expect(Reject)
        assert (reject.code, reject.field, reject.id, reject.stream) == ("protocol_error", "hello", ID, 1)

    @pytest.mark.parametrize(
        "frames",
        [
            [b"IE\x01\x4d", b"\x80"],
            [b"GET / HTTP/1.1"],
            [b"", b""],
            [messages.header(Kind.SUBMIT), b"\x81\xa2id"],
            [messages.header(Kind.STEP), b"\x90"],
            [b"IE\x01\x02"],
        ],
    )
    def test_a_broken_message_is_answered_and_nobody_else_notices(
        self, engine: EngineService, connect: Connect, frames: list[bytes]
    ) -> None:
        client, other = connect(engine), connect(engine)
        other.submit(1, max_tokens=30)
        client.send_frames(frames)
        assert client.expect(Reject).code == "protocol_error"
        assert len(other.collect({1}).tokens[1]) == 30

    def test_another_major_is_told_so(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine, greet=False)
        client.send_frames([b"IE\x02\x01", b"\x80"])
        assert client.expect(Reject).code == "version_mismatch"

    def test_the_engines_own_messages_are_refused(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.send(Pong(1, 0.0, "READY", bytes(8)))
        assert client.expect(Reject).code == "protocol_error"

    def test_credit_for_what_was_never_sent_is_refused(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.send(Credit(99))
        assert client.expect(Reject).code == "protocol_error"

    def test_an_oversized_frame_costs_its_sender_the_connection_and_nobody_else_anything(
        self, connect: Connect
    ) -> None:
        with run_service(wire={"max_message_bytes": 4096}) as engine:
            big, other = connect(engine), connect(engine)
            other.submit(1, max_tokens=20)
            big.submit(1, prompt=[1] * 5000)
            assert len(other.collect({1}).tokens[1]) == 20
            greeted = None
            while greeted is None:  # what went into the broken connection is lost
                big.send(Hello())
                greeted = big.receive(0.2)
            assert isinstance(greeted, Welcome)
            check_idle(engine)

    def test_a_flood_starves_nobody(self, engine: EngineService, connect: Connect) -> None:
        flooder, other = connect(engine), connect(engine)
        for nonce in range(20_000):
            flooder.ping(nonce)
        begin = time.monotonic()
        other.submit(1, max_tokens=20)
        assert len(other.collect({1}).tokens[1]) == 20
        assert time.monotonic() - begin < 5.0


def test_a_deadline_ends_a_request_with_its_code(connect: Connect) -> None:
    with run_service(step_s=0.02) as engine:
        client = connect(engine)
        client.submit(1, max_tokens=500, deadline_ms=150)
        (done,) = client.collect({1}).done[1]
        assert (done.reason, done.detail[0]) == ("error", "deadline_exceeded")
        check_idle(engine)


def test_clients_do_not_share_stream_numbers(engine: EngineService, connect: Connect) -> None:
    clients: list[RawClient] = [connect(engine) for _ in range(4)]
    for number, client in enumerate(clients):
        client.submit(1, max_tokens=5 + number)
    for number, client in enumerate(clients):
        assert len(client.collect({1}).tokens[1]) == 5 + number


class NeverDone:
    """A tokenizer that never gives a result."""

    def tokenize(self, *arguments: Any) -> None:
        pass


def test_the_time_limit_of_text_does_not_count_time_in_which_the_engine_did_not_run() -> None:
    refused: list[InferEngineError] = []
    unused: Any = NeverDone()
    pending = PendingSubmissions(
        unused,
        unused,
        unused,
        grammar_timeout_s=5.0,
        ready=lambda item, prompt: None,
        refuse=lambda item, error: refused.append(error),
    )
    message = Submit(bytes(16), 1, text="a text")
    submission = SubmittedRequest(message.id, SamplingParams())
    item = PendingSubmission(submission, message, None, [], None, None, [], 5.0, TEXT_TIMEOUT_S)
    pending.begin(item, vocab_size=100, eos_token_ids=[], max_model_len=100)
    pending.extend_deadlines(40.0)
    pending.tick(41.0)
    assert refused == []
    pending.tick(40.0 + TEXT_TIMEOUT_S + 1.0)
    assert [error.code for error in refused] == ["overloaded"]

"""Cursors without sockets: what goes out in which STEP, and what a publisher keeps."""

from __future__ import annotations

import secrets
from array import array

import pytest

from inferengine.core.executor import TokenLogprobs
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished
from inferengine.engine.counters import Counters
from inferengine.engine.io.publisher import (
    ENOUGH_BYTES,
    SUBMISSION_BYTES,
    Connection,
    Publisher,
    SendResult,
    SubmittedRequest,
)
from inferengine.sampling_params import SamplingParams
from inferengine.text import TextStream, Tokenizer
from inferengine.wire import messages
from inferengine.wire.messages import Step
from tests.engine.builders import Collected, make_card

TOKENIZER = Tokenizer.from_files(make_card().files)


class Post:
    """Takes what connections are sent."""

    def __init__(self) -> None:
        self.result = SendResult.OK
        self.steps: dict[bytes, list[Step]] = {}

    def send(self, routing_id: bytes, frames: list[bytes]) -> SendResult:
        if self.result is SendResult.OK:
            message = messages.decode(frames)
            assert isinstance(message, Step)
            self.steps.setdefault(routing_id, []).append(message)
        return self.result


class Bench:
    """A publisher, its post, and what a test needs to say to it."""

    def __init__(self, ttl_s: float = 10.0) -> None:
        self.post = Post()
        self.stopped: list[int] = []
        self.counters = Counters()
        self.publisher = Publisher(
            counters=self.counters, make_text=self.make_text, stop=self.stopped.append, resume_ttl_s=ttl_s
        )
        self.step = 0
        self.now = 0.0

    def make_text(self, submission: SubmittedRequest, search: bool) -> TextStream:
        return TextStream(TOKENIZER, stop=submission.params.stop if search else ())

    def connection(self, name: bytes = b"p", window: int = 64) -> Connection:
        return Connection(name, self.post.send, window=window, now=0.0)

    def open(
        self,
        connection: Connection,
        uids: list[int],
        stream: int,
        reply: str = "tokens",
        outputs: list[array[int]] | None = None,
        **params: object,
    ) -> SubmittedRequest:
        submission = SubmittedRequest(secrets.token_bytes(16), SamplingParams(n=len(uids), **params))  # type: ignore[arg-type]
        self.publisher.register(submission)
        self.publisher.open(submission, uids, self.now, outputs)
        self.publisher.subscribe(connection, submission, stream, (), reply)
        return submission

    def publish(
        self,
        tokens: dict[int, list[int]],
        *ended: Finished,
        routing: int = 1,
        logprobs: dict[int, list[TokenLogprobs]] | None = None,
    ) -> None:
        self.step += 1
        self.now += 1.0
        uids = [uid for uid, ids in tokens.items() for _ in ids]
        ids = [token for ids in tokens.values() for token in ids]
        self.publisher.publish(StepOutput(self.step, uids, ids, list(ended), routing, logprobs), self.now)

    def received(self, name: bytes = b"p") -> Collected:
        collected = Collected()
        for step in self.post.steps.get(name, []):
            collected.take(step)
        return collected


def row(uid: int, reason: str = "length", num_output: int = 1, detail: int | tuple[str, str] | None = None) -> Finished:
    return Finished(uid, reason, detail, 3, 0, num_output, 0.1, 0.2, 0.5, "", 0)


def test_a_step_is_one_message_per_connection() -> None:
    bench = Bench()
    one, two = bench.connection(b"one"), bench.connection(b"two")
    bench.open(one, [1, 2], 10)
    bench.open(two, [3], 10)
    bench.publish({1: [11], 2: [12], 3: [13]})
    assert {name: len(steps) for name, steps in bench.post.steps.items()} == {b"one": 1, b"two": 1}
    assert bench.received(b"one").tokens == {10: [11], 11: [12]}
    assert bench.received(b"two").tokens == {10: [13]}


def test_the_last_token_and_the_terminal_row_come_together() -> None:
    bench = Bench()
    bench.open(bench.connection(), [1], 5)
    bench.publish({1: [7]}, row(1))
    (step,) = bench.post.steps[b"p"]
    assert (list(step.tokens), step.done[0].stream, step.done[0].reason) == ([7], 5, "length")


def test_several_tokens_of_a_sequence_in_one_step_keep_their_order() -> None:
    """Speculation gives a sequence as many tokens as were accepted."""
    bench = Bench()
    connection = bench.connection(window=2)
    bench.open(connection, [1, 2], 5)
    bench.publish({1: [1, 2, 3], 2: [4]}, routing=1)
    bench.publish({1: [5], 2: [6, 7]}, routing=2)
    bench.publish({1: [8, 9], 2: [10]}, routing=3)
    bench.publish({1: [11, 12], 2: [13]}, routing=3)
    assert len(bench.post.steps[b"p"]) == 2
    connection.acknowledge(2)
    bench.publisher.flush(connection, bench.now)
    assert bench.received().tokens == {5: [1, 2, 3, 5, 8, 9, 11, 12], 6: [4, 6, 7, 10, 13]}


def test_a_full_pipe_loses_nothing() -> None:
    bench = Bench()
    connection = bench.connection()
    bench.open(connection, [1, 2], 5)
    bench.publish({1: [1], 2: [2]})
    bench.post.result = SendResult.FULL
    bench.publish({1: [3], 2: [4]})
    bench.publish({1: [5], 2: [6]}, row(2))
    bench.post.result = SendResult.OK
    bench.publish({1: [7]}, routing=2)
    collected = bench.received()
    assert collected.tokens == {5: [1, 3, 5, 7], 6: [2, 4, 6]}
    assert [step.seq for step in bench.post.steps[b"p"]] == [1, 2]
    assert len(collected.done[6]) == 1


def test_nothing_is_sent_to_a_connection_that_is_gone_until_it_is_back() -> None:
    bench = Bench()
    connection = bench.connection()
    bench.open(connection, [1], 5)
    bench.post.result = SendResult.GONE
    bench.publish({1: [1]})
    bench.post.result = SendResult.OK
    bench.publish({1: [2]})
    assert bench.post.steps == {}
    assert connection.resume(0, bench.now)
    bench.publisher.flush(connection, bench.now)
    assert bench.received().tokens == {5: [1, 2]}


def test_unacknowledged_steps_are_sent_again_on_resuming() -> None:
    bench = Bench()
    connection = bench.connection()
    bench.open(connection, [1], 5)
    for token in range(5):
        bench.publish({1: [token]})
    bench.post.steps.clear()
    assert connection.resume(2, bench.now)
    connection.send_again(bench.now)
    assert [(step.seq, list(step.tokens)) for step in bench.post.steps[b"p"]] == [(3, [2]), (4, [3]), (5, [4])]


def test_logprobs_travel_with_their_tokens() -> None:
    bench = Bench()
    bench.open(bench.connection(), [1], 5, logprobs=1)
    position = TokenLogprobs(-0.5, 1, [7], [-0.5])
    bench.publish({1: [7]}, logprobs={1: [position]})
    (step,) = bench.post.steps[b"p"]
    assert step.logprobs == [(5, [[-0.5, 1, [7], [-0.5]]])]


def test_a_stop_string_in_the_middle_of_a_step_cuts_tokens_and_logprobs() -> None:
    bench = Bench()
    ids = TOKENIZER.encode("ab STOP cd", add_special_tokens=False)
    stop_at = len(TOKENIZER.encode("ab STOP", add_special_tokens=False))
    bench.open(bench.connection(), [1], 5, reply="both", stop=("STOP",), logprobs=0)
    rows = [TokenLogprobs(-1.0, 1, [], []) for _ in ids]
    bench.publish({1: ids}, logprobs={1: rows})
    assert bench.stopped == [1]
    bench.publish({1: [3]}, routing=1)  # the core has not heard of it yet
    bench.publish({}, row(1, "stop", len(ids) + 1))
    collected = bench.received()
    assert collected.text[5] == "ab "
    assert collected.tokens[5] == ids[:stop_at]
    assert sum(len(rows) for step in collected.steps for _, rows in step.logprobs) == stop_at
    (done,) = collected.done[5]
    assert (done.reason, done.detail, done.completion_tokens) == ("stop", "STOP", stop_at)


def test_a_stop_token_has_no_text() -> None:
    bench = Bench()
    ids = TOKENIZER.encode("fox dog", add_special_tokens=False)
    bench.open(bench.connection(), [1], 5, reply="text")
    for token in ids[:-1]:
        bench.publish({1: [token]})
    bench.publish({1: [ids[-1]]}, row(1, "stop", len(ids)))
    assert bench.received().text[5] == TOKENIZER.decode(ids[:-1])


def test_what_nobody_reads_is_an_orphan_unless_it_is_detached() -> None:
    bench = Bench()
    connection, other = bench.connection(b"p"), bench.connection(b"q")
    alone, shared, detached = (bench.open(connection, [uid], uid) for uid in (1, 2, 3))
    detached.detached = True
    bench.publisher.subscribe(other, shared, 1, (), "tokens")
    assert bench.publisher.drop(connection) == [alone]
    assert connection.streams == {}


def test_what_the_last_reader_left_is_an_orphan_detached_or_not() -> None:
    bench = Bench()
    connection, other = bench.connection(b"p"), bench.connection(b"q")
    detached, shared, kept = (bench.open(connection, [uid], uid) for uid in (1, 2, 3))
    detached.detached = True
    bench.publisher.subscribe(other, shared, 1, (), "tokens")
    assert bench.publisher.leave(connection, [1, 2, 99]) == [detached]
    assert list(connection.streams) == [3]
    assert kept.num_subscriptions == 1


def test_finished_logs_are_forgotten_after_their_time() -> None:
    bench = Bench(ttl_s=5.0)
    submission = bench.open(bench.connection(), [1], 5)
    bench.publish({1: [7]}, row(1))
    bench.publisher.expire(bench.now + 4.0)
    assert bench.publisher.submissions == {submission.id: submission}
    bench.publisher.expire(bench.now + 5.0)
    assert bench.publisher.submissions == {}


def test_too_much_to_keep_is_forgotten_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.engine.io.publisher.MAX_KEPT_BYTES", 5 * (SUBMISSION_BYTES + 8))
    bench = Bench(ttl_s=1e9)
    connection = bench.connection()
    for uid in range(1, 30):
        bench.open(connection, [uid], uid)
        bench.publish({uid: [1, 2]}, row(uid), routing=uid)
        bench.publisher.expire(bench.now)
    assert len(bench.publisher.submissions) == 5


def test_gaps_between_tokens_are_counted_once_per_sequence_and_step() -> None:
    bench = Bench()
    connection = bench.connection()
    bench.open(connection, [1, 2], 5)
    bench.publish({1: [1], 2: [2]}, routing=1)
    bench.publish({1: [1], 2: [2]}, routing=1)
    bench.open(connection, [3], 8)
    bench.publish({1: [1, 1], 2: [2], 3: [3]}, routing=2)
    bench.publish({2: [2], 3: [3]}, routing=3)
    bench.publish({1: [1], 2: [2], 3: [3]}, routing=4)
    gaps, first = bench.counters.token_gap_s, bench.counters.first_token_s
    assert first.count == 3
    assert (gaps.count, gaps.sum) == (2 + 2 + 2 + 3, 2 * 1 + 2 * 1 + 2 * 1 + (2 * 1 + 2))


ROW = TokenLogprobs(-1.5, 3, list(range(20)), [-2.0] * 20)


def test_log_probabilities_count_among_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's of 20 alternatives take a thousand times as much memory as the output's tokens."""
    monkeypatch.setattr("inferengine.engine.io.publisher.MAX_KEPT_BYTES", 20 * SUBMISSION_BYTES)
    bench = Bench(ttl_s=1e9)
    connection = bench.connection()
    for uid in range(1, 10):
        bench.open(connection, [uid], uid, prompt_logprobs=20)
        bench.step += 1
        output = StepOutput(bench.step, [uid], [7], [row(uid)], uid, None, {uid: [ROW] * 100})
        bench.publisher.publish(output, bench.now)
        bench.publisher.expire(bench.now)
    assert len(bench.publisher.submissions) == 0


def test_a_tenant_that_leaves_much_behind_does_not_shorten_what_others_may_come_back_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inferengine.engine.io.publisher.MAX_KEPT_BYTES", 6 * (SUBMISSION_BYTES + 8))
    bench = Bench(ttl_s=1e9)
    connection = bench.connection()
    quiet = bench.open(connection, [1], 1)
    quiet.tenant = "quiet"
    bench.publish({1: [1, 2]}, row(1), routing=1)
    for uid in range(2, 50):
        bench.open(connection, [uid], uid).tenant = "loud"
        bench.publish({uid: [1, 2]}, row(uid), routing=uid)
        bench.publisher.expire(bench.now)
    assert quiet.id in bench.publisher.submissions
    assert len(bench.publisher.submissions) == 6


def test_what_was_dropped_early_is_not_looked_for_when_its_time_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferengine.engine.io.publisher.MAX_KEPT_BYTES", 3 * (SUBMISSION_BYTES + 4))
    bench = Bench(ttl_s=50.0)
    connection = bench.connection()
    for uid in range(1, 10):
        bench.open(connection, [uid], uid)
        bench.publish({uid: [1]}, row(uid), routing=uid)
        bench.publisher.expire(bench.now)
    last = bench.now
    bench.publisher.expire(last + 48.5)  # of those that are left, one is due
    assert len(bench.publisher.submissions) == 2
    bench.publisher.expire(last + 50.0)
    assert bench.publisher.submissions == {}


def test_an_ended_request_keeps_no_list_of_allowed_tokens() -> None:
    bench = Bench()
    submission = bench.open(bench.connection(), [1], 5, allowed_token_ids=tuple(range(5000)), stop=("x",))
    bench.publish({1: [7]}, row(1))
    assert submission.params.allowed_token_ids == ()
    assert submission.params.stop == ("x",)


def test_what_a_slow_reader_has_missed_comes_in_messages_of_bounded_size() -> None:
    """Log-probabilities of a long output would make one message larger than any connection takes."""
    bench = Bench()
    connection = bench.connection(window=64)
    bench.post.result = SendResult.FULL
    bench.open(connection, [1, 2], 5, logprobs=20)
    for _ in range(0, 30_000, 1000):
        rows = {uid: [ROW] * 1000 for uid in (1, 2)}
        bench.publish({1: [7] * 1000, 2: [8] * 1000}, routing=1, logprobs=rows)
    bench.publish({}, row(1, num_output=30_000), row(2, num_output=30_000))
    bench.post.result = SendResult.OK
    bench.publisher.flush(connection, bench.now)
    received = bench.received()
    assert {stream: len(tokens) for stream, tokens in received.tokens.items()} == {5: 30_000, 6: 30_000}
    sizes = [sum(len(rows) for _, rows in step.logprobs) for step in bench.post.steps[b"p"]]
    assert max(sizes) <= 16_000
    assert connection.dirty == {}
    assert connection.streams == {}


def test_a_message_that_is_cut_has_no_text_whose_tokens_come_later() -> None:
    """An engine that goes on behind these tokens could not know that more of the text was read."""
    bench = Bench()
    connection = bench.connection(window=1)
    bench.open(connection, [1], 5, "both", logprobs=20)
    bench.publish({1: [70]}, logprobs={1: [TokenLogprobs(-1.0, 1, list(range(20)), [-1.0] * 20)]})
    most = ENOUGH_BYTES // 276
    ids = TOKENIZER.encode("word " * most, add_special_tokens=False)[: most + 100]
    rows = [TokenLogprobs(-1.0, 1, list(range(20)), [-1.0] * 20)] * len(ids)
    bench.publish({1: ids}, row(1, num_output=1 + len(ids)), routing=2, logprobs={1: rows})
    connection.acknowledge(1)
    bench.publisher.flush(connection, bench.now)
    cut = bench.post.steps[b"p"][1]
    assert 0 < len(cut.tokens) < len(ids)
    assert (cut.text, cut.done) == ([], [])
    connection.acknowledge(2)
    bench.publisher.flush(connection, bench.now)
    received = bench.received()
    text = TextStream(TOKENIZER).push([70, *ids], True, False).text
    assert (received.tokens[5], received.text[5]) == ([70, *ids], text)


@pytest.mark.parametrize("reply", ["text", "both"])
def test_a_reader_with_more_than_the_log_hears_no_text_twice(reply: str) -> None:
    ids = TOKENIZER.encode("the quick brown fox jumps", add_special_tokens=False)
    texts = [TextStream(TOKENIZER).push(ids[:count], False, False).text for count in range(len(ids) + 1)]
    bench = Bench()
    connection, other = bench.connection(), bench.connection(b"other")
    submission = bench.open(connection, [1], 5, outputs=[array("I", ids[:1])])
    held = len(ids) - 2
    cursor = len(texts[held]) if reply == "text" else held
    bench.publisher.subscribe(other, submission, 9, [cursor], reply)
    for place, token_id in enumerate(ids[1:], 1):
        last = place == len(ids) - 1
        bench.publish({1: [token_id]}, *([row(1, num_output=len(ids))] if last else []))
    received = bench.received(b"other")
    assert texts[held] + received.text[9] == "the quick brown fox jumps"
    assert received.tokens.get(9, []) == ([] if reply == "text" else ids[held:])
    assert received.done[9][0].reason == "length"

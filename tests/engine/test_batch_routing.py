"""BatchRouting against a plain model of it: every reader gets every token, whoever comes, goes or falls behind."""

from __future__ import annotations

import random
import secrets

import pytest

from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished
from inferengine.engine.counters import Counters
from inferengine.engine.io.publisher import (
    FEW_COLUMNS,
    MAX_COLUMNS,
    BatchRouting,
    Connection,
    OutputLog,
    Publisher,
    SendResult,
    SubmittedRequest,
    Subscription,
    TextLog,
)
from inferengine.sampling_params import SamplingParams
from inferengine.text import TextStream, Tokenizer
from inferengine.wire import messages
from inferengine.wire.messages import Step
from tests.engine.builders import Collected, make_card


def no_text(submission: SubmittedRequest, search: bool) -> TextStream:
    raise RuntimeError("nobody here asks for text")


class Post:
    """Takes what connections are sent."""

    def __init__(self) -> None:
        self.got: dict[bytes, Collected] = {}
        self.num_messages: dict[bytes, int] = {}

    def send(self, routing_id: bytes, frames: list[bytes]) -> SendResult:
        message = messages.decode(frames)
        assert isinstance(message, Step)
        self.got.setdefault(routing_id, Collected()).take(message)
        self.num_messages[routing_id] = self.num_messages.get(routing_id, 0) + 1
        return SendResult.OK


def make_connection(post: Post, name: bytes = b"p", window: int = 64) -> Connection:
    return Connection(name, post.send, window=window, now=0.0)


def make_logs(connections: list[Connection], uids: range) -> list[OutputLog]:
    """Return one log for each uid, read by the connections in turn."""
    logs = []
    for uid in uids:
        log = OutputLog(uid, SubmittedRequest(bytes(16), SamplingParams()), 0, 0.0)
        connection = connections[uid % len(connections)]
        log.subscriptions.append(Subscription(connection, log, uid, "tokens"))
        logs.append(log)
    return logs


def enter(routing: BatchRouting) -> BatchRouting:
    for log in routing.logs:
        log.routing = routing
    return routing


def streams_of(routing: BatchRouting, connection: Connection) -> list[int]:
    return list(messages.from_u32(routing.groups[connection].stream_column))


def tokens_for(routing: BatchRouting, connection: Connection) -> list[int]:
    return list(messages.from_u32(routing.token_column(routing.groups[connection])))


@pytest.mark.parametrize("num_steps", [1, FEW_COLUMNS, MAX_COLUMNS, MAX_COLUMNS + 3])
def test_a_log_has_its_tokens_when_asked(num_steps: int) -> None:
    logs = make_logs([make_connection(Post())], range(5))
    routing = enter(BatchRouting(1, logs, 0.0))
    for step in range(num_steps):
        routing.push([10 * step + index for index in range(5)])
    assert [list(log.tokens) for log in logs] == [
        [10 * step + index for step in range(num_steps)] for index in range(5)
    ]


@pytest.mark.parametrize("num_connections", [1, 3])
def test_ends_and_arrivals_change_a_routing_in_place(num_connections: int) -> None:
    post = Post()
    connections = [make_connection(post, b"%d" % number) for number in range(num_connections)]
    logs = make_logs(connections, range(12))
    by_uid = {log.uid: log for log in logs}
    routing = enter(BatchRouting(1, logs[:10], 0.0))
    routing.push(list(range(10)))
    routing.gone.append(4)
    uids = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert routing.change(2, uids, by_uid) == logs[10:]
    enter(routing)
    assert routing.is_of(2)
    assert not routing.is_of(1)
    routing.push([100 + uid for uid in uids])
    for number, connection in enumerate(connections):
        own = [uid for uid in uids if uid % num_connections == number]
        assert streams_of(routing, connection) == own
        assert tokens_for(routing, connection) == [100 + uid for uid in own]
    assert list(logs[4].tokens) == [4]
    assert list(logs[5].tokens) == [5, 105]
    assert list(logs[11].tokens) == [111]


def test_a_log_with_text_keeps_its_place_among_the_tokens() -> None:
    logs = make_logs([make_connection(Post())], range(10))
    logs[5].text = TextLog(TextStream(Tokenizer.from_files(make_card().files)))
    logs[3].text = TextLog(TextStream(Tokenizer.from_files(make_card().files)))
    routing = enter(BatchRouting(1, logs, 0.0))
    assert routing.texts == {logs[3]: [3], logs[5]: [5]}
    routing.gone.append(3)
    assert routing.change(2, [0, 1, 2, *range(4, 10)], {}) == []
    assert routing.texts == {logs[5]: [4]}


def test_a_connection_whose_last_row_ends_is_left_out() -> None:
    one, two = make_connection(Post(), b"one"), make_connection(Post(), b"two")
    logs = make_logs([one], range(8)) + make_logs([two], range(8, 9))
    routing = enter(BatchRouting(1, logs, 0.0))
    routing.gone.append(8)
    assert routing.change(2, list(range(8)), {}) == []
    assert list(routing.groups) == [one]


@pytest.mark.parametrize(
    ("gone", "uids"),
    [
        ([], [1, 0, *range(2, 20)]),  # another order
        ([], list(range(19))),  # one pauses
        ([3], list(range(20))),  # one that has ended
        ([], [*range(20), 7]),  # two tokens for one
        ([0, 1, 2], list(range(3, 20))),  # many at once
    ],
)
def test_what_is_no_such_change_needs_a_new_routing(gone: list[int], uids: list[int]) -> None:
    logs = make_logs([make_connection(Post())], range(20))
    routing = enter(BatchRouting(1, logs, 0.0))
    routing.push(list(range(20)))
    routing.gone += gone
    assert routing.change(2, uids, {log.uid: log for log in logs}) is None
    assert [list(log.tokens) for log in logs] == [[uid] for uid in range(20)]


def test_another_reader_of_a_row_needs_a_new_routing() -> None:
    post = Post()
    publisher = Publisher(counters=Counters(), make_text=no_text, stop=lambda uid: None, resume_ttl_s=1.0)
    submission = SubmittedRequest(bytes(16), SamplingParams(n=2))
    publisher.register(submission)
    publisher.open(submission, [1, 2], 0.0)
    one, two = make_connection(post, b"one"), make_connection(post, b"two")
    publisher.subscribe(one, submission, 10, (), "tokens")
    publisher.publish(StepOutput(1, [1, 2], [5, 6], [], 1), 1.0)
    publisher.subscribe(two, submission, 20, (1, 0), "tokens")
    publisher.publish(StepOutput(2, [1, 2], [7, 8], [], 1), 2.0)
    assert post.got[b"one"].tokens == {10: [5, 7], 11: [6, 8]}
    assert post.got[b"two"].tokens == {20: [7], 21: [6, 8]}


def test_steps_of_one_sequence_each_enter_their_routing_again() -> None:
    post = Post()
    publisher = Publisher(counters=Counters(), make_text=no_text, stop=lambda uid: None, resume_ttl_s=1.0)
    connection, submission = make_connection(post), SubmittedRequest(bytes(16), SamplingParams(n=2))
    publisher.register(submission)
    publisher.open(submission, [1, 2], 0.0)
    publisher.subscribe(connection, submission, 10, (), "tokens")
    routings = set()
    for step in range(1, 9):
        uid = 1 + step % 2
        publisher.publish(StepOutput(step, [uid], [step], [], -2 - uid), float(step))
        routings.add(submission.logs[uid - 1].routing)
    assert len(routings) == 2
    assert post.got[b"p"].tokens == {10: [2, 4, 6, 8], 11: [1, 3, 5, 7]}
    assert [list(log.tokens) for log in submission.logs] == [[2, 4, 6, 8], [1, 3, 5, 7]]


class World:
    """What a scheduler might say, and what readers should then have."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.post = Post()
        self.connections = [
            make_connection(self.post, b"%d" % number, window) for number, window in enumerate((1000, 1000, 2))
        ]
        self.publisher = Publisher(counters=Counters(), make_text=no_text, stop=lambda uid: None, resume_ttl_s=1e9)
        self.drawing: list[int] = []
        self.paused: list[int] = []
        self.expected: dict[int, list[int]] = {}
        self.submissions: dict[int, SubmittedRequest] = {}
        self.readers: list[tuple[bytes, int, int, int]] = []  # connection, stream, uid, cursor
        self.next_uid = self.next_stream = 1
        self.step = self.routing = 0

    def arrive(self) -> None:
        uid, self.next_uid = self.next_uid, self.next_uid + 1
        submission = self.submissions[uid] = SubmittedRequest(secrets.token_bytes(16), SamplingParams())
        self.publisher.register(submission)
        self.publisher.open(submission, [uid], 0.0)
        self.expected[uid] = []
        self.read(uid)
        self.drawing.append(uid)
        self.routing += 1

    def read(self, uid: int) -> None:
        """Add another reader, from any place on; the same connection may read a log twice."""
        connection = self.random.choice(self.connections)
        cursor = self.random.randint(0, len(self.expected[uid]))
        self.publisher.subscribe(connection, self.submissions[uid], self.next_stream, (cursor,), "tokens")
        self.readers.append((connection.routing_id, self.next_stream, uid, cursor))
        self.next_stream += 1

    def turn(self, *, draw: bool = True) -> None:
        """Publish a step: all who draw get a token, now and then more; a few end with it."""
        self.step += 1
        drafts = self.random.random() < 0.1
        uids = [uid for uid in self.drawing for _ in range(self.random.randint(1, 3) if drafts else 1)] if draw else []
        self.routing += drafts
        ids = [self.random.randrange(1 << 32) for _ in uids]
        for uid, token_id in zip(uids, ids, strict=True):
            self.expected[uid].append(token_id)
        ended = self.random.sample(self.drawing, min(len(self.drawing), self.random.choice((0, 0, 1, 1, 2))))
        rows = [Finished(uid, "length", None, 1, 0, len(self.expected[uid]), 0.0, 0.0, 0.0, "", 0) for uid in ended]
        self.publisher.publish(StepOutput(self.step, uids, ids, rows, self.routing), float(self.step))
        self.drawing = [uid for uid in self.drawing if uid not in ended]
        self.routing += drafts or bool(ended)

    def draw_alone(self) -> None:
        """Publish a step of one sequence, whose layout is the same each time: a relay's."""
        if not self.drawing:
            return
        self.step += 1
        uid, token_id = self.random.choice(self.drawing[:3]), self.random.randrange(1 << 32)
        self.expected[uid].append(token_id)
        self.publisher.publish(StepOutput(self.step, [uid], [token_id], [], -2 - uid), float(self.step))
        self.routing += 1

    def shuffle(self) -> None:
        """Preempt a sequence, or let one come back at the end."""
        if self.drawing and self.random.random() < 0.5:
            self.paused.append(self.drawing.pop(self.random.randrange(len(self.drawing))))
        elif self.paused:
            self.drawing.append(self.paused.pop())
        self.routing += 1

    def give_credit(self) -> None:
        for connection in self.connections:
            connection.acknowledge(connection.window.seq)
            self.publisher.flush(connection, float(self.step))


@pytest.mark.parametrize("seed", range(6))
def test_every_reader_has_everything_in_order(seed: int) -> None:
    world = World(seed)
    for _ in range(400):
        deed = world.random.random()
        if deed < 0.25 and len(world.drawing) < 40:
            world.arrive()
        elif deed < 0.28 and world.drawing:
            world.read(world.random.choice(world.drawing))
        elif deed < 0.31:
            world.shuffle()
        elif deed < 0.4:
            world.give_credit()
        elif deed < 0.6:
            world.draw_alone()
        else:
            world.turn(draw=deed < 0.97)
    while world.drawing or world.paused:
        world.drawing += world.paused
        world.paused, world.routing = [], world.routing + 1
        world.turn()
    world.give_credit()
    for name, stream, uid, cursor in world.readers:
        collected = world.post.got[name]
        assert collected.tokens.get(stream, []) == world.expected[uid][cursor:]
        assert len(collected.done[stream]) == 1
    assert world.publisher.num_open == 0
    for uid, submission in world.submissions.items():
        assert list(submission.logs[0].tokens) == world.expected[uid]

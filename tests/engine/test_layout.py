"""Layouts against the plainest account of them: whoever comes, goes, pauses or falls behind, nobody misses a token."""

from __future__ import annotations

import random
import secrets

import pytest

from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished
from inferengine.engine.io import batch_routing as layouts
from inferengine.engine.io.batch_routing import Layout
from inferengine.engine.io.connection import Peer, Sent
from inferengine.engine.io.output_log import Log, Submission, Subscription, TextLog
from inferengine.engine.io.publisher import Outbox
from inferengine.engine.metrics.counters import Telemetry
from inferengine.sampling_params import SamplingParams
from inferengine.text import TextStream, Tokenizer
from inferengine.wire import codec
from inferengine.wire.messages import Step
from tests.engine.builders import Collected, make_card


def no_text(submission: Submission, search: bool) -> TextStream:
    raise RuntimeError("nobody here asks for text")


class Post:
    """Takes what peers are sent."""

    def __init__(self) -> None:
        self.got: dict[bytes, Collected] = {}
        self.num_messages: dict[bytes, int] = {}

    def send(self, routing_id: bytes, frames: list[bytes]) -> Sent:
        message = codec.decode(frames)
        assert isinstance(message, Step)
        self.got.setdefault(routing_id, Collected()).take(message)
        self.num_messages[routing_id] = self.num_messages.get(routing_id, 0) + 1
        return Sent.OK


def make_peer(post: Post, name: bytes = b"p", window: int = 64) -> Peer:
    return Peer(name, post.send, window=window, now=0.0)


def make_logs(peers: list[Peer], uids: range) -> list[Log]:
    """One log for each uid, read by the peers in turn."""
    logs = []
    for uid in uids:
        log = Log(uid, Submission(bytes(16), SamplingParams()), 0, 0.0)
        peer = peers[uid % len(peers)]
        log.subscriptions.append(Subscription(peer, log, uid, "tokens"))
        logs.append(log)
    return logs


def enter(layout: Layout) -> Layout:
    for log in layout.logs:
        log.layout = layout
    return layout


def streams_of(layout: Layout, peer: Peer) -> list[int]:
    return list(codec.from_u32(layout.groups[peer].stream_column))


def tokens_for(layout: Layout, peer: Peer) -> list[int]:
    return list(codec.from_u32(layout.token_column(layout.groups[peer])))


@pytest.mark.parametrize("num_steps", [1, layouts.FEW_COLUMNS, layouts.MOST_COLUMNS, layouts.MOST_COLUMNS + 3])
def test_a_log_has_its_tokens_when_asked(num_steps: int) -> None:
    logs = make_logs([make_peer(Post())], range(5))
    layout = enter(Layout(1, logs, 0.0))
    for step in range(num_steps):
        layout.push([10 * step + index for index in range(5)])
    assert [list(log.tokens) for log in logs] == [
        [10 * step + index for step in range(num_steps)] for index in range(5)
    ]


@pytest.mark.parametrize("num_peers", [1, 3])
def test_ends_and_arrivals_change_a_layout_in_place(num_peers: int) -> None:
    post = Post()
    peers = [make_peer(post, b"%d" % number) for number in range(num_peers)]
    logs = make_logs(peers, range(12))
    by_uid = {log.uid: log for log in logs}
    layout = enter(Layout(1, logs[:10], 0.0))
    layout.push(list(range(10)))
    layout.gone.append(4)
    uids = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert layout.change(2, uids, by_uid) == logs[10:]
    enter(layout)
    assert layout.is_of(2)
    assert not layout.is_of(1)
    layout.push([100 + uid for uid in uids])
    for number, peer in enumerate(peers):
        own = [uid for uid in uids if uid % num_peers == number]
        assert streams_of(layout, peer) == own
        assert tokens_for(layout, peer) == [100 + uid for uid in own]
    assert list(logs[4].tokens) == [4]
    assert list(logs[5].tokens) == [5, 105]
    assert list(logs[11].tokens) == [111]


def test_a_log_with_text_keeps_its_place_among_the_tokens() -> None:
    logs = make_logs([make_peer(Post())], range(10))
    logs[5].text = TextLog(TextStream(Tokenizer.from_files(make_card().files)))
    logs[3].text = TextLog(TextStream(Tokenizer.from_files(make_card().files)))
    layout = enter(Layout(1, logs, 0.0))
    assert layout.texts == {logs[3]: [3], logs[5]: [5]}
    layout.gone.append(3)
    assert layout.change(2, [0, 1, 2, *range(4, 10)], {}) == []
    assert layout.texts == {logs[5]: [4]}


def test_a_peer_whose_last_row_ends_is_left_out() -> None:
    one, two = make_peer(Post(), b"one"), make_peer(Post(), b"two")
    logs = make_logs([one], range(8)) + make_logs([two], range(8, 9))
    layout = enter(Layout(1, logs, 0.0))
    layout.gone.append(8)
    assert layout.change(2, list(range(8)), {}) == []
    assert list(layout.groups) == [one]


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
def test_what_is_no_such_change_needs_a_new_layout(gone: list[int], uids: list[int]) -> None:
    logs = make_logs([make_peer(Post())], range(20))
    layout = enter(Layout(1, logs, 0.0))
    layout.push(list(range(20)))
    layout.gone += gone
    assert layout.change(2, uids, {log.uid: log for log in logs}) is None
    assert [list(log.tokens) for log in logs] == [[uid] for uid in range(20)]


def test_another_reader_of_a_row_needs_a_new_layout() -> None:
    post = Post()
    outbox = Outbox(telemetry=Telemetry(), make_text=no_text, stop=lambda uid: None, resume_ttl_s=1.0)
    submission = Submission(bytes(16), SamplingParams(n=2))
    outbox.register(submission)
    outbox.open(submission, [1, 2], 0.0)
    one, two = make_peer(post, b"one"), make_peer(post, b"two")
    outbox.subscribe(one, submission, 10, (), "tokens")
    outbox.publish(StepOutput(1, [1, 2], [5, 6], [], 1), 1.0)
    outbox.subscribe(two, submission, 20, (1, 0), "tokens")
    outbox.publish(StepOutput(2, [1, 2], [7, 8], [], 1), 2.0)
    assert post.got[b"one"].tokens == {10: [5, 7], 11: [6, 8]}
    assert post.got[b"two"].tokens == {20: [7], 21: [6, 8]}


class World:
    """What a scheduler might say, and what readers should then have."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.post = Post()
        self.peers = [make_peer(self.post, b"%d" % number, window) for number, window in enumerate((1000, 1000, 2))]
        self.outbox = Outbox(telemetry=Telemetry(), make_text=no_text, stop=lambda uid: None, resume_ttl_s=1e9)
        self.drawing: list[int] = []
        self.paused: list[int] = []
        self.expected: dict[int, list[int]] = {}
        self.submissions: dict[int, Submission] = {}
        self.readers: list[tuple[bytes, int, int, int]] = []  # peer, stream, uid, cursor
        self.next_uid = self.next_stream = 1
        self.step = self.layout = 0

    def arrive(self) -> None:
        uid, self.next_uid = self.next_uid, self.next_uid + 1
        submission = self.submissions[uid] = Submission(secrets.token_bytes(16), SamplingParams())
        self.outbox.register(submission)
        self.outbox.open(submission, [uid], 0.0)
        self.expected[uid] = []
        self.read(uid)
        self.drawing.append(uid)
        self.layout += 1

    def read(self, uid: int) -> None:
        """Another reader, from any place on; the same peer may read a log twice."""
        peer = self.random.choice(self.peers)
        cursor = self.random.randint(0, len(self.expected[uid]))
        self.outbox.subscribe(peer, self.submissions[uid], self.next_stream, (cursor,), "tokens")
        self.readers.append((peer.routing_id, self.next_stream, uid, cursor))
        self.next_stream += 1

    def turn(self, *, draw: bool = True) -> None:
        """A step: everybody who draws gets a token, now and then more; a few end with it."""
        self.step += 1
        guesses = self.random.random() < 0.1
        uids = [uid for uid in self.drawing for _ in range(self.random.randint(1, 3) if guesses else 1)] if draw else []
        self.layout += guesses
        ids = [self.random.randrange(1 << 32) for _ in uids]
        for uid, token_id in zip(uids, ids, strict=True):
            self.expected[uid].append(token_id)
        ended = self.random.sample(self.drawing, min(len(self.drawing), self.random.choice((0, 0, 1, 1, 2))))
        rows = [Finished(uid, "length", None, 1, 0, len(self.expected[uid]), 0.0, 0.0, 0.0, "", 0) for uid in ended]
        self.outbox.publish(StepOutput(self.step, uids, ids, rows, self.layout), float(self.step))
        self.drawing = [uid for uid in self.drawing if uid not in ended]
        self.layout += guesses or bool(ended)

    def shuffle(self) -> None:
        """Somebody gives way, or comes back at the end."""
        if self.drawing and self.random.random() < 0.5:
            self.paused.append(self.drawing.pop(self.random.randrange(len(self.drawing))))
        elif self.paused:
            self.drawing.append(self.paused.pop())
        self.layout += 1

    def give_credit(self) -> None:
        for peer in self.peers:
            peer.acknowledge(peer.window.seq)
            self.outbox.flush(peer, float(self.step))


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
        else:
            world.turn(draw=deed < 0.97)
    while world.drawing or world.paused:
        world.drawing += world.paused
        world.paused, world.layout = [], world.layout + 1
        world.turn()
    world.give_credit()
    for name, stream, uid, cursor in world.readers:
        collected = world.post.got[name]
        assert collected.tokens.get(stream, []) == world.expected[uid][cursor:]
        assert len(collected.done[stream]) == 1
    assert world.outbox.num_open == 0
    for uid, submission in world.submissions.items():
        assert list(submission.logs[0].tokens) == world.expected[uid]

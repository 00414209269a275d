"""Whatever the bytes are, decoding ends in a message or in a WireError that names what is wrong."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgpack
import pytest

from inferengine.errors import KINDS
from inferengine.wire import messages
from inferengine.wire.messages import MAGIC, Cancel, Kind, Reject, Step, StopFound, Submit
from tests.wire.messages import EXAMPLES, ID


def frames_of(kind: int, body: Any, *raw: bytes) -> list[bytes]:
    return [messages.header(kind), msgpack.packb(body), *raw]


def error_of(frames: list[bytes]) -> messages.WireError:
    with pytest.raises(messages.WireError) as caught:
        messages.decode(frames)
    return caught.value


def check_decodes_or_refuses(frames: list[bytes]) -> None:
    """Check the only two things that decoding may do; and that every refusal can be sent as a REJECT."""
    refusal: messages.WireError | None = None
    try:
        message = messages.decode(frames)
    except messages.WireError as error:
        refusal = error
    if refusal is None:
        assert messages.decode(messages.encode(message)) == message
    else:
        assert refusal.code in KINDS
        assert isinstance(messages.decode(messages.encode(refusal.reject())), Reject)


@pytest.mark.parametrize("name", EXAMPLES)
def test_round_trip(name: str) -> None:
    assert messages.decode(messages.encode(EXAMPLES[name])) == EXAMPLES[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_truncation_of_any_frame_at_any_byte(name: str) -> None:
    frames = messages.encode(EXAMPLES[name])
    for index, frame in enumerate(frames):
        for length in range(len(frame)):
            check_decodes_or_refuses([*frames[:index], frame[:length], *frames[index + 1 :]])
        check_decodes_or_refuses(frames[:index])


@pytest.mark.parametrize("seed", range(8))
def test_flipped_and_inserted_bytes(seed: int) -> None:
    generator = random.Random(seed)
    examples = [messages.encode(message) for message in EXAMPLES.values()]
    for _ in range(2000):
        frames = [bytearray(frame) for frame in generator.choice(examples)]
        for _ in range(generator.randint(1, 4)):
            frame = generator.choice(frames)
            if frame and generator.random() < 0.7:
                frame[generator.randrange(len(frame))] = generator.randrange(256)
            else:
                frame.insert(generator.randint(0, len(frame)), generator.randrange(256))
        frames[0][:] = (
            frames[0] if generator.random() < 0.3 else bytes(frames[0][:3]) + bytes([generator.choice(KIND_BYTES)])
        )
        check_decodes_or_refuses([bytes(frame) for frame in frames])


KIND_BYTES = [value for key, value in vars(Kind).items() if not key.startswith("_")]


def random_value(generator: random.Random, depth: int = 0) -> Any:
    kind = generator.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [random_value(generator, depth + 1) for _ in range(generator.randint(0, 5))]
    if kind == 8:
        keys = ["id", "stream", "params", "text", "messages", "cursors", "streams", "ids", "op", "epoch", "x"]
        return {generator.choice(keys): random_value(generator, depth + 1) for _ in range(generator.randint(0, 6))}
    return generator.choice(
        [
            None,
            True,
            -1,
            2**63,
            0.5,
            float("inf"),
            "",
            "tokens",
            "é" * 300,
            b"",
            ID,
            bytes(8),
            generator.getrandbits(40),
        ]
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_bodies_of_every_kind(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(1500):
        raw = [generator.randbytes(generator.randint(0, 9)) for _ in range(generator.randint(0, 2))]
        check_decodes_or_refuses(frames_of(generator.choice(KIND_BYTES), random_value(generator), *raw))


class TestWhatIsRefused:
    def test_a_wrong_major(self) -> None:
        frames = [MAGIC + bytes((2, Kind.PING)), msgpack.packb([1])]
        assert error_of(frames).code == "version_mismatch"

    def test_a_wrong_major_in_hello(self) -> None:
        assert error_of(frames_of(Kind.HELLO, {"protocol": [9, 0]})).code == "version_mismatch"

    def test_an_unknown_kind(self) -> None:
        error = error_of([MAGIC + bytes((1, 77)), msgpack.packb({})])
        assert (error.code, "77" in error.message) == ("protocol_error", True)

    def test_frames_without_a_header(self) -> None:
        assert error_of([b"HTTP", b"x"]).code == "protocol_error"
        assert error_of([]).code == "protocol_error"

    def test_ext_types(self) -> None:
        body = msgpack.packb({"id": msgpack.ExtType(5, b"x")})
        assert error_of([messages.header(Kind.SUBMIT), body]).code == "protocol_error"

    def test_a_body_of_more_than_one_value(self) -> None:
        assert error_of([messages.header(Kind.PING), msgpack.packb([1]) * 2]).code == "protocol_error"

    def test_deep_nesting(self) -> None:
        assert error_of([messages.header(Kind.SUBMIT), b"\x91" * 100_000]).code == "protocol_error"

    def test_a_length_that_promises_gigabytes(self) -> None:
        assert error_of([messages.header(Kind.SUBMIT), b"\xdd\xff\xff\xff\xff"]).code == "protocol_error"

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"id": b"short"}, "id"),
            ({"stream": -1}, "stream"),
            ({"stream": 2**32}, "stream"),
            ({"stream": True}, "stream"),
            ({"params": []}, "params"),
            ({"reply": "json"}, "reply"),
            ({"tenant": "x" * 300}, "tenant"),
            ({"salt": b"x" * 2000}, "salt"),
            ({"deadline_ms": 0}, "deadline_ms"),
            ({"detached": 1}, "detached"),
            ({"text": 5}, "text"),
            ({"messages": [5]}, "messages[0]"),
            ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 5}]}, "messages[1].content"),
            ({"note": "x"}, "note"),
        ],
    )
    def test_a_wrong_field_of_submit_is_named_with_its_request(self, change: dict[str, Any], field: str) -> None:
        body = {"id": ID, "stream": 7, **change}
        raw = [] if {"text", "messages"} & change.keys() else [bytes(4)]
        error = error_of(frames_of(Kind.SUBMIT, body, *raw))
        assert error.field == field
        assert error.id == (None if "id" in change else ID)
        assert error.stream == (None if "stream" in change else 7)

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (msgpack.packb({"params": {"logit_bias": {5: 1.0}}}), "key that is no string"),
            (b"\x81\xa4text\xa3\xed\xa0\x80", "not UTF-8"),
            (b"\x91" * 100_000, "nested too deeply"),
            (b"\x81\xa2id", "not one msgpack value"),
        ],
    )
    def test_what_is_wrong_with_a_body_is_told(self, body: bytes, says: str) -> None:
        assert says in error_of([messages.header(Kind.SUBMIT), body]).message

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"id": ID, "stream": 1, "text": "x", b"label": "y"}, None),
            ({"id": ID, "stream": 1, "text": "x", "params": {b"seed": 1}}, "params"),
            ({"id": ID, "stream": 1, "messages": [{b"role": "user"}]}, "messages[0]"),
        ],
    )
    def test_keys_that_are_bytes(self, body: dict[Any, Any], field: str | None) -> None:
        error = error_of(frames_of(Kind.SUBMIT, body))
        assert (error.field, error.id) == (field, ID)
        assert "must have strings as keys" in error.message

    def test_more_names_of_a_share_than_any_engine_divides_by(self) -> None:
        names = ["name"] * messages.MAX_SHARE_NAMES
        body = {"id": ID, "stream": 1, "text": "x", "share": names}
        message = messages.decode(frames_of(Kind.SUBMIT, body))
        assert isinstance(message, Submit)
        assert message.share == tuple(names)
        error = error_of(frames_of(Kind.SUBMIT, {**body, "share": [*names, "name"]}))
        assert (error.field, error.id) == ("share", ID)
        assert str(messages.MAX_SHARE_NAMES) in error.message

    @pytest.mark.parametrize("raw", [[b"abc"], [b""], []])
    def test_a_prompt_that_is_missing_empty_or_cut(self, raw: list[bytes]) -> None:
        assert error_of(frames_of(Kind.SUBMIT, {"id": ID, "stream": 1}, *raw)).field == "prompt"

    def test_a_prompt_given_twice(self) -> None:
        assert error_of(frames_of(Kind.SUBMIT, {"id": ID, "stream": 1, "text": "x"}, bytes(4))).field == "prompt"

    def test_step_columns_that_do_not_add_up(self) -> None:
        streams, counts = messages.to_u32([1, 2]), messages.to_u32([1, 2])
        assert error_of(frames_of(Kind.STEP, [1, 1, streams, counts, [], None], messages.to_u32([5]))).field == "counts"


class TestGrowth:
    """Newer peers say more: older ones must not mind."""

    def test_unknown_keys_of_maps_are_ignored(self) -> None:
        message = messages.decode(frames_of(Kind.SUBMIT, {"id": ID, "stream": 1, "text": "x", "colour": "red"}))
        assert message == Submit(ID, 1, text="x")

    def test_arrays_may_grow_at_the_end(self) -> None:
        body = [1, 2, messages.to_u32([7]), None, [[7, "stop", None, 1, 0, 1, 0.0, 0.0, 0.0, 0, 0, "new"]], None, "new"]
        message = messages.decode(frames_of(Kind.STEP, body, messages.to_u32([5])))
        assert isinstance(message, Step)
        assert (message.streams, message.done[0].reason) == (array("I", [7]), "stop")

    @pytest.mark.parametrize(
        ("name", "key"), [("hello", "protocol"), ("welcome_starting", "protocol"), ("welcome_starting", "progress")]
    )
    def test_arrays_in_maps_may_grow_at_the_end(self, name: str, key: str) -> None:
        head, body, *raw = messages.encode(EXAMPLES[name])
        fields = msgpack.unpackb(body)
        grown = msgpack.packb({**fields, key: [*fields[key], "new"]})
        assert messages.decode([head, grown, *raw]) == EXAMPLES[name]

    def test_a_stop_string_that_a_client_found_may_grow_at_the_end(self) -> None:
        message = messages.decode(frames_of(Kind.CANCEL, {"streams": [1], "stopped": [[1, 3, "END", "new"]]}))
        assert message == Cancel(streams=(1,), stopped=(StopFound(1, 3, "END"),))

    def test_an_absent_key_means_its_default(self) -> None:
        assert messages.decode(frames_of(Kind.SUBMIT, {"id": ID, "stream": 1}, bytes(4))) == Submit(ID, 1, bytes(4))


def test_prompts_survive_a_large_round_trip() -> None:
    prompt = array("I", range(200_000))
    message = messages.decode(messages.encode(Submit(ID, 1, messages.to_u32(prompt))))
    assert isinstance(message, Submit)
    assert messages.from_u32(message.prompt or b"") == prompt


@pytest.mark.parametrize("values", [[-1], [2**32], ["x"]])
def test_what_is_no_u32_cannot_be_sent(values: list[Any]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        messages.to_u32(values)

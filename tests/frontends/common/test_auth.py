"""API keys: what the file may say, who is let in, and how much each may do over all workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontends.common.auth import (
    ANYBODY,
    LOOK_AGAIN_S,
    MIN_ROWS,
    WINDOW_S,
    ApiKey,
    KeyRing,
    Quotas,
    entry,
    new_key,
    read_keys,
)
from inferengine.errors import ConfigError, InferEngineError


def write(folder: Path, *entries: str) -> None:
    """Write as an editor or a tool does that lets nobody see half a file."""
    (folder / "keys.new").write_text("\n".join(entries))
    (folder / "keys.new").replace(folder / "keys.toml")


def ring(folder: Path, *entries: str) -> KeyRing:
    write(folder, *entries)
    return read_keys(str(folder / "keys.toml"))


def test_without_a_file_nobody_is_asked() -> None:
    assert read_keys("").identify(None) is ANYBODY


def test_a_key_is_known_by_its_digest_alone(tmp_path: Path) -> None:
    key = new_key()
    keys = ring(tmp_path, entry("alice", new_key()), entry("bob", key, tenant="team", priority=3, admin=True))
    assert key not in (tmp_path / "keys.toml").read_text()
    assert keys.identify(key) == ApiKey("bob", "team", 3, admin=True)


@pytest.mark.parametrize("presented", [None, "", "ie_wrong", "x" * 10_000, "\udcff", "ï¿½"])
def test_a_key_that_is_not_listed_opens_nothing(tmp_path: Path, presented: str | None) -> None:
    keys = ring(tmp_path, entry("alice", new_key()))
    with pytest.raises(InferEngineError, match="key") as refusal:
        keys.identify(presented)
    assert refusal.value.code == "unauthorized"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must hold"),
        ("[other]\nx = 1", "must hold"),
        ("[[key]]\nname = 'a'", "sha256 must be"),
        ("[[key]]\nname = 'a'\nsha256 = 'XYZ'", "sha256 must be"),
        ("[[key]]\nsha256 = '" + "0" * 64 + "'", "name is required"),
        ("[[key]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\nadmin = 1", "admin has the wrong type"),
        ("[[key]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\nmax_in_flight = -1", "limits"),
        ("[[key]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\nlimit = 3", "no field 'limit'"),
        ("[[key]]\nname = 'a'\nsha256 = '" + "0" * 64 + "'\nmodels = [1]", "models has the wrong type"),
        ("[[key", "not valid TOML"),
        ("key = " + "[" * 10_000, "not valid TOML"),
        ("key = " + "9" * 10_000, "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ring(tmp_path, text)


def test_two_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name of its own"):
        ring(tmp_path, entry("a", new_key()), entry("a", new_key()))


def test_a_request_may_be_less_urgent_than_its_key_never_more() -> None:
    key = ApiKey("a", priority=5)
    assert [key.urgency(wanted) for wanted in (-100, 0, 3)] == [5, 5, 8]


def test_tenants_do_not_share_cached_prefixes() -> None:
    first, second = ApiKey("a", "one"), ApiKey("b", "two")
    assert first.salt(b"x") != second.salt(b"x")
    assert first.salt(b"") != first.salt(b"x")
    assert ANYBODY.salt(b"x") == b"x"


def test_a_changed_file_is_seen_within_a_second(tmp_path: Path) -> None:
    clock, old, new = Clock(), new_key(), new_key()
    write(tmp_path, entry("alice", old))
    keys = read_keys(str(tmp_path / "keys.toml"), clock)
    write(tmp_path, entry("alice", new, max_in_flight=7))
    assert keys.identify(old).max_in_flight == 0  # not looked at yet
    clock.now += LOOK_AGAIN_S
    assert keys.identify(new).max_in_flight == 7
    with pytest.raises(InferEngineError, match="not known"):
        keys.identify(old)


@pytest.mark.parametrize("text", ["[[key", "", "[[key]]\nname = 'a'", None], ids=["torn", "empty", "no digest", "gone"])
def test_a_broken_file_keeps_the_old_keys_and_says_so(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock, key = Clock(), new_key()
    write(tmp_path, entry("alice", key))
    keys = read_keys(str(tmp_path / "keys.toml"), clock)
    if text is None:
        (tmp_path / "keys.toml").unlink()
    else:
        write(tmp_path, text)
    for _ in range(3):
        clock.now += LOOK_AGAIN_S
        assert keys.identify(key).name == "alice"
    assert "auth.keys_file" in keys.complaint
    assert [record.message for record in caplog.records] == ["the keys file cannot be used, the old keys hold"]
    write(tmp_path, entry("bob", key))
    clock.now += LOOK_AGAIN_S
    assert keys.identify(key).name == "bob"
    assert keys.complaint == ""


class Clock:
    def __init__(self) -> None:
        self.now = 6000.0

    def __call__(self) -> float:
        return self.now


def refusal(quotas: Quotas, key: ApiKey) -> InferEngineError | None:
    try:
        quotas.enter(key)
    except InferEngineError as error:
        return error
    return None


def test_requests_in_flight_are_counted_over_all_workers() -> None:
    key, other = ApiKey("a", max_in_flight=2), ApiKey("b")
    quotas = Quotas([key, other], num_workers=2)
    for worker in (0, 1):
        quotas.choose_worker(worker)
        quotas.enter(key)
    error = refusal(quotas, key)
    assert error is not None
    assert (error.code, error.retry_after_s) == ("rate_limited", 1.0)
    assert refusal(quotas, other) is None
    quotas.leave(key)
    assert refusal(quotas, key) is None


def test_what_a_dead_worker_had_in_flight_is_forgotten() -> None:
    key = ApiKey("a", max_in_flight=1)
    quotas = Quotas([key], num_workers=2)
    quotas.choose_worker(1)
    quotas.enter(key)
    quotas.choose_worker(1)  # its successor
    assert refusal(quotas, key) is None


def test_all_keys_together_have_a_limit_of_requests_in_flight() -> None:
    quotas = Quotas([], max_in_flight=1)
    with quotas.request(ANYBODY):
        error = refusal(quotas, ANYBODY)
        assert error is not None
        assert error.code == "overloaded"
    assert quotas.in_flight() == 0


def test_a_rate_holds_over_workers_and_over_the_minute_s_end() -> None:
    clock = Clock()
    key = ApiKey("a", requests_per_minute=10)
    quotas = Quotas([key], num_workers=2, clock=clock)
    for number in range(10):
        quotas.choose_worker(number % 2)
        assert refusal(quotas, key) is None
        quotas.leave(key)
    error = refusal(quotas, key)
    assert error is not None
    assert error.retry_after_s == pytest.approx(60.0)
    clock.now += WINDOW_S - 1.0
    assert refusal(quotas, key) is not None
    clock.now += 2 * WINDOW_S
    assert [refusal(quotas, key) is None for _ in range(11)].count(True) == 10


def test_keys_come_and_go_while_others_are_counted() -> None:
    """More names than there is room for: rows of those that count nothing any more are used again."""
    clock = Clock()
    quotas, busy = Quotas(clock=clock, num_workers=2), ApiKey("busy", max_in_flight=1)
    quotas.enter(busy)
    for number in range(3 * MIN_ROWS):
        with quotas.request(ApiKey(f"key {number}", requests_per_minute=5)):
            clock.now += 1.0
    assert refusal(quotas, busy) is not None
    quotas.leave(busy)
    quotas.choose_worker(1)
    quotas.enter(busy)
    quotas.choose_worker(0)
    assert quotas.in_flight(busy) == 1
    assert quotas.in_flight() == 1

"""The circuit of an engine: closed, open, half-open."""

from __future__ import annotations

import random

import pytest

from inferengine.client.circuit_breaker import (
    FIRST_PAUSE_S,
    FORGIVEN_S,
    LONGEST_PAUSE_S,
    MAX_FAILURES,
    PROBE_S,
    CircuitBreaker,
    CircuitState,
)


def open_circuit(now: float = 0.0) -> CircuitBreaker:
    circuit = CircuitBreaker()
    for _ in range(MAX_FAILURES):
        circuit.failed(now)
    assert circuit.state is CircuitState.OPEN
    return circuit


def test_failures_in_a_row_open_it_and_a_success_between_does_not_let_them() -> None:
    circuit = CircuitBreaker()
    for _ in range(MAX_FAILURES - 1):
        assert not circuit.failed(0.0)
    circuit.succeeded()
    for _ in range(MAX_FAILURES - 1):
        assert not circuit.failed(0.0)
    assert circuit.allows(0.0)
    assert circuit.failed(0.0)
    assert not circuit.allows(0.0)


def test_after_its_pause_one_probe_goes_and_its_success_closes_it() -> None:
    circuit = open_circuit()
    assert not circuit.allows(FIRST_PAUSE_S - 0.01)
    assert circuit.allows(FIRST_PAUSE_S)
    assert circuit.sent(FIRST_PAUSE_S)
    assert not circuit.allows(FIRST_PAUSE_S + 1.0)
    assert circuit.succeeded()
    assert circuit.state is CircuitState.CLOSED
    assert circuit.allows(FIRST_PAUSE_S + 1.0)


def test_a_failed_probe_doubles_the_pause_up_to_the_longest() -> None:
    circuit, now, pauses = open_circuit(), 0.0, []
    for _ in range(9):
        pauses.append(circuit.pause_s)
        now += circuit.pause_s
        assert circuit.allows(now)
        circuit.sent(now)
        assert circuit.failed(now)
    assert pauses == [min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**place) for place in range(9)]


def test_a_probe_without_an_outcome_is_replaced() -> None:
    for settle in (lambda circuit: circuit.ended(), lambda circuit: None):
        circuit = open_circuit()
        assert circuit.allows(1.0)
        circuit.sent(1.0)
        settle(circuit)
        assert circuit.allows(1.0 + PROBE_S)


def test_a_success_of_a_request_sent_before_it_opened_does_not_close_it() -> None:
    circuit = open_circuit()
    assert not circuit.succeeded()
    assert not circuit.allows(0.5)


def test_a_long_time_without_a_failure_lets_the_pauses_start_over() -> None:
    circuit = open_circuit()
    assert circuit.allows(FIRST_PAUSE_S)
    circuit.succeeded()
    for _ in range(MAX_FAILURES):
        circuit.failed(FIRST_PAUSE_S + FORGIVEN_S + 1.0)
    assert circuit.pause_s == FIRST_PAUSE_S


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_it_follows_its_rules(seed: int) -> None:
    """At most one probe at a time, no request while open, and it always recovers with its engine."""
    generator, circuit, now, probed_s = random.Random(seed), CircuitBreaker(), 0.0, None
    for _ in range(2000):
        now += generator.expovariate(2.0)
        before = circuit.state
        if circuit.allows(now):
            assert circuit.state is not CircuitState.OPEN
            if circuit.sent(now):
                assert probed_s is None or now >= probed_s + PROBE_S
                probed_s = now
        else:
            assert circuit.state is not CircuitState.CLOSED
        draw = generator.random()
        if draw < 0.5:
            opened = circuit.failed(now)
            assert opened == (circuit.state is CircuitState.OPEN and before is not CircuitState.OPEN) or opened
        elif draw < 0.7:
            circuit.succeeded()
        elif draw < 0.8:
            circuit.ended()
        if draw < 0.8:
            probed_s = None
        assert FIRST_PAUSE_S <= circuit.pause_s <= LONGEST_PAUSE_S or not circuit.num_opened
    now += LONGEST_PAUSE_S + PROBE_S
    assert circuit.allows(now)
    circuit.sent(now)
    circuit.succeeded()
    assert circuit.state is CircuitState.CLOSED

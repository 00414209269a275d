"""Flow control at both ends."""

from __future__ import annotations

from inferengine.wire.messages import CREDIT_DELAY_S, Credit, CreditGiver, CreditWindow


def test_a_window_closes_when_it_is_full_and_opens_with_credit() -> None:
    window = CreditWindow(2)
    assert (window.take(1.0), window.open) == (1, True)
    assert (window.take(2.0), window.open) == (2, False)
    assert window.full_since_s == 2.0
    assert window.give(1)
    assert (window.open, window.full_since_s) == (True, None)


def test_credit_for_a_step_that_was_never_sent_is_refused() -> None:
    window = CreditWindow(2)
    window.take(0.0)
    assert not window.give(2)
    assert window.acknowledged == 0


def test_old_credit_changes_nothing() -> None:
    window = CreditWindow(4)
    for _ in range(3):
        window.take(0.0)
    assert window.give(3)
    assert window.give(1)
    assert window.acknowledged == 3


def test_credit_is_given_after_half_a_window() -> None:
    giver = CreditGiver()
    giver.start(window=8, seq=0)
    assert [giver.handled(seq, 0.0) for seq in (1, 2, 3, 4)] == [None, None, None, Credit(4)]


def test_credit_is_given_after_a_while_even_for_one_step() -> None:
    giver = CreditGiver()
    giver.start(window=64, seq=10)
    assert giver.handled(11, now=5.0) is None
    assert giver.due(5.0 + CREDIT_DELAY_S / 2) is None
    assert giver.due(5.0 + CREDIT_DELAY_S) == Credit(11)
    assert giver.due(9.0) is None


def test_nothing_is_due_without_a_connection() -> None:
    giver = CreditGiver()
    giver.start(window=64, seq=0)
    giver.handled(1, now=5.0)
    giver.reset()
    assert giver.due(99.0) is None

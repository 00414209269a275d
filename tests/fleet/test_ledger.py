"""What the ledger of a fleet plans: starts, restarts, rolling upgrades, machines that leave, failures."""

from __future__ import annotations

import random

import pytest

from inferengine.fleet.ledger import SILENT_S, Drain, EngineStage, Ledger, Remove, Start
from inferengine.process.supervisor import LOST_RETRY_S, MAX_FAST_FAILURES
from tests.fleet.builders import PretendFleet, make_report


def states(fleet: PretendFleet) -> list[str]:
    return [engine.state.value for engine in fleet.ledger.engines.values()]


def test_a_new_fleet_starts_all_engines_at_once_and_names_them_when_they_are_ready() -> None:
    fleet = PretendFleet(3)
    fleet.turn()
    assert fleet.actions == [Start(0), Start(1), Start(2)]
    assert fleet.num_ready() == 0
    fleet.settle(10)
    assert fleet.num_ready() == 3
    assert fleet.ledger.is_settled(3, 1)
    assert len(fleet.actions) == 3


def test_an_engine_that_is_lost_is_not_named_and_is_left_to_ray() -> None:
    fleet = PretendFleet(2)
    fleet.settle(10)
    fleet.actions.clear()
    fleet.lose(0)
    assert fleet.ledger.addresses(fleet.now) == ["tcp://10.0.0.1:20003"]
    fleet.settle(10)
    assert fleet.num_ready() == 2
    assert fleet.ledger.engines[0].restarts == 1
    assert fleet.actions == []


def test_an_engine_whose_machine_says_nothing_is_not_named() -> None:
    fleet = PretendFleet(1)
    fleet.settle(10)
    assert fleet.ledger.addresses(fleet.now + SILENT_S + 0.1) == []


def test_an_actor_that_ended_for_good_is_replaced_under_another_number() -> None:
    fleet = PretendFleet(2)
    fleet.settle(10)
    fleet.actions.clear()
    fleet.ledger.gone(0, "its node was lost", fleet.now)
    fleet.settle(10)
    assert fleet.actions == [Start(2)]
    assert fleet.num_ready() == 2


def test_an_upgrade_starts_a_new_engine_before_it_drains_an_old_one() -> None:
    fleet = PretendFleet(2)
    fleet.settle(10)
    fleet.actions.clear()
    fleet.revision = 2
    fleet.settle(60)
    assert fleet.actions == [Start(2), Drain(0), Start(3), Remove(0), Drain(1), Remove(1)]
    assert fleet.ledger.is_settled(2, 2)


def test_without_room_for_one_more_an_upgrade_drains_first() -> None:
    fleet = PretendFleet(2, surge=0, room=2)
    fleet.settle(10)
    fleet.actions.clear()
    fleet.revision = 2
    fleet.settle(60)
    assert fleet.actions[:3] == [Drain(0), Start(2), Remove(0)]
    assert fleet.ledger.is_settled(2, 2)


def test_an_upgrade_that_does_not_start_stops_and_leaves_the_old_engines() -> None:
    fleet = PretendFleet(3)
    fleet.settle(10)
    fleet.bad, fleet.revision = {2}, 2
    fleet.settle(300)
    assert fleet.num_ready() == 3
    assert states(fleet) == ["ready", "ready", "ready", "failed"]
    assert "no such key" in fleet.ledger.failure(2)
    fleet.revision = 3
    fleet.settle(100)
    assert fleet.ledger.is_settled(3, 3)


def test_a_fleet_whose_engines_cannot_run_says_why_and_starts_no_more() -> None:
    fleet = PretendFleet(2)
    fleet.bad = {1}
    fleet.settle(300)
    assert states(fleet) == ["failed", "failed"]
    assert "the configuration or the command line is wrong" in fleet.ledger.failure(1)
    assert [action for action in fleet.actions if isinstance(action, Start)] == [Start(0), Start(1)]


def test_an_engine_of_a_revision_that_has_served_is_tried_again_after_a_while() -> None:
    fleet = PretendFleet(2)
    fleet.settle(10)
    fleet.ledger.reported(0, make_report(ready=False, exit_code=3, status="no such file"), fleet.now)
    assert fleet.ledger.engines[0].state is EngineStage.FAILED
    assert fleet.ledger.failure(1) == ""
    fleet.actions.clear()
    fleet.settle(int(LOST_RETRY_S) - 2)
    assert fleet.actions == [Remove(0)]
    fleet.settle(20)
    assert fleet.num_ready() == 2


def test_an_engine_that_ends_at_once_again_and_again_is_given_up() -> None:
    ledger = Ledger()
    ledger.add(0, 1, 0.0)
    for _ in range(MAX_FAST_FAILURES - 1):
        ledger.reported(0, make_report(ready=False, exit_code=1, lifetime_s=1.0), 0.0)
        assert ledger.engines[0].state is EngineStage.STARTING
    ledger.reported(0, make_report(ready=False, exit_code=1, lifetime_s=1.0), 0.0)
    assert ledger.engines[0].state is EngineStage.FAILED


def test_an_actor_that_cannot_be_made_counts_as_failed_with_its_reason() -> None:
    ledger = Ledger()
    ledger.add(0, 1, 0.0)
    ledger.gone(0, "ModuleNotFoundError: No module named 'inferengine'", 0.0)
    assert ledger.failure(1) == "ModuleNotFoundError: No module named 'inferengine'"


def test_scaling_down_drains_the_newest_and_cancels_what_does_not_serve_yet() -> None:
    fleet = PretendFleet(4, room=3)
    fleet.settle(10)
    fleet.actions.clear()
    fleet.wanted = 2
    fleet.settle(20)
    assert fleet.actions == [Remove(3), Drain(2), Remove(2)]


def test_engines_of_a_machine_that_leaves_are_replaced_and_then_drained() -> None:
    fleet = PretendFleet(2)
    fleet.settle(10)
    fleet.actions.clear()
    fleet.leaving = {"node-0"}
    fleet.settle(30)
    assert fleet.actions == [Start(2), Drain(0), Remove(0)]


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_a_fleet_comes_to_what_is_wanted(seed: int) -> None:
    """Losses, upgrades, other sizes and machines that leave, at random. Never more engines than wanted and one more
    run, an upgrade alone never leaves fewer READY than are wanted, and in the end all is as wanted."""
    generator = random.Random(seed)
    fleet = PretendFleet(generator.randint(1, 6), surge=generator.randint(0, 1))
    fleet.settle(10)
    fleet.revision += 1
    for _ in range(60):
        fleet.turn()
        assert fleet.num_ready() >= fleet.wanted - (1 - fleet.surge)
    for _ in range(80):
        fleet.turn(generator.random() * 3)
        live = [e for e in fleet.ledger.engines.values() if e.state in (EngineStage.STARTING, EngineStage.READY)]
        event = generator.randrange(12)
        if event == 0 and live:
            fleet.lose(generator.choice(live).number)
        elif event == 1 and (served := [engine for engine in live if engine.has_served]):
            fleet.ledger.gone((lost := generator.choice(served).number), "gone", fleet.now)
            fleet.started.pop(lost, None)
        elif event == 2:
            fleet.revision += 1
        elif event == 3:
            fleet.wanted = max(1, fleet.wanted + generator.choice((-1, 1)))
        elif event == 4:
            fleet.leaving = set(generator.sample([f"node-{number}" for number in range(4)], 1))
        starts = [action for action in fleet.actions if isinstance(action, Start)]
        assert len({start.number for start in starts}) == len(starts)
    fleet.leaving = set()
    fleet.settle(300)
    assert fleet.ledger.is_settled(fleet.wanted, fleet.revision), states(fleet)

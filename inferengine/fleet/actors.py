"""The Ray actors of a fleet: one host for each engine, and one directory. The only file that imports Ray.

Ray places the engines, restarts them (`max_restarts=-1`) and knows which machines are being drained. The directory
asks each engine's actor for its state every REPORT_S. A call to an actor that Ray cannot reach fails at once, so no
failure detector of our own is needed. Placement groups and resource requests that do not fit wait in Ray, whose
autoscaler sees them and adds machines.

The directory is a named, detached actor. When it is lost, Ray restarts it with its original constructor arguments. It
then finds the engines by name, and takes the newest goal of which one of them holds a copy. Engines serve meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from inferengine.config import CPU_CACHE_SHARE
from inferengine.errors import ConfigError, InferEngineError
from inferengine.fleet.host import EngineHost, end_of_process
from inferengine.fleet.ledger import Action, Drain, Ledger, Remove, Start
from inferengine.fleet.probe import PortProbe
from inferengine.fleet.scaling import ScalingPolicy
from inferengine.fleet.spec import NAMESPACE, FleetKeys, FleetSpec, Goal
from inferengine.process.supervisor import FINAL_CODES

TURN_S = 0.1  # between rounds of a control thread
REPORT_S = 0.4  # between requests for one engine's state
LATE_S = 0.4  # without an answer after which the engine's port is probed
LEAVING_S = 2.0  # between requests for the list of draining machines
RECOVER_S = 5.0  # how long a restarted directory waits for the engines' copies of the goal
ANSWER_S = 30.0  # time limit of a command that the directory has to answer
PROBE_S = 3.0  # time limit of the TCP connection that tests whether Ray listens
LEAVE_S = 0.3  # from reporting an unexpected end until the actor exits, and Ray restarts it
UNHEARD_S = 1.5  # how long an actor waits for the directory to ask, before it exits unreported
STAY_S = 60.0  # how long an actor whose engine drained, or cannot run, waits for the directory to remove it
CALLERS = 16  # concurrent calls of the directory

logger = logging.getLogger(__name__)


class EngineActor:
    """Runs one engine process.

    The actor exits when the engine ends unexpectedly, so that Ray restarts both, and when its raylet has gone.
    """

    def __init__(
        self, name: str, revision: int, spec: Mapping[str, Any], keys: Mapping[str, str], goal: Mapping[str, Any]
    ) -> None:
        """Start the engine. The mappings are the plain values of a FleetSpec, a FleetKeys and a Goal."""
        own = FleetSpec(**spec)
        settings = {"INFERENGINE_ENGINE_TENSOR_PARALLEL": str(own.tensor_parallel), **own.settings}
        if not own.gpus:  # the engines of a machine share its memory as they share its cores
            share = CPU_CACHE_SHARE * min(1.0, own.cpus / _cpus_of_this_node())
            settings.setdefault("INFERENGINE_CACHE_MEMORY_FRACTION", f"{share:.4f}")
        self._goal = dict(goal)
        self._node = ray.get_runtime_context().get_node_id()
        self._drain_requested = False
        self._reported_end = threading.Event()
        self._host = EngineHost(
            name,
            ray.util.get_node_ip_address(),
            settings,
            FleetKeys(**keys),
            drain_timeout_s=own.drain_timeout_s,
            watchdog_s=own.watchdog_s,
        )
        signal.signal(signal.SIGTERM, self._on_sigterm)  # `ray stop`
        threading.Thread(target=self._end_with_engine, name="inferengine-end", daemon=True).start()

    def report(self, goal: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the engine's state as plain values. A `goal` is stored, as a copy for a restarted directory."""
        if goal is not None:
            self._goal = dict(goal)
        found = self._host.report()
        if found["exit_code"] is not None:
            self._reported_end.set()
        return {**found, "node": self._node, "edition": self._goal["edition"]}

    def goal(self) -> dict[str, Any]:
        """Return this engine's copy of the directory's goal, which may be older than the directory's own."""
        return self._goal

    def drain(self) -> None:
        """Tell the engine to finish its requests and exit."""
        self._drain_requested = True
        self._host.drain()

    def _on_sigterm(self, *_: object) -> None:
        self._host.drain()

    def _end_with_engine(self) -> None:
        raylet = os.getppid()
        with end_of_process(raylet) as has_ended:
            while not self._host.ended.is_set():
                if has_ended(TURN_S) or os.getppid() != raylet:
                    self._host.kill()  # before this process, whose own end may take a second on a busy machine
                    os._exit(1)
        code = self._host.report()["exit_code"]
        heard = self._reported_end.wait(UNHEARD_S)
        if self._drain_requested or (heard and code in FINAL_CODES):
            time.sleep(STAY_S)  # the directory removes this actor meanwhile
        elif heard:
            time.sleep(LEAVE_S)
        os._exit(1)  # Ray starts it again


class DirectoryActor:
    """The ledger of one fleet as an actor: polls the engines, carries out the ledger's plan, answers commands."""

    def __init__(self, name: str, goal: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        """`goal` is the goal at the fleet's start. A newer copy that an engine holds takes its place."""
        self._name = name
        self._keys = dict(keys)
        self._goal = goal_of(goal)
        self._ledger = Ledger()
        self._handles: dict[int, Any] = {}
        self._asked: dict[int, tuple[Any, float]] = {}  # pending report() calls, and when each was made
        self._due: dict[int, float] = {}  # when each engine is to be asked next
        self._copies: dict[int, int] = {}  # edition of the goal that each engine holds
        self._probe = PortProbe()
        self._leaving: set[str] = set()
        self._leaving_due_s = 0.0
        self._is_closing = False
        self._lock = threading.RLock()
        self._recover()
        self._unheard = set(self._handles)  # engines of an earlier directory that have not reported to this one
        self._recovered_s = time.monotonic()
        self._policy = self._new_policy()
        threading.Thread(target=self._run, name="inferengine-directory", daemon=True).start()

    # -- methods for callers -----------------------------------------------------------------------------------------

    def addresses(self) -> list[str] | None:
        """Return the addresses of the engines that serve; None while a restarted directory still collects reports."""
        with self._lock:
            now = time.monotonic()
            if self._unheard and now < self._recovered_s + RECOVER_S:
                return None
            return self._ledger.addresses(now)

    def front_end_keys(self) -> dict[str, str]:
        """Return the front ends' key pair and the engines' public key."""
        return {name: value for name, value in self._keys.items() if name != "engine_secret"}

    def status(self) -> dict[str, Any]:
        """Return everything about the fleet except its secrets, as plain values."""
        with self._lock:
            now, goal = time.monotonic(), self._goal
            return {
                "fleet": self._name,
                "wanted": goal.wanted,
                "least": goal.spec.least,
                "most": goal.spec.most,
                "revision": goal.revision,
                "settled": self._ledger.is_settled(goal.wanted, goal.revision),
                "failure": self._ledger.failure(goal.revision),
                "closing": self._is_closing,
                "leaving_nodes": sorted(self._leaving),
                "addresses": self._ledger.addresses(now),
                "engines": [
                    {
                        "name": f"engine-{engine.number}",
                        "state": engine.state.value,
                        "revision": engine.revision,
                        "address": engine.address,
                        "node": engine.node,
                        "pid": engine.pid,
                        "restarts": engine.restarts,
                        **engine.load._asdict(),
                        "status": engine.reason or engine.status,
                        "for_s": round(now - engine.changed_s, 1),
                    }
                    for engine in sorted(self._ledger.engines.values(), key=lambda engine: engine.number)
                ],
            }

    def scale(self, least: int, most: int) -> None:
        """Keep the number of engines between `least` and `most` from now on."""
        with self._lock:
            spec = dataclasses.replace(self._goal.spec, least=least, most=most)
            wanted = min(max(self._goal.wanted, least), most)
            self._pursue(dataclasses.replace(self._goal, spec=spec, wanted=wanted))
            self._policy = self._new_policy()

    def upgrade(self, spec: Mapping[str, Any]) -> int:
        """Replace every engine by one of this spec. The fleet's bounds stay. Returns the new revision."""
        with self._lock:
            before = self._goal
            new = dataclasses.replace(FleetSpec(**spec), least=before.spec.least, most=before.spec.most)
            self._pursue(dataclasses.replace(before, spec=new, revision=before.revision + 1))
            self._policy = self._new_policy()
            return self._goal.revision

    def drain(self, number: int) -> bool:
        """Drain one engine; a new one is started in its place. Returns False if no engine has that number."""
        with self._lock:
            if number not in self._handles:
                return False
            self._do(Drain(number))
            return True

    def close(self, *, at_once: bool = False) -> None:
        """Drain all engines, or remove them at once. The caller removes the directory when no engine is left."""
        with self._lock:
            self._is_closing = True
            self._pursue(dataclasses.replace(self._goal, wanted=0))
            if at_once:
                for number in list(self._handles):
                    self._do(Remove(number))

    # -- the control thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                with self._lock:
                    self._turn(time.monotonic())
            except Exception:  # an error inside Ray; the next turn tries again
                logger.exception("the directory's turn failed")
            time.sleep(TURN_S)

    def _turn(self, now: float) -> None:
        self._ask(now)
        self._listen(now)
        self._probe_late(now)
        if now >= self._leaving_due_s:
            self._leaving_due_s = now + LEAVING_S
            self._leaving = leaving_nodes()
        if not self._is_closing:
            wanted = self._policy.wanted(now, self._ledger.loads(), self._goal.wanted)
            if wanted != self._goal.wanted:
                logger.info("%d engines instead of %d", wanted, self._goal.wanted)
                self._pursue(dataclasses.replace(self._goal, wanted=wanted))
        goal = self._goal
        for action in self._ledger.plan(now, goal.wanted, goal.revision, surge=goal.spec.surge, leaving=self._leaving):
            self._do(action)

    def _ask(self, now: float) -> None:
        goal: dict[str, Any] | None = None
        for number, handle in self._handles.items():
            if number in self._asked or now < self._due.get(number, 0.0):
                continue
            if self._copies.get(number) != self._goal.edition:
                goal = goal or dataclasses.asdict(self._goal)
                self._asked[number] = (handle.report.remote(goal), now)
            else:
                self._asked[number] = (handle.report.remote(), now)
            self._due[number] = now + REPORT_S

    def _listen(self, now: float) -> None:
        questions = {reference: number for number, (reference, _) in self._asked.items()}
        if not questions:
            return
        answered, _ = ray.wait(list(questions), num_returns=len(questions), timeout=0)
        for reference in answered:
            number = questions[reference]
            _, asked_s = self._asked.pop(number)
            self._unheard.discard(number)
            try:
                report = ray.get(reference)
            except ray.exceptions.ActorDiedError as error:
                self._remove_group(number)
                self._ledger.gone(number, why_it_died(error), now)
                self._forget(number)
            except ray.exceptions.RayError:
                self._ledger.unavailable(number, now)
                self._copies.pop(number, None)
            else:
                self._copies[number] = report["edition"]
                self._ledger.reported(number, report, asked_s)

    def _probe_late(self, now: float) -> None:
        """Probe the ports of engines whose answers are late. Ray tells of an actor's end at once only to a question
        that runs again. So the ports of engines whose answers are late are asked."""
        late = {
            engine.address: number
            for number, (_, asked_s) in self._asked.items()
            if now - asked_s > LATE_S and (engine := self._ledger.engines.get(number)) is not None and engine.address
        }
        for address in self._probe.refused(late):
            self._ledger.unavailable(late[address], now)

    def _do(self, action: Action) -> None:
        match action:
            case Start(number):
                self._start(number)
            case Drain(number):
                self._ledger.draining(number, time.monotonic())
                self._handles[number].drain.remote()
            case Remove(number):
                if (handle := self._handles.get(number)) is not None:
                    ray.kill(handle, no_restart=True)
                    self._remove_group(number)
                    self._forget(number)
                self._ledger.removed(number)

    def _start(self, number: int) -> None:
        goal, spec = self._goal, self._goal.spec
        name = self._actor_name(number, goal.revision)
        options: dict[str, Any] = {"num_cpus": spec.cpus, "num_gpus": spec.gpus, "scheduling_strategy": "SPREAD"}
        if spec.tensor_parallel > 1:  # all devices of the engine on one machine, granted and released together
            bundle = {"CPU": spec.cpus, **({"GPU": spec.gpus} if spec.gpus else {})}
            group = placement_group([bundle], strategy="STRICT_PACK", name=name, lifetime="detached")
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, 0)
        self._handles[number] = (
            ray.remote(EngineActor)
            .options(name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=-1, **options)
            .remote(f"engine-{number}", goal.revision, spec.to_map(), self._keys, dataclasses.asdict(goal))
        )
        self._ledger.add(number, goal.revision, time.monotonic())

    def _remove_group(self, number: int) -> None:
        """Remove an engine's placement group, if it has one.

        The group is looked up by name and not by today's spec: an engine of an earlier revision may have a group
        where the current spec needs none.
        """
        with contextlib.suppress(ValueError):  # no group has that name
            name = self._actor_name(number, self._ledger.engines[number].revision)
            remove_placement_group(get_placement_group(name))

    def _forget(self, number: int) -> None:
        for table in (self._handles, self._asked, self._due, self._copies):
            table.pop(number, None)

    def _pursue(self, goal: Goal) -> None:
        self._goal = dataclasses.replace(goal, edition=self._goal.edition + 1)

    def _new_policy(self) -> ScalingPolicy:
        spec = self._goal.spec
        return ScalingPolicy(spec.least, spec.most, spec.queue, spec.first_token_ms)

    def _actor_name(self, number: int, revision: int) -> str:
        return f"{self._name}/engine-{number}.{revision}"

    def _recover(self) -> None:
        """Find the engines of an earlier run of this directory, and the newest goal that they hold."""
        now, prefix = time.monotonic(), f"{self._name}/engine-"
        for name in actor_names():
            if name.startswith(prefix):
                number, _, revision = name.removeprefix(prefix).partition(".")
                self._handles[int(number)] = ray.get_actor(name, namespace=NAMESPACE)
                self._ledger.add(int(number), int(revision), now)
        questions = [handle.goal.remote() for handle in self._handles.values()]
        if not questions:
            return
        answered, _ = ray.wait(questions, num_returns=len(questions), timeout=RECOVER_S)
        for reference in answered:
            with contextlib.suppress(ray.exceptions.RayError):
                kept = goal_of(ray.get(reference))
                if kept.edition > self._goal.edition:
                    self._goal = kept


def goal_of(values: Mapping[str, Any]) -> Goal:
    """Build a Goal from the plain values that dataclasses.asdict made of one."""
    return Goal(**{**values, "spec": FleetSpec(**values["spec"])})


def actor_names() -> list[str]:
    """Return the names of the live actors of all fleets."""
    return [item["name"] for item in ray.util.list_named_actors(all_namespaces=True) if item["namespace"] == NAMESPACE]


def leaving_nodes() -> set[str]:
    """Return the ids of the nodes that Ray is draining: preempted, scaled down, or by `ray drain-node`."""
    try:
        from ray._private.state import state  # there is no public call; Ray's own libraries use this one

        return set(state.get_draining_nodes())
    except Exception:  # another version of Ray: engines of a drained node are then restarted only after it has gone
        logger.debug("Ray does not report draining nodes", exc_info=True)
        return set()


def why_it_died(error: BaseException) -> str:
    """Return the last line of Ray's message about an actor's death."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _cpus_of_this_node() -> float:
    own = ray.get_runtime_context().get_node_id()
    found = [node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["NodeID"] == own]
    return max(float(found[0]) if found else 1.0, 1.0)


# -- for commands and watchers -----------------------------------------------------------------------------------------


def connect(address: str) -> None:
    """Connect this process to a Ray cluster. Raises ConfigError with the remedy.

    `address`: HOST:PORT of the cluster's head if this machine is one of its nodes, ray://HOST:PORT from elsewhere, or
    `auto` for the cluster that runs on this machine.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
        except OSError as error:
            raise ConfigError(
                "--ray", f"no Ray answers at {address} ({error.strerror or error}): start it with 'ray start --head'"
            ) from None
    elif address != "auto":
        raise ConfigError("--ray", f"{address!r} is no address: HOST:PORT of the head, ray://HOST:PORT, or auto")
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # ConnectionError, RuntimeError (versions), ValueError
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError("--ray", f"{address}: {text}; 'ray status' says whether this machine is a node") from None


def disconnect() -> None:
    """Close the connection to the cluster."""
    ray.shutdown()


def cluster_gpus() -> float:
    """Return the number of GPUs of the whole cluster, in use or not."""
    return float(ray.cluster_resources().get("GPU", 0.0))


class Directory:
    """A caller's handle of a fleet's directory actor: calls its methods by name, with a time limit."""

    def __init__(self, fleet: str, handle: Any) -> None:
        self.fleet = fleet
        self._handle = handle

    @classmethod
    def start(cls, fleet: str, goal: Goal, keys: FleetKeys) -> Directory:
        """Start the directory of a new fleet. Raises ConfigError if a fleet of that name exists."""
        actor = ray.remote(DirectoryActor).options(
            name=f"{fleet}/directory",
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=CALLERS,
            num_cpus=0,
        )
        try:
            handle = actor.remote(fleet, dataclasses.asdict(goal), dataclasses.asdict(keys))
        except ValueError:
            raise ConfigError(
                "--fleet",
                f"there is a fleet {fleet} already: take another name, change it ('inferengine fleet upgrade', 'fleet "
                "scale'), or end it ('fleet down')",
            ) from None
        return cls(fleet, handle)

    @classmethod
    def find(cls, fleet: str) -> Directory:
        """Return the directory of a running fleet. Raises ConfigError if there is none of that name."""
        try:
            return cls(fleet, ray.get_actor(f"{fleet}/directory", namespace=NAMESPACE))
        except ValueError:
            known = sorted({name.partition("/")[0] for name in actor_names()})
            which = f"there are {', '.join(known)}" if known else "'inferengine fleet up' starts one"
            raise ConfigError("--fleet", f"no fleet {fleet} runs on this Ray: {which}") from None

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of DirectoryActor. Raises engine_unavailable if it does not answer within ANSWER_S."""
        try:
            return ray.get(getattr(self._handle, method).remote(*arguments, **options), timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError:
            text = f"The directory of the fleet does not answer within {ANSWER_S:g} s; Ray may be starting it again."
            raise InferEngineError("engine_unavailable", text) from None
        except ray.exceptions.RayError as error:
            text = f"The directory of the fleet does not run: {why_it_died(error)}"
            raise InferEngineError("engine_unavailable", text) from None

    def remove(self) -> None:
        """Remove the directory actor. Its engines must be gone."""
        ray.kill(self._handle, no_restart=True)

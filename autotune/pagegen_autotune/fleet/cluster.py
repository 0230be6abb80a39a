"""The devices of a Ray cluster: found by what the nodes report, one actor each, replaced while their node lives."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pagegen import settings, targets
from pagegen.spec import AttentionSpec, Device, Profile, Target, check
from pagegen_autotune.fleet.station import Builder, Found, Kit, Station
from pagegen_autotune.interrupt import handlers_kept
from pagegen_autotune.measured import TuneError

log = logging.getLogger(__name__)

INSTALL = "pip install 'pagegen-attention[fleet]'"
CONNECT_S = 5.0
# A station is begun so many times on one slot: what it loses each time is measured elsewhere.
MAX_STARTS = 3
MAX_BUILDERS, BUILDER_START_S = 16, 60.0
# Ray gives a process as many threads as it asked for CPUs, one with a GPU. Empty: as many as a process has by itself,
# so that times compare with those of a run without Ray.
_ENVIRONMENT = {"env_vars": {"OMP_NUM_THREADS": ""}}
_LOOK_S = 2.0  # how often the nodes are asked for anew


@dataclass(eq=False)
class Member:
    """A station that is ready: its actor, what it told, and the libraries that it has."""

    actor: Any
    found: Found
    node: str
    has: set[Any] = field(default_factory=set)

    @property
    def device(self) -> Device:
        assert self.found.device is not None  # only stations that told one become members
        return self.found.device


@dataclass(eq=False)
class _Slot:
    """A GPU of a node, or its CPU: what one station can have."""

    node: str
    address: str
    gpu: bool
    cpus: float
    starts: int = 0
    actor: Any = None
    asked: Any = None  # the reference of what the station tells; None once it has told
    over: bool = False


def connect(address: str) -> tuple[Any, bool]:
    """The module `ray`, connected to a running cluster, and whether it was connected here. Raises TuneError saying what
    to do."""
    if address.startswith("ray://"):
        raise TuneError(
            f"--ray must be auto or HOST:PORT, got {address}: run this on a node of the cluster, not by client"
        )
    if address != "auto" and not re.fullmatch(r"[^\s:/]+:\d{1,5}", address):
        raise TuneError(f"--ray must be auto or HOST:PORT, got {address!r}")
    settings.keep_ray_quiet()
    try:
        import ray
    except ImportError as error:
        raise TuneError(f"tuning on a cluster needs Ray ({error}): {INSTALL}") from error
    if address != "auto":
        _reachable(address)
    if ray.is_initialized():
        return ray, False
    try:
        with handlers_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # noqa: BLE001  ConnectionError, RuntimeError (other versions), ValueError, RayError, ...
        start = "start one with ray start --head --disable-usage-stats, or name another"
        if "Could not find any" not in str(error):  # something answered
            mode = " and RAY_AUTH_MODE=token" if address != "auto" else ""  # by itself Ray looks for none there
            start = f"where it asks for a token it needs that of the head (~/.ray/auth_token) here{mode}; {start}"
        raise TuneError(f"no Ray cluster can be used at {address} ({check.first_line(error)}): {start}") from error
    return ray, True


def _reachable(address: str) -> None:
    """Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise TuneError(
            f"no Ray cluster answers at {address} ({error}): check the address, or use auto on a node"
        ) from error


def matches(device: Device, wanted: Sequence[str]) -> bool:
    """Whether a device is one of `wanted`: a target ("sm_90", "cpu") or a part of its name. All are where none is
    named."""
    name = device.name.lower()
    return not wanted or any(
        one.lower() in (str(device.target), device.target.kind) or one.lower() in name for one in wanted
    )


class Cluster:
    """The stations of a cluster, while entered. `devices` names those that are wanted."""

    def __init__(
        self, address: str, spec: AttentionSpec, profile: Profile, *, devices: Sequence[str], seed: int, kit: Kit
    ) -> None:
        self._address = address
        self._spec = spec
        self._profile = profile
        self._devices = devices
        self._seed = seed
        self._kit = kit
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._looked = -_LOOK_S
        self._lock = threading.RLock()  # runs of several kinds lose stations while this looks for new ones
        self.left_out: list[str] = []
        self.other: set[str] = set()  # names of devices that were not asked for

    def __enter__(self) -> Cluster:
        self.ray, self._mine = connect(self._address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for slot in self._slots.values():
            self._end(slot)
        if self._mine:
            self.ray.shutdown()

    # --- stations ---------------------------------------------------------------------------------------------------

    @property
    def starting(self) -> int:
        """Stations that were begun and have not told yet: their node may be busy with another job."""
        return sum(slot.asked is not None for slot in self._slots.values())

    def look(self) -> list[Member]:
        """Begins stations on what is new or was lost, and returns those that have become ready."""
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_S:
                self._looked = time.monotonic()
                self._find()
            asked = {slot.asked: slot for slot in self._slots.values() if slot.asked is not None}
            if not asked:
                return []
            ready, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=0)
            members = [member for reference in ready if (member := self._told(asked[reference])) is not None]
            if any(asked[reference].actor is None and not asked[reference].over for reference in ready):
                self._find()  # lost before it was ready: begun anew now, since a run ends where nothing is starting
            return members

    def _find(self) -> None:
        alive = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
        for identity, node in alive.items():
            has = node["Resources"]
            gpus = int(has.get("GPU", 0))
            for number in range(gpus or int(has.get("CPU", 0) >= 1)):
                slot = _Slot(identity, node["NodeManagerAddress"], bool(gpus), has.get("CPU", 0))
                self._slots.setdefault((identity, number), slot)
        for slot in self._slots.values():
            if slot.actor is None and not slot.over and slot.node in alive:
                self._begin(slot)

    def _begin(self, slot: _Slot) -> None:
        """Asks Ray for a station: a GPU, or all CPUs of a node, so that nothing of Ray's runs beside a measurement."""
        if slot.starts >= MAX_STARTS:
            slot.over = True
            self.left_out.append(f"{slot.address}: its station was lost {slot.starts} times")
            return
        slot.starts += 1
        resources = {"num_gpus": 1, "num_cpus": min(1, slot.cpus)} if slot.gpu else {"num_cpus": slot.cpus}
        slot.actor = (
            self.ray.remote(Station)
            .options(
                scheduling_strategy=self._on(slot.node), max_restarts=0, runtime_env=_ENVIRONMENT, **resources
            )
            .remote(
                self._spec, self._profile, gpu=slot.gpu, seed=self._seed, kit=self._kit, expected=_templates(),
            )
        )  # fmt: skip
        slot.asked = slot.actor.describe.remote()

    def _on(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node_id=node, soft=False)

    def _told(self, slot: _Slot) -> Member | None:
        try:
            found: Found = self.ray.get(slot.asked)
        except self.ray.exceptions.RayError as error:
            self._forget(slot)
            log.info("a station on %s ended before it was ready: %s", slot.address, error)
            if slot.starts >= MAX_STARTS:
                slot.over = True
                first = str(error).strip().splitlines()[-1]
                self.left_out.append(f"{slot.address}: no station starts there ({first})")
            return None
        slot.asked = None
        if found.unfit or found.device is None:
            self.left_out.append(f"{found.host}: {found.unfit}")
        elif not matches(found.device, self._devices):
            self.other.add(f"{found.device.name} ({found.device.target})")
        else:
            return Member(slot.actor, found, slot.node)
        self._end(slot)
        return None

    def lost(self, member: Member) -> None:
        """A station does not answer: another is begun in its place."""
        with self._lock:
            for slot in self._of(member):
                self._end(slot)
                slot.over = False

    def retire(self, member: Member, why: str = "") -> None:
        """A station has nothing more to do, or is not to be used any more."""
        with self._lock:
            for slot in self._of(member):
                self._end(slot)
            if why:
                self.left_out.append(f"{member.found.host}: {why}")

    def _of(self, member: Member) -> list[_Slot]:
        return [slot for slot in self._slots.values() if slot.actor is member.actor]

    def _end(self, slot: _Slot) -> None:
        if slot.actor is not None:
            with suppress(Exception):  # it may be dead, with its node
                self.ray.kill(slot.actor)
        self._forget(slot)
        slot.over = True

    def _forget(self, slot: _Slot) -> None:
        slot.actor = slot.asked = None

    # --- compilers --------------------------------------------------------------------------------------------------

    def builders(self, device: Device, toolchain: str) -> list[Any]:
        """Actors that compile for a device, one on each CPU that nobody uses, as far as what they compile is what the
        device's own node would: the same compiler, and for a CPU the same instruction set."""
        spare = int(self.ray.available_resources().get("CPU", 0))
        if not toolchain or spare < 1:
            return []
        begun = [
            self.ray.remote(Builder).options(num_cpus=1, max_restarts=0).remote(self._spec, device, self._profile)
            for _ in range(min(spare, MAX_BUILDERS))
        ]
        asked = {actor.toolchain.remote(): actor for actor in begun}
        ready, late = self.ray.wait(list(asked), num_returns=len(asked), timeout=BUILDER_START_S)
        useful = []
        for reference in ready:
            with suppress(self.ray.exceptions.RayError):
                if self.ray.get(reference) == toolchain:
                    useful.append(asked[reference])
        for actor in begun:
            if actor not in useful:
                self.ray.kill(actor)
        return useful


def _templates() -> Mapping[str, str]:
    """The hash of the templates here, by family."""
    return {"cpp": targets.code_hash(Target("cpu")), "triton": targets.code_hash(Target("cuda", "sm_90"))}

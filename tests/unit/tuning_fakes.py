"""A bench without kernels and a clock without time: tuning as arithmetic over a table of times."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

from pagegen_autotune.measure import Verdict

from pagegen.spec import AttentionSpec, CppVariant, Device, Profile, Status, Target, Workload

SPEC = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
DEFAULT = CppVariant()
FASTER = CppVariant(streams=8)
DEVICE = Device(name="fake CPU", target=Target("cpu"), units=2, bandwidth_gb_s=30.0)
DECODE = Workload(context_lens=(500, 40))
LONG = Workload(context_lens=(4000,) * 8)
MIXED = Workload(context_lens=(100, 64), query_lens=(1, 64))
PROFILE = Profile(name="fake traffic", workloads=(DECODE, LONG, MIXED), weights=(0.5, 0.3, 0.2))


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class FakeStore:
    """A database in memory, as far as tuning uses one."""

    def __init__(self):
        self.recorded: list = []
        self.rules: dict = {}
        self.facts: list = []
        self.predictions: list = []

    @contextlib.contextmanager
    def atomic(self):
        yield

    def record(self, measurement):
        self.recorded.append(measurement)
        return True

    def trials(self, *, spec=None, layout=None, target=None, code_hash=None):
        return [
            t for t in self.recorded if (t.spec, t.layout, t.target, t.code_hash) == (spec, layout, target, code_hash)
        ]

    def save_portfolio(self, *, spec, layout, device, profile, rule, code_hash):
        self.rules[spec, layout, device.target, code_hash] = rule

    def portfolio(self, spec, layout, target, code_hash, device=None):
        return self.rules.get((spec, layout, target, code_hash))

    def save_profile(self, profile):
        return True

    def record_facts(self, facts):
        self.facts.append(facts)
        return True

    def record_prediction(self, prediction):
        self.predictions.append(prediction)
        return True


class FakeBench:
    """Times from `table(layout, variant, workload)` microseconds, with relative noise; checking and sampling cost
    fake seconds. `bad` gives verdicts other than OK, `broken` exceptions raised when sampling; the `stop_at`-th
    sample raises KeyboardInterrupt. `checked` and `sampled` record every call."""

    regime = "cold"
    workers = 2
    memory_gb_s = None

    def __init__(
        self,
        table: Callable[..., float],
        *,
        noise: float = 0.0,
        drift: float = 0.0,
        bad: dict | None = None,
        broken: dict | None = None,
        clock: FakeClock | None = None,
        check_s: float = 1.0,
        stop_at: int | None = None,
        seed: int = 1,
    ):
        self.environment = {"threads": "2", "compiler": "c++ 1.0"}
        self.checked: list = []
        self.sampled: list = []
        self._table, self._noise, self._drift, self._stop_at = table, noise, drift, stop_at
        self._bad, self._broken = bad or {}, broken or {}
        self._clock, self._check_s = clock or FakeClock(), check_s
        self._rng = random.Random(seed)

    def check(self, layout, variants):
        assert len(variants) <= self.workers
        self.checked += [(layout, v) for v in variants]
        self._clock.now += self._check_s
        return {v: self._bad.get(v, Verdict(status=Status.OK, max_error=0.001)) for v in variants}

    def facts(self, layout, variant, *, decode):
        return None

    def gauge(self):
        return self.memory_gb_s

    def sample(self, layout, variant, workload):
        assert (layout, variant) in self.checked, "timed before it was checked"
        if self._stop_at is not None and len(self.sampled) >= self._stop_at:
            raise KeyboardInterrupt
        self.sampled.append((layout, variant, workload))
        if variant in self._broken:
            raise self._broken[variant]
        us = self._table(layout, variant, workload)
        us *= (1 + self._noise * self._rng.uniform(-1, 1)) * (1 + self._drift * len(self.sampled))
        self._clock.now += us / 1e6
        return us


def table(**by_streams: float) -> Callable[..., float]:
    """1000 us for everything, times a factor by the variant's streams: table(s8=0.8)."""
    return lambda layout, variant, workload: 1000.0 * by_streams.get(f"s{variant.streams}", 1.0)

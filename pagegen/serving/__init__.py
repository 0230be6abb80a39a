"""Which requests share a step, for a real model, a simulation and a benchmark alike; no torch, no clock of its own."""

from pagegen.serving.caches import ServableCache
from pagegen.serving.counting import CountingCache
from pagegen.serving.figures import Counters, Latencies, Percentiles, RequestTimes, ServerFigures
from pagegen.serving.replay import Clock, WallClock, replay
from pagegen.serving.request import NeverFits, Outcome, Request
from pagegen.serving.residents import Preempt
from pagegen.serving.scheduler import Scheduler
from pagegen.serving.step import Step

__all__ = [
    "Clock",
    "Counters",
    "CountingCache",
    "Latencies",
    "NeverFits",
    "Outcome",
    "Percentiles",
    "Preempt",
    "Request",
    "RequestTimes",
    "Scheduler",
    "ServableCache",
    "ServerFigures",
    "Step",
    "WallClock",
    "replay",
]

"""The tuner on a Ray cluster: who is there, what each is sent, and a run for each kind of device."""

from pagegen_autotune.fleet.tuner import FleetReport, tune_fleet

__all__ = ["FleetReport", "tune_fleet"]

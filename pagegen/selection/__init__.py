"""From the database to a decision, with its reason."""

from pagegen.selection.asking import best_block_size, select, workload_distance
from pagegen.selection.ladder import device_for, rule_for

__all__ = ["best_block_size", "device_for", "rule_for", "select", "workload_distance"]

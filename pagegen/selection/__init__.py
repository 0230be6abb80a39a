"""From the database to a decision, with its reason."""

from pagegen.selection.asking import best_block_size, select
from pagegen.selection.candidates import device_for
from pagegen.selection.explained import Explanation, explain_selection
from pagegen.selection.grades import RADIUS, workload_distance
from pagegen.selection.ladder import rule_for
from pagegen.selection.ranks import RanksDisagree, check_job, check_ranks, choice_digest
from pagegen.spec.choice import ChoiceDigest

__all__ = [
    "RADIUS",
    "ChoiceDigest",
    "Explanation",
    "RanksDisagree",
    "best_block_size",
    "check_job",
    "check_ranks",
    "choice_digest",
    "device_for",
    "explain_selection",
    "rule_for",
    "select",
    "workload_distance",
]

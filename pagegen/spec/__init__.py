"""The nouns: frozen, validated, hashable values that every other module speaks in."""

from pagegen.spec.attention import AttentionSpec
from pagegen.spec.dtypes import DTYPES, bytes_per_element, dtype_name, parse_dtype
from pagegen.spec.layout import CacheLayout
from pagegen.spec.result import CompileFacts, Measurement, Prediction, Selection, Status
from pagegen.spec.rule import Clause, DispatchRule
from pagegen.spec.target import Device, Target
from pagegen.spec.variant import CppVariant, TritonVariant, Variant
from pagegen.spec.workload import Profile, Workload

__all__ = [
    "DTYPES",
    "AttentionSpec",
    "CacheLayout",
    "Clause",
    "CompileFacts",
    "CppVariant",
    "Device",
    "DispatchRule",
    "Measurement",
    "Prediction",
    "Profile",
    "Selection",
    "Status",
    "Target",
    "TritonVariant",
    "Variant",
    "Workload",
    "bytes_per_element",
    "dtype_name",
    "parse_dtype",
]

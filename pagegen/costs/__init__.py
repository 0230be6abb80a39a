"""What a variant costs and where it may run: symbols for legality, bytes, flops and time."""

from pagegen.costs.candidates import candidates
from pagegen.costs.devices import product, shipped_device
from pagegen.costs.fitted import MAX_FACTOR, Fit
from pagegen.costs.model import flops, kv_bytes, parts, predict_us, reduce_us, roofline_us
from pagegen.costs.parts import Parts
from pagegen.costs.rules import legal
from pagegen.costs.steps import (
    dense_us,
    gather_us,
    merge_us,
    prefix_workloads,
    reference_us,
    rotate_us,
    rotate_write_us,
    with_reuse,
    write_us,
)

__all__ = [
    "MAX_FACTOR",
    "Fit",
    "Parts",
    "candidates",
    "dense_us",
    "flops",
    "gather_us",
    "kv_bytes",
    "legal",
    "merge_us",
    "parts",
    "predict_us",
    "prefix_workloads",
    "product",
    "reduce_us",
    "reference_us",
    "roofline_us",
    "rotate_us",
    "rotate_write_us",
    "shipped_device",
    "with_reuse",
    "write_us",
]

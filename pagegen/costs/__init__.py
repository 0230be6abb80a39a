"""What a variant costs and where it may run: symbols for legality, bytes, flops and time."""

from pagegen.costs.candidates import candidates
from pagegen.costs.devices import shipped_device
from pagegen.costs.model import flops, kv_bytes, predict_us, reduce_us, roofline_us
from pagegen.costs.rules import legal

__all__ = ["candidates", "flops", "kv_bytes", "legal", "predict_us", "reduce_us", "roofline_us", "shipped_device"]

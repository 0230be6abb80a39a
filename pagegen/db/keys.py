"""What things are called in the database: canonical JSON, its digests, and the identities under which things meet.

Canonical JSON has sorted keys, a version, no spaces and no NaN: the same value gives the same bytes in every
process and on every machine. Changing what a field means raises `VERSION`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from pagegen.spec import AttentionSpec, Device
from pagegen.spec.result import GAUGE, PURPOSE, SESSION

VERSION = 1
# The question that a trial answers: version 1 left the environment out, version 2 took memory in whole GiB.
KEY_VERSION = 3
# Rates are measured or nominal and change from run to run on one machine; they do not make it another device.
RATES = ("bandwidth_gb_s", "matrix_tflops")
_CLOCKS = ("core_clock_mhz", "memory_clock_mhz", "power_limit_w")
DEVICE_FLOATS = (*RATES, *_CLOCKS, "memory_gib", "last_level_cache_mib", "shared_memory_kib")
# What marks a tuner's trial; all else in an environment may change its time.
_TAGS = (SESSION, PURPOSE, GAUGE)
# What makers add to one product's name in one place and not in another.
_DECORATION = re.compile(r"\((?:r|tm|c)\)|\b(?:nvidia|amd|intel|corporation|inc)\b[.,]?|[\s_-]+")


def canonical(fields: Mapping[str, Any], version: int = VERSION) -> str:
    """The canonical JSON of named fields, with the version. Raises ValueError for NaN and infinities."""
    return json.dumps({"v": version, **fields}, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """sha256 of canonical JSON, as hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def fields_of(text: str) -> dict[str, Any]:
    """The named fields of canonical JSON. Raises ValueError for anything else or another version."""
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("v") != VERSION:
        raise ValueError(f"stored data must have version {VERSION}, got {text[:60]!r}")
    return {key: value for key, value in data.items() if key != "v"}


@functools.lru_cache(maxsize=1024)
def spec_digest(spec: AttentionSpec) -> str:
    """The key of a spec."""
    return digest(canonical({"spec": spec.to_dict()}))


def device_fields(device: Device) -> dict[str, Any]:
    """The device's fields with 80 and 80.0 written alike."""
    return {k: float(v) if k in DEVICE_FLOATS else v for k, v in device.to_dict().items()}


@functools.lru_cache(maxsize=1024)
def device_identity(device: Device) -> str:
    """The key under which two descriptions of one device meet: all but its rates, its name without the maker's
    decoration, memory by its class, clocks in MHz, power in W."""
    plain = device_fields(device)
    fields = {k: round(v) if k in _CLOCKS else v for k, v in plain.items() if k not in RATES}
    fields |= {"name": _DECORATION.sub("", plain["name"].lower())}
    del fields["memory_gib"]
    return digest(canonical({"device": {**fields, "memory_class": memory_class(device.memory_gib)}}))


def memory_class(gib: float) -> int:
    """Memory as far as it tells devices apart: half octaves, 0 where it is not known. Drivers and kernels reserve a
    varying sliver: one product was seen with 22.0 to 22.5 GiB, another with 44.4 to 44.5, so that whole numbers split
    them. Products of one name differ by half or more (8 and 12, 8 and 16), and no size that is sold lies within 1.4 %
    of a border, which are 9.5, 13.5, 19.0, 26.9, 38.1, 53.8, 76.1, 108, 152, 215, 304 GiB and so on."""
    return round(2 * math.log2(gib)) if gib > 0 else 0


def environment_identity(environment: Mapping[str, str]) -> str:
    """The key under which trials share a toolchain and system: all of an environment but a tuner's tags."""
    return _environment_identity(tuple((k, v) for k, v in sorted(environment.items()) if k not in _TAGS))


@functools.lru_cache(maxsize=1024)
def _environment_identity(items: tuple[tuple[str, str], ...]) -> str:
    return digest(canonical({"environment": dict(items)}))


def key_of(*, kernel: str, device: str, environment: str, variant: str, workload: str, regime: str) -> str:
    """The key of the question that a trial answers: a device and an environment by their identities, the rest by their
    digests. `codec.trial_key` is that of a measurement."""
    fields = {"kernel": kernel, "device": device, "environment": environment, "variant": variant}
    return digest(canonical({**fields, "workload": workload, "regime": regime}, KEY_VERSION))

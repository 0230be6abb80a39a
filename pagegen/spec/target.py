"""`Target` (what code is generated for) and `Device` (the machine it runs on, as features)."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from pagegen.spec import check

KINDS = ("cuda", "hip", "cpu", "interpreter")
_COUNTS = ("units", "registers_per_unit", "max_threads_per_unit")
_NUMBERS = (
    "memory_gib", "bandwidth_gb_s", "matrix_tflops", "last_level_cache_mib", "shared_memory_kib", "core_clock_mhz",
    "memory_clock_mhz", "power_limit_w",
)  # fmt: skip
_LATER = ("core_clock_mhz", "memory_clock_mhz", "power_limit_w", "partition")


@dataclass(frozen=True)
class Target:
    """`kind` is "cuda", "hip", "cpu" or "interpreter"; `arch` is "sm_90", "gfx942" or "" for the last two."""

    kind: str
    arch: str = ""

    def __post_init__(self) -> None:
        pattern = {"cuda": r"sm_[0-9]{1,8}", "hip": r"gfx[0-9a-f]{1,12}", "cpu": "", "interpreter": ""}
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(f"target kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not isinstance(self.arch, str) or not re.fullmatch(pattern[self.kind], self.arch):
            raise ValueError(
                f"target arch must look like sm_90 or gfx942, or be empty for {self.kind}, got {self.arch!r}"
            )

    def __str__(self) -> str:
        return self.arch or self.kind

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, here or not."""
        return self.kind in ("cuda", "hip")

    @property
    def family(self) -> str:
        """The kernel family that serves this target: "triton" or "cpp"."""
        return "cpp" if self.kind == "cpu" else "triton"

    @property
    def capability(self) -> int:
        """The number in a CUDA arch: 90 for sm_90. Raises ValueError for other kinds."""
        if self.kind != "cuda":
            raise ValueError(f"only a cuda target has a compute capability, got {self}")
        return int(self.arch.removeprefix("sm_"))

    @property
    def warp_size(self) -> int:
        """Threads a warp: 64 on AMD's data-centre parts (gfx9), else 32."""
        return 64 if self.arch.startswith("gfx9") else 32

    @property
    def native_float8(self) -> bool:
        """Whether the hardware reads OCP float8 (e4m3fn, e5m2): NVIDIA from sm_89 and AMD's gfx950. sm_80 has no e4m3,
        gfx942 has other float8 types."""
        if self.kind == "cuda":
            return self.capability >= 89
        return self.arch == "gfx950"

    @staticmethod
    def parse(text: str | Target) -> Target:
        """The target for "sm_90", "gfx942", "cpu" or "interpreter". Raises ValueError for anything else."""
        if isinstance(text, Target):
            return text
        name = str(text).strip().lower()
        if re.fullmatch(r"sm_?[0-9]{1,8}a?", name):
            return Target("cuda", "sm_" + re.sub(r"\D", "", name))
        if re.fullmatch(r"gfx[0-9a-f]{1,12}", name):
            return Target("hip", name)
        if name in ("cpu", "interpreter"):
            return Target(name)
        raise ValueError(f"target must be like sm_90, gfx942, cpu or interpreter, got {text!r}")

    @staticmethod
    def current() -> Target:
        """The GPU that torch sees, or the CPU; `PAGEGEN_TARGET` overrides."""
        from pagegen import settings

        named = settings.target_name()
        if named:
            return Target.parse(named)
        import torch

        if not torch.cuda.is_available():
            return Target("cpu")
        if torch.version.hip:
            arch = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
            return Target("hip", arch.split(":")[0])
        major, minor = torch.cuda.get_device_capability()
        return Target("cuda", f"sm_{major}{minor}")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device as the tuner sees it: features first, the name only for people.

    `units` counts multiprocessors, compute units or cores. Zero means unknown. `features` names what the
    instruction set offers ("avx512_bf16"), sorted. Clocks are the highest that the driver allows, `power_limit_w` is
    the one in force. `partition` names the slice of a device that is cut up ("MIG 1g.10gb", "CPX"), "" for a whole one.
    """

    name: str
    target: Target
    units: int = 0
    memory_gib: float = 0.0
    bandwidth_gb_s: float = 0.0
    matrix_tflops: float = 0.0
    last_level_cache_mib: float = 0.0
    shared_memory_kib: float = 0.0
    registers_per_unit: int = 0
    max_threads_per_unit: int = 0
    features: tuple[str, ...] = ()
    core_clock_mhz: float = 0.0
    memory_clock_mhz: float = 0.0
    power_limit_w: float = 0.0
    partition: str = ""

    def __post_init__(self) -> None:
        check.text("device name", self.name, printable=False)
        check.instance("device target", self.target, Target)
        for name in _COUNTS:
            check.count(name, getattr(self, name), at_least=0)
        for name in _NUMBERS:
            object.__setattr__(self, name, check.number(name, getattr(self, name), at_least=0))
        features = check.instances("features", self.features, str)
        object.__setattr__(self, "features", features)
        check.text("partition", self.partition, printable=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready fields; the target as text. Fields that came later are there where they are known only, so
        that what was stored without them stays the same."""
        plain = {**asdict(self), "target": str(self.target), "features": list(self.features)}
        return {name: value for name, value in plain.items() if value or name not in _LATER}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Device:
        """The inverse of `to_dict`. An unknown or missing field raises ValueError."""
        check.fields("a device", data, (f.name for f in fields(cls)), ("name", "target"))
        return cls(**{**data, "target": Target.parse(data["target"])})

"""Targets and devices: which names there are, which one is this machine's, and the shipped device table."""

from __future__ import annotations

import json

import pytest
import torch

from pagegen.spec import Device, Target


@pytest.mark.parametrize(
    ("text", "kind", "arch"),
    [
        ("sm_90", "cuda", "sm_90"),
        ("sm90", "cuda", "sm_90"),
        ("sm_90a", "cuda", "sm_90"),
        ("SM_120", "cuda", "sm_120"),
        (" gfx942 ", "hip", "gfx942"),
        ("gfx90a", "hip", "gfx90a"),
        ("cpu", "cpu", ""),
        ("interpreter", "interpreter", ""),
    ],
)
def test_a_target_is_read_the_way_people_write_it(text, kind, arch):
    target = Target.parse(text)
    assert (target.kind, target.arch) == (kind, arch)
    assert Target.parse(str(target)) == target
    assert Target.parse(target) is target


@pytest.mark.parametrize("text", ["", "cuda", "sm_", "sm_90x", "gfx", "gfxzz", "hip:gfx942", "tpu", None, 90])
def test_a_target_that_nobody_has_is_refused(text):
    with pytest.raises(ValueError, match="target must be like sm_90, gfx942, cpu or interpreter, got"):
        Target.parse(text)


@pytest.mark.parametrize(("kind", "arch"), [("cuda", "gfx942"), ("hip", "sm_90"), ("cpu", "sm_90"), ("cuda", "")])
def test_kind_and_arch_must_belong_together(kind, arch):
    with pytest.raises(ValueError, match=f"or be empty for {kind}, got '{arch}'"):
        Target(kind, arch)


def test_a_kind_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match="target kind must be one of cuda, hip, cpu, interpreter, got 'tpu'"):
        Target("tpu")


def test_a_target_knows_its_kernel_family_and_warp():
    rows = {t: (Target.parse(t).family, Target.parse(t).warp_size, Target.parse(t).is_gpu) for t in
            ("cpu", "interpreter", "sm_90", "gfx942", "gfx1100")}  # fmt: skip
    assert rows == {
        "cpu": ("cpp", 32, False),
        "interpreter": ("triton", 32, False),
        "sm_90": ("triton", 32, True),
        "gfx942": ("triton", 64, True),
        "gfx1100": ("triton", 32, True),
    }
    assert Target.parse("sm_120").capability == 120
    with pytest.raises(ValueError, match="only a cuda target has a compute capability, got gfx942"):
        _ = Target.parse("gfx942").capability


def test_the_environment_overrides_the_machine(monkeypatch):
    monkeypatch.setenv("PAGEGEN_TARGET", "gfx950")
    assert Target.current() == Target("hip", "gfx950")


def test_a_wrong_name_in_the_environment_is_not_taken_for_the_machine(monkeypatch):
    monkeypatch.setenv("PAGEGEN_TARGET", "h100")
    with pytest.raises(ValueError, match="got 'h100'"):
        Target.current()


def test_a_machine_without_a_gpu_is_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Target.current() == Target("cpu")


def test_an_nvidia_gpu_is_named_by_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert Target.current() == Target("cuda", "sm_120")


def test_an_amd_gpu_is_named_without_its_feature_flags(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = type("Properties", (), {"gcnArchName": "gfx942:sramecc+:xnack-"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert Target.current() == Target("hip", "gfx942")


def test_a_device_survives_json():
    device = Device(name="X", target=Target("cuda", "sm_90"), units=132, bandwidth_gb_s=3350.0, features=("a", "b"))
    assert Device.from_dict(json.loads(json.dumps(device.to_dict()))) == device

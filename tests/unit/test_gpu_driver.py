"""What a GPU's driver tells, from fake ones: there is none in most machines that run the tests."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pagegen.targets import gpu_driver

NVML = """
#include <string.h>
int nvmlInit_v2(void) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  *device = (void *)0x123456789abcULL;
  return strcmp(uuid, "GPU-1234") ? 6 : 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) {
  *milliwatts = 700000;
  return device == (void *)0x123456789abcULL ? 0 : 2;
}
"""


@pytest.fixture(scope="module", params=[0, 9], ids=["ready", "without a driver"])
def nvml(request, tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    library = folder / "libnvml.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-DINIT={request.param}", "-o", library, folder / "nvml.c"], check=True
    )
    return str(library), request.param


def test_the_power_limit_in_force_is_read_by_the_gpus_own_number(nvml):
    library, fails = nvml
    assert gpu_driver.power_limit_w("1234", library) == (0.0 if fails else 700.0)
    assert gpu_driver.power_limit_w("other", library) == 0.0


def test_without_the_drivers_library_the_limit_is_unknown(tmp_path):
    assert gpu_driver.power_limit_w("1234", str(tmp_path / "none.so")) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC version: 12.2.0\n",
            "570.86.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.51  Release Build\n", "575.51"),
        ("something else\n", ""),
    ],
)
def test_the_release_is_the_one_that_the_kernel_module_tells(text, expected, tmp_path, monkeypatch):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(gpu_driver, "_NVIDIA_RELEASE", tmp_path / "version")
    gpu_driver.release.cache_clear()
    assert gpu_driver.release() == expected
    gpu_driver.release.cache_clear()


def test_the_release_of_an_amd_driver_and_of_none(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_driver, "_NVIDIA_RELEASE", tmp_path / "none")
    monkeypatch.setattr(gpu_driver, "_AMD_RELEASE", tmp_path / "amd")
    gpu_driver.release.cache_clear()
    assert gpu_driver.release() == ""
    (tmp_path / "amd").write_text("6.12.12\n")
    gpu_driver.release.cache_clear()
    assert gpu_driver.release() == "6.12.12"
    gpu_driver.release.cache_clear()


def test_slices_of_a_device_are_named_and_a_whole_one_is_not(tmp_path, monkeypatch):
    assert gpu_driver.partition("NVIDIA H100 80GB HBM3 MIG 1g.10gb") == "MIG 1g.10gb"
    assert gpu_driver.partition("NVIDIA H100 80GB HBM3") == ""
    monkeypatch.setattr(gpu_driver, "_PCI_DEVICES", tmp_path)
    mode = tmp_path / "0000:c1:00.0" / "current_compute_partition"
    mode.parent.mkdir()
    for told, expected in (("SPX\n", ""), ("CPX\n", "CPX")):
        mode.write_text(told)
        assert gpu_driver.partition("AMD Instinct MI300X", "0000:c1:00.0") == expected

"""A look at a machine: its GPUs through the driver's own interface, its memory through what a container leaves."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from builder.machine import cuda_driver, facts, host_memory, this_machine
from builder.machine.cuda_driver import CudaUnavailableError, query_driver
from builder.machine.nvml import query_nvml
from builder.targets.facts import library_version
from builder.targets.tensorrt.module import load_module
from plansmith_errors import BuildError

GIB = 1 << 30


@pytest.fixture(scope="module")
def fake_cuda(tmp_path_factory):
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


class Nvml:
    """nvidia-ml-py as far as it is used; ``hidden`` GPUs are unknown to it."""

    class NVMLError(Exception):
        pass

    def __init__(self, hidden=(), fails=False):
        self.hidden, self.fails, self.is_open = hidden, fails, False

    def nvmlInit(self):  # noqa: N802
        if self.fails:
            raise self.NVMLError
        self.is_open = True

    def nvmlShutdown(self):  # noqa: N802
        self.is_open = False

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "590.44.01"

    def nvmlDeviceGetHandleByPciBusId(self, bus):  # noqa: N802
        if bus.decode() in self.hidden:
            raise self.NVMLError
        return bus

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(free=5 * GIB)


def test_the_drivers_gpus(fake_cuda):
    driver = query_driver(fake_cuda)
    assert driver.cuda_version == (13, 1)
    assert [(device.name, device.sm, device.memory_bytes) for device in driver.devices] == [
        ("NVIDIA Fake 10", 89, 24 * GIB),
        ("NVIDIA Fake 11", 120, 25 * GIB),
    ]


def test_a_machine_with_gpus(fake_cuda, monkeypatch):
    monkeypatch.setattr(cuda_driver, "_LIBRARY", fake_cuda)
    nvml = Nvml(hidden=("0000:11:00.0",))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    machine = this_machine()
    assert machine.describe_gpus() == "1 x NVIDIA Fake 10 (sm89), 1 x NVIDIA Fake 11 (sm120)"
    assert [gpu.free_bytes for gpu in machine.gpus] == [5 * GIB, None]
    assert machine.sms == (89, 120) and machine.driver_version == "590.44.01"
    assert not nvml.is_open
    assert facts.Machine.model_validate_json(machine.model_dump_json()) == machine


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FAKE_CUDA_INIT", "803", "does not start: system has unsupported display driver"),
        ("FAKE_CUDA_INIT", "999", "does not start: error 999"),
        ("FAKE_CUDA_ATTRIBUTE", "1", "cuDeviceGetAttribute of the CUDA driver failed: error 999"),
    ],
)
def test_a_driver_that_fails_says_why(fake_cuda, monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(CudaUnavailableError, match=message):
        query_driver(fake_cuda)
    monkeypatch.setattr(cuda_driver, "_LIBRARY", fake_cuda)
    assert message in this_machine("tensorrt").describe_gpus()


def test_a_driver_without_gpus_is_no_error(fake_cuda, monkeypatch):
    monkeypatch.setenv("FAKE_CUDA_INIT", "100")
    assert query_driver(fake_cuda).devices == ()
    monkeypatch.setattr(cuda_driver, "_LIBRARY", fake_cuda)
    assert this_machine("tensorrt").describe_gpus() == "no NVIDIA GPU (the CUDA driver shows none)"


def test_no_driver_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_driver, "_LIBRARY", str(tmp_path / "libcuda.so.1"))
    machine = this_machine("tensorrt-rtx")
    assert "the CUDA driver, is not installed" in machine.describe_gpus()
    assert "openvino" not in machine.libraries and "tensorrt" not in machine.libraries
    assert this_machine("cpu").why_no_gpu is None  # the cpu target asks no driver


@pytest.mark.parametrize("nvml", [None, Nvml(fails=True)])
def test_nvml_is_optional(monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert query_nvml(["0000:10:00.0"]).driver_version is None


def test_the_kernel_modules_version(tmp_path):
    file = tmp_path / "version"
    assert facts.kernel_module_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)\n")
    assert facts.kernel_module_version(file) == "580.65.06"


def test_memory_is_what_the_container_leaves(tmp_path):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\nHugePages_Total: 0\n")
    assert host_memory(meminfo, cgroup).available_bytes == 8 * GIB
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text(f"{3 * GIB}\n")
    assert host_memory(meminfo, cgroup).total_bytes == 16 * GIB
    (cgroup / "memory.max").write_text(f"{4 * GIB}\n")
    assert host_memory(meminfo, cgroup).available_bytes == GIB
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")  # cached files are given up
    memory = host_memory(meminfo, cgroup)
    assert (memory.total_bytes, memory.available_bytes) == (4 * GIB, 3 * GIB)
    assert host_memory(tmp_path / "absent", cgroup) is None


def test_old_containers_have_another_place(tmp_path):
    meminfo, group = tmp_path / "meminfo", tmp_path / "memory"
    meminfo.write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    memory = host_memory(meminfo, tmp_path)
    assert (memory.total_bytes, memory.available_bytes) == (2 * GIB, 0)


@pytest.mark.parametrize(
    ("groups", "limit", "usage"),
    [
        ("0::/jobs/run1/step\n", "memory.max", "memory.current"),
        ("7:cpu:/x\n4:memory:/jobs/run1/step\n0::/\n", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_batch_system_limits_a_group_further_down(tmp_path, groups, limit, usage):
    meminfo, own, root = tmp_path / "meminfo", tmp_path / "own", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    own.write_text(groups)
    job = (root / "memory" if "memory" in groups else root) / "jobs" / "run1"
    (job / "step").mkdir(parents=True)
    (job / limit).write_text(f"{6 * GIB}\n")  # above its own group, which has no limit
    (job / usage).write_text(f"{GIB}\n")
    memory = host_memory(meminfo, root, own)
    assert (memory.total_bytes, memory.available_bytes) == (6 * GIB, 5 * GIB)


def test_a_folder_that_is_named_as_a_library_is_none(tmp_path, monkeypatch):
    (tmp_path / "tensorrt").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert library_version("tensorrt") is None
    with pytest.raises(BuildError, match=r"target tensorrt needs tensorrt 11.0 or newer, found 0.0"):
        load_module("tensorrt")
    sys.modules.pop("tensorrt", None)

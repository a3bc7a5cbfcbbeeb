"""The catalogue of GPUs: complete, dense, and found by the names that people give."""

import pytest

from builder.planner.gpu import catalogue, find_gpu
from plansmith_errors import ConfigError

EXPECTED = "t4 l4 a10g a100-40g a100-80g l40s rtx-4090 rtx-5090 rtx-pro-6000 h100-80g h100-80g-pcie h100-nvl h200 b200"


def test_the_gpus_that_people_ask_for_are_there():
    names = {gpu.name for gpu in catalogue()}
    assert names.issuperset([*EXPECTED.split(), "gb200", "b300"])
    labels = [label for gpu in catalogue() for label in (gpu.name, *gpu.aliases)]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize("gpu", catalogue(), ids=lambda gpu: gpu.name)
def test_a_row_is_plausible(gpu):
    """Dense, not sparse: with sparsity every figure would be above these ceilings by generation, which are per SM."""
    dense_fp16 = {75: 65, 80: 312, 86: 126, 89: 363, 90: 990, 100: 2500, 103: 2500, 120: 504}
    assert gpu.tflops["fp16"] <= dense_fp16[gpu.sm]
    assert gpu.source.startswith("https://")
    has = set(gpu.tflops)
    assert ("fp8" in has) == (gpu.sm >= 89) and ("fp4" in has) == (gpu.sm >= 100) and ("bf16" in has) == (gpu.sm >= 80)
    for fast, slow in (("fp8", "fp16"), ("fp4", "fp8")):  # each halving of bits doubles the rate, or more
        if fast in has:
            assert gpu.tflops[fast] >= 1.99 * gpu.tflops[slow]
    assert (gpu.nvlink is not None) == (gpu.nvlink_gpus > 1)
    stated = int("".join(filter(str.isdigit, gpu.title.split("GB")[0].split()[-1])) or 0) if "GB " in gpu.title else 0
    if stated:  # what the driver reports is the named size in GiB, less what firmware and ECC take
        assert 0.93 * stated * 2**30 < gpu.memory_bytes <= stated * 2**30


def test_names_are_read_as_people_write_them():
    for name in ("h100-80g", "H100-80GB", "h100", "nvidia-h100-80g", "h100_sxm"):
        assert find_gpu(name).name == "h100-80g"
    assert find_gpu("4090").name == "rtx-4090" and find_gpu("rtx 5090").name == "rtx-5090"
    assert find_gpu("gb200").name == "gb200"


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'h100-81g' is unknown; nearest: h100-80g"):
        find_gpu("h100-81g")
    with pytest.raises(ConfigError, match=r"'mi300x' is unknown; .*"):
        find_gpu("mi300x")


def test_links_are_nvlink_within_a_domain_and_pcie_beyond():
    h100, l4 = find_gpu("h100"), find_gpu("l4")
    assert h100.link_bytes_per_second(8) == 450e9 and h100.link_bytes_per_second(16) == 64e9
    assert l4.link_bytes_per_second(2) == 32e9
    assert (h100.link_name(2), l4.link_name(2)) == ("NVLink", "PCIe")

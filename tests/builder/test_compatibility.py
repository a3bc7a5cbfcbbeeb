"""Which engines a machine loads, and the one line that every other is answered with, before memory is touched."""

import json
import re

import pytest
from gpu_engines import GIB, machine_with, rank_record, write_gpu_engine
from hypothesis import given
from hypothesis import strategies as st

import builder
from builder.compatibility import (
    check_gpu_files,
    check_machine,
    check_target_runs,
    engine_problems,
    incompatibilities,
    suitable_gpus,
)
from builder.targets.facts import SM_NAMES, TARGETS
from plansmith_errors import EngineError


def refusal(path, machine):
    with pytest.raises(EngineError) as error:
        check_machine(path, builder.read_manifest(path), machine)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{path}: ")


def edit(path, change):
    file = path / "engine.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_the_machine_it_was_built_for_loads_it(gpu_engine):
    check_gpu_files(gpu_engine, builder.read_manifest(gpu_engine))
    check_machine(gpu_engine, builder.read_manifest(gpu_engine), machine_with(89))
    assert list(engine_problems(gpu_engine, machine_with(90, 89))) == []


def test_a_machine_without_a_gpu_is_told_what_is_missing_and_what_to_do(gpu_engine):
    line = refusal(gpu_engine, machine_with())
    assert line.startswith("needs a GPU of sm89; this machine has no NVIDIA GPU (libcuda.so.1, the CUDA driver, is not")
    assert line.endswith("serve it where there is one, or build for this machine with --set build.target=cpu")


@pytest.mark.parametrize(
    ("target", "sms", "found", "way_out"),
    [
        ("tensorrt-rtx", (89,), 120, "build with --set 'build.sms=[120]'"),
        (
            "tensorrt-rtx",
            (89, 120),
            90,
            "build with --set build.target=tensorrt --set 'build.sms=[90]' on this machine",
        ),
        ("tensorrt", (90,), 100, "build with --set 'build.sms=[100]' on this machine"),
        ("tensorrt", (90,), 89, "build with --set 'build.sms=[89]' on this machine"),
        ("tensorrt-rtx", (89,), 70, "no target compiles for it; supported: sm75, sm80"),
    ],
)
def test_another_gpu_is_answered_with_the_nearest_supported_build(tmp_path, target, sms, found, way_out):
    path = write_gpu_engine(tmp_path / "engine", target=target, sms=sms)
    line = refusal(path, machine_with(found))
    built_for = " or ".join(f"sm{sm}" for sm in sms)
    assert line.startswith(f"built for {built_for}; this machine has 1 x GPU-{found} (sm{found}): {way_out}")


@given(
    target=st.sampled_from([name for name, facts in TARGETS.items() if facts.is_gpu]),
    found=st.lists(st.sampled_from(sorted(SM_NAMES)), min_size=1, max_size=3),
)
def test_the_way_out_is_a_build_that_the_machine_loads(tmp_path_factory, target, found):
    path = write_gpu_engine(tmp_path_factory.mktemp("engine") / "engine", target=target, sms=(75,))
    machine = machine_with(*found)
    manifest = builder.read_manifest(path)
    lines = list(incompatibilities(manifest, machine))
    assert bool(lines) == (75 not in found) and len(lines) <= 1
    for line in lines:
        settings = dict(re.findall(r"--set '?build\.(\w+)=([^ ']+)", line))
        options = builder.BuildOptions(target=settings.get("target", target), sms=json.loads(settings["sms"]))
        assert set(options.sms) <= set(found)
        rebuilt = manifest.gpu.model_copy(update={"sms": options.sms})
        assert suitable_gpus(rebuilt, machine)


def test_another_release_is_refused_with_the_one_to_install(gpu_engine):
    machine = machine_with(89, libraries={"tensorrt-rtx": "1.8.0.1", "cuda-bindings": "13"})
    assert refusal(gpu_engine, machine).startswith(
        "built for tensorrt-rtx 1.7.1.116, found 1.8.0.1; install it (pip install tensorrt-rtx==1.7.1.116) or build"
    )
    machine = machine_with(89, libraries={})
    assert refusal(gpu_engine, machine).endswith("not installed; run: pip install 'tensorrt-rtx==1.7.1.116'")


def test_the_run_times_own_libraries_are_needed(tmp_path):
    machine = machine_with(89, 89, libraries={"tensorrt-rtx": "1.7.1.116"})
    lines = [refusal(write_gpu_engine(tmp_path / f"tp{size}", tp_size=size), machine) for size in (1, 2)]
    assert lines[0] == "needs cuda-bindings, not installed; run: pip install 'plansmith[gpu]'"
    assert lines[1].startswith("needs cuda-bindings and nccl4py, not installed")


@pytest.mark.parametrize(
    ("sizes", "found", "way_out"),
    [((4, 1), 2, (2, 1)), ((4, 1), 3, (2, 1)), ((2, 2), 3, (2, 1)), ((1, 3), 2, (1, 2)), ((3, 1), 2, (1, 1))],
)
def test_too_few_gpus_are_answered_with_a_division_that_fits(tmp_path, sizes, found, way_out):
    path = write_gpu_engine(tmp_path / "engine", tp_size=sizes[0], pp_size=sizes[1])
    line = refusal(path, machine_with(*[89] * found, 90, 90, 90, 90))
    assert f"(tp_size {sizes[0]} x pp_size {sizes[1]}), this machine has {found}: build with " in line
    assert line.endswith(f"--set build.tp_size={way_out[0]} --set build.pp_size={way_out[1]}")


def test_an_old_driver_is_refused(gpu_engine):
    line = refusal(gpu_engine, machine_with(89, cuda_version=(12, 4), driver_version="550.54.15"))
    assert line.startswith(
        "tensorrt-rtx for CUDA 13 needs a driver of release 580 or later, found 550.54.15 (CUDA 12.4)"
    )


def test_what_a_rank_needs_counts_a_context_of_each_mode(tmp_path):
    record = rank_record(tmp_path, 0, 4)  # one plan of both modes
    (plan,) = record.plans
    assert record.gpu_bytes == GIB + 2 * (1 << 20)
    bare = plan.footprint.model_copy(update={"weights_bytes": 0})
    apart = tuple(plan.model_copy(update={"modes": (mode,), "footprint": bare}) for mode in plan.modes)
    beside = record.model_copy(update={"plans": apart, "weight_files": ("rank0.safetensors",)})
    assert beside.gpu_bytes == sum(record.constants.values()) + 2 * (1 << 20)


def test_too_little_gpu_memory_is_refused_by_what_is_free(tmp_path):
    path = write_gpu_engine(tmp_path / "engine", weights_bytes=20 * GIB)
    assert list(engine_problems(path, machine_with(89, memory_bytes=24 * GIB))) == []
    assert "rank 0 needs 20.0 GiB of GPU memory and its KV cache, GPU 0 (GPU-89) has 16.0 GiB" in refusal(
        path, machine_with(89, memory_bytes=16 * GIB)
    )
    machine = machine_with(89)
    busy = machine.gpus[0].model_copy(update={"free_bytes": 3 * GIB})
    assert "has 3.0 GiB free: free it" in refusal(path, machine.model_copy(update={"gpus": (busy,)}))


def test_a_damaged_plan_is_found_before_the_machine_is_asked(gpu_engine):
    plan = gpu_engine / "rank0.plan"
    content = bytearray(plan.read_bytes())
    content[-1] ^= 1
    plan.write_bytes(content)
    (problem,) = engine_problems(gpu_engine, machine_with())
    assert problem.endswith("rank0.plan: content is not what engine.json says (SHA-256); build the engine again")
    with pytest.raises(EngineError, match=r"rank0\.plan: content is not what"):
        builder.load_engine(gpu_engine)
    plan.write_bytes(content[:-1])
    assert "bytes found" in next(engine_problems(gpu_engine, machine_with()))
    plan.unlink()
    assert "rank0.plan is missing, but engine.json names it" in next(engine_problems(gpu_engine, machine_with()))


def test_a_missing_rank_is_named(tmp_path):
    path = write_gpu_engine(tmp_path / "engine", tp_size=2)
    edit(path, lambda data: data["gpu"]["ranks"].pop(1))
    assert list(engine_problems(path, machine_with(89, 89))) == [
        f"{path}: rank 1 of 2 is missing from engine.json; build the engine again"
    ]


def test_a_manifest_whose_files_and_ranks_disagree_is_refused(gpu_engine):
    edit(gpu_engine, lambda data: data["files"].clear())
    with pytest.raises(EngineError, match=r"engine\.json does not name rank0\.plan"):
        builder.load_engine(gpu_engine)
    edit(gpu_engine, lambda data: data.pop("gpu"))
    with pytest.raises(EngineError, match=r"engine\.json has no section gpu"):
        builder.load_engine(gpu_engine)


def test_the_manifest_of_a_cpu_engine_says_nothing_of_gpus(gpu_engine):
    manifest = builder.read_manifest(gpu_engine)
    assert "gpu" in manifest.as_data()
    assert "gpu" not in manifest.model_copy(update={"gpu": None}).as_data()


def test_targets_that_cannot_run_here_are_refused_before_a_build():
    with pytest.raises(
        EngineError, match="engines of target tensorrt-rtx run on a GPU; this machine has no NVIDIA GPU"
    ):
        check_target_runs("tensorrt-rtx", machine_with())
    with pytest.raises(EngineError, match="needs TensorRT, which is not installed"):
        check_target_runs("tensorrt", machine_with(90, libraries={}))
    check_target_runs("cpu")
    check_target_runs("tensorrt", machine_with(90))


def test_a_checked_engine_goes_to_the_run_time_as_its_manifest_describes_it(tmp_path, monkeypatch):
    path = write_gpu_engine(tmp_path / "engine", tp_size=2)
    machine = machine_with(90, 89, 89)
    monkeypatch.setattr("builder.compatibility.this_machine", lambda *target: machine)
    monkeypatch.setattr(
        "builder.targets.tensorrt.runtime.engine.TensorRtEngine", lambda layout, **given: (layout, given)
    )
    layout, given = builder.load_engine(path, num_blocks=7)
    assert given == {"num_blocks": 7} and layout.devices == (1, 2) and layout.hidden_size == 64
    with pytest.raises(EngineError, match=r"num_threads is 2, but .* runs on GPUs"):
        builder.load_engine(path, num_threads=2)

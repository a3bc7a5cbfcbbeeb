"""A build's options: what a target does not honour is refused, and what does not change the engine does not name it."""

import pytest
from gpu_engines import machine_with
from pydantic import ValidationError

from builder import BuildOptions
from builder.build_check import require_library, resolve_sms
from builder.targets import facts
from plansmith_errors import BuildError, ConfigError
from quantize.yaml_model import validate


def refused(**options):
    with pytest.raises(ConfigError) as error:
        validate(BuildOptions, options, "build.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "setting",
    [
        {"dtype": "float16"},
        {"sms": [89]},
        {"tp_size": 2},
        {"pp_size": 2},
        {"weights": "external"},
        {"kv_cache_dtype": "int8"},
        {"tokens_per_block": 64},
        {"executor": "ray"},
        {"max_build_workers": 2},
    ],
)
def test_a_setting_of_gpus_is_refused_for_the_cpu_with_the_way_out(setting):
    (name,) = setting
    assert f"'{name}' is {setting[name]!r}: target cpu has no such choice; remove it, or set" in refused(**setting)
    assert getattr(BuildOptions(target="tensorrt", **setting), name) is not None


def test_exact_precision_is_the_cpus():
    message = refused(target="tensorrt-rtx", precision="exact")
    assert message.endswith("target tensorrt-rtx computes in build.dtype, float16 or bfloat16; remove it")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target": "tensorrt-rtx", "sms": [90]},
            "for sm90 set build.target to tensorrt, on a machine with such a GPU",
        ),
        ({"target": "tensorrt-rtx", "sms": [88]}, "88 is no compute capability that tensorrt-rtx compiles for"),
        ({"target": "tensorrt", "sms": [90, 100]}, "compiles for the one GPU model of its machine"),
        ({"target": "tensorrt", "sms": []}, "names no GPU"),
        ({"target": "tensorrt", "sms": 89}, "expected a list, such as [1, 2]"),
        ({"target": "tensorrt", "sms": ["89"]}, "expected a whole number"),
        ({"target": "tensorrt", "tokens_per_block": 48}, "expected a power of two"),
        ({"target": "tensorrt", "tp_size": 4, "ep_size": 3}, "ep_size 3 does not divide tp_size 4"),
        ({"target": "tensorrt", "kv_cache_dtype": "fp8"}, "input should be 'auto' or 'int8'"),
        ({"target": "vulkan", "sms": [1]}, "input should be 'cpu', 'tensorrt-rtx' or 'tensorrt'"),
    ],
)
def test_what_no_target_can_do_is_refused(options, message):
    assert message in refused(**options)


def test_compute_capabilities_are_a_set():
    assert BuildOptions(target="tensorrt-rtx", sms=[120, 89, 89]).sms == (89, 120)


def test_how_it_is_built_does_not_change_what_is_built():
    one = BuildOptions(target="tensorrt", max_build_workers=1, executor="ray")
    assert one.what_is_built() == BuildOptions(target="tensorrt").what_is_built()
    assert one.what_is_built() != BuildOptions(target="tensorrt", tp_size=2).what_is_built()


def test_options_are_frozen():
    with pytest.raises(ValidationError):
        BuildOptions().target = "tensorrt"


def test_gpus_to_compile_for_are_those_asked_for_or_those_of_the_machine():
    nothing = machine_with()
    assert resolve_sms(BuildOptions(target="tensorrt-rtx", sms=[120, 75]), nothing) == (75, 120)
    assert resolve_sms(BuildOptions(target="tensorrt-rtx"), machine_with(89, 120, 89)) == (89, 120)
    assert resolve_sms(BuildOptions(target="tensorrt"), machine_with(90, 90)) == (90,)
    assert resolve_sms(BuildOptions(target="tensorrt", sms=[90]), machine_with(90, 80)) == (90,)
    with pytest.raises(
        BuildError, match=r"build\.sms is not set, and this machine has no NVIDIA GPU .*--set 'build.sms=\[89\]'"
    ):
        resolve_sms(BuildOptions(target="tensorrt-rtx"), nothing)
    with pytest.raises(BuildError, match="compiles on the GPU that it serves; this machine has no NVIDIA GPU"):
        resolve_sms(BuildOptions(target="tensorrt", sms=[90]), nothing)
    with pytest.raises(BuildError, match=r"compile for one of 100, and this machine has 1 x GPU-90 \(sm90\)"):
        resolve_sms(BuildOptions(target="tensorrt", sms=[100]), machine_with(90))
    with pytest.raises(BuildError, match=r"name in build\.sms one that it has"):
        resolve_sms(BuildOptions(target="tensorrt"), machine_with(90, 80))
    with pytest.raises(BuildError, match=r"name in build\.sms one that it has"):
        resolve_sms(BuildOptions(target="tensorrt-rtx"), machine_with(90))


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(facts.TARGETS, "tensorrt", facts.TargetFacts(*_absent()))
    with pytest.raises(BuildError, match=r"needs TensorRT, which is not installed; run: pip install 'tensorrt>=11'"):
        require_library("tensorrt")


def _absent():
    known = facts.TARGETS["tensorrt"]
    return (known.name, known.label, known.library, "no_such_module", known.install, known.sms, False)

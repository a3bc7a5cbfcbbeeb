"""From a network to a plan file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from builder.gpu_manifest import Footprint
from builder.targets.tensorrt.build_log import parse_footprint
from builder.targets.tensorrt.module import target_of
from builder.targets.tensorrt.network import BuiltNetwork
from builder.targets.tensorrt.options import MODES
from plansmith_errors import BuildError


@dataclass(frozen=True)
class BuiltPlan:
    footprint: Footprint
    seconds: float  # within the vendor's builder
    sha256: str


def write_plan(trt: Any, built: BuiltNetwork, sms: Sequence[int], path: Path) -> BuiltPlan:
    """Compile ``built`` for ``sms`` into the file ``path``; none: what the library takes by itself.

    The plan goes to the file in parts, as the builder hands them over. Raises BuildError with the builder's reason;
    then there is no file.
    """
    config = _config(trt, built, sms)
    mark = len(built.graph.log.lines)
    start = time.perf_counter()
    try:
        is_built, sha256 = _stream(trt, built, config, path)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise BuildError(f"{path}: cannot be written: {error.strerror}; is there room on the disk?") from None
    log = built.graph.log.since(mark)
    if not is_built:
        path.unlink(missing_ok=True)
        raise BuildError(f"TensorRT cannot build the plan: {log.first_error or 'it gives no reason'}")
    return BuiltPlan(parse_footprint(log.lines), time.perf_counter() - start, sha256)


def _stream(trt: Any, built: BuiltNetwork, config: Any, path: Path) -> tuple[bool, str]:
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        writer = _PlanFile(trt, file, beside)
        is_built = bool(built.builder.build_serialized_network_to_stream(built.network, config, writer.stream))
    if writer.error is not None:
        raise writer.error
    return is_built, writer.digest.hexdigest()


class _PlanFile:
    def __init__(self, trt: Any, file: BinaryIO, beside: Executor) -> None:
        self.error: OSError | None = None
        self.digest = hashlib.sha256()
        outer = self

        class Stream(trt.IStreamWriter):  # type: ignore[misc]  # the module has no type information
            def __init__(self) -> None:
                trt.IStreamWriter.__init__(self)

            def write(self, data: bytes) -> int:
                hashed = beside.submit(outer.digest.update, data)
                try:
                    written = file.write(data)
                    hashed.result()
                    return written
                except OSError as error:  # through the library's own frames it would be lost
                    outer.error = error
                    return 0

        self.stream = Stream()


def _config(trt: Any, built: BuiltNetwork, sms: Iterable[int]) -> Any:
    config = built.builder.create_builder_config()
    for mode in MODES:
        profile = built.builder.create_optimization_profile()
        for name, shapes in built.graph.profiles[mode].items():
            profile.set_shape(name, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise BuildError(f"TensorRT refuses the {mode} profile: {built.graph.log.first_error}")
    capabilities = [f"SM{sm}" for sm in sms]
    if not capabilities or target_of(trt) == "tensorrt":  # which compiles for the GPU that it finds
        return config
    config.num_compute_capabilities = len(capabilities)
    for index, name in enumerate(capabilities):
        capability = getattr(trt.ComputeCapability, name, None)
        if capability is None or not config.set_compute_capability(capability, index):
            raise BuildError(f"this version of TensorRT does not compile for {name.lower()}; remove it from build.sms")
    return config

"""The real thing: a plan deserialized by TensorRT, on a GPU, its ranks joined by NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.targets.tensorrt.runtime.cuda_device import CudaDevice
from builder.targets.tensorrt.runtime.gpu import ExecutionContext, Mode, PlanEngine
from builder.targets.tensorrt.runtime.nccl import NcclCommunicator, new_unique_id
from plansmith_errors import EngineError


class NvidiaGpu:
    """Implements Gpu."""

    def __init__(self, target: str, number: int) -> None:
        self._trt = _load_library(target)
        self.captures_graphs = hasattr(self._trt, "CudaGraphStrategy")  # TensorRT for RTX
        self.device = CudaDevice(number)
        self._log = _ErrorLog(self._trt)
        self._runtime = self._trt.Runtime(self._log.logger)

    def deserialize(self, plan: Path) -> PlanEngine:
        """The file is mapped, not read: TensorRT copies what it keeps."""
        import mmap

        with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            engine: PlanEngine | None = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise EngineError(f"{plan}: TensorRT refuses the plan ({self._log.last()}); build it for this machine")
        return engine

    def create_context(self, engine: PlanEngine, mode: Mode) -> ExecutionContext:
        arguments: list[Any] = []
        if self.captures_graphs and mode == "decode":
            config = engine.create_runtime_config()  # type: ignore[attr-defined]
            config.cuda_graph_strategy = self._trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            arguments = [config]
        context: ExecutionContext | None = engine.create_execution_context(*arguments)  # type: ignore[attr-defined]
        if context is None:
            raise EngineError(f"TensorRT has no memory for an execution context ({self._log.last()})")
        return context

    def new_unique_id(self) -> bytes:
        return new_unique_id()

    def join(self, unique_id: bytes, rank: int, tp_size: int, world_size: int) -> NcclCommunicator:
        return NcclCommunicator(unique_id, rank, tp_size, world_size)


def open_gpu(target: str, number: int) -> NvidiaGpu:
    """Raises EngineError."""
    return NvidiaGpu(target, number)


class _ErrorLog:
    """TensorRT reports why it refused through its logger alone."""

    def __init__(self, trt: Any) -> None:
        lines: list[str] = []
        self._lines = lines
        worst = (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR)

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in worst:
                    lines.append(message)

        self.logger = Logger()

    def last(self) -> str:
        return self._lines[-1].strip() if self._lines else "no reason given"


def _load_library(target: str) -> Any:
    from builder.targets.tensorrt.module import load_module
    from plansmith_errors import BuildError

    try:
        return load_module(target)  # type: ignore[arg-type]
    except BuildError as error:
        raise EngineError(str(error)) from None

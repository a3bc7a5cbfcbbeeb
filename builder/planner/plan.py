"""Every way to spread a decoder over a number of GPUs, and the smallest that holds what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from builder.parallel import Parallelism
from builder.planner.decoder_shape import DecoderShape
from builder.planner.footprint import StepLimits
from builder.planner.gpu import Gpu
from builder.planner.layout import Layout, Workload, make_layout
from builder.planner.legality import expert_sizes, legal_tp_sizes, obstacle
from builder.planner.precision import Precision
from plansmith_errors import BuildError

_MOST_GPUS = 4096


@dataclass(frozen=True)
class Request:
    """What is planned for. A size that is None is tried in all legal values."""

    shape: DecoderShape
    precision: Precision
    gpu: Gpu
    num_gpus: int
    limits: StepLimits
    workload: Workload
    tp_size: int | None = None
    pp_size: int | None = None
    ep_size: int | None = None


@dataclass(frozen=True)
class CapacityPlan:
    request: Request
    layouts: tuple[Layout, ...]  # legal ones, the fewest GPUs first

    @property
    def smallest(self) -> Layout | None:
        """The fewest GPUs that hold the workload; among as many, the quickest decode step, then the most room."""
        fitting = [layout for layout in self.layouts if layout.fits]
        return min(fitting, key=self._preference, default=None)

    def _preference(self, layout: Layout) -> tuple[int, float, int]:
        seconds = layout.decode(self.request.workload.batch_size).seconds
        return layout.parallelism.world_size, seconds, -layout.num_blocks


def plan_capacity(request: Request) -> CapacityPlan:
    """Raises BuildError where no legal layout takes the GPUs, and QuantizeError where the recipe does not fit."""
    if not 1 <= request.num_gpus <= _MOST_GPUS:
        raise BuildError(f"--gpus is {request.num_gpus}; expected 1 to {_MOST_GPUS}")
    parallelisms = list(_parallelisms(request))
    if not any(_takes_all(request, parallelism) for parallelism in parallelisms):
        raise BuildError(_why_none(request))
    layouts = [_layout(request, parallelism) for parallelism in parallelisms]
    return CapacityPlan(request, tuple(sorted(layouts, key=_order)))


def _layout(request: Request, parallelism: Parallelism) -> Layout:
    return make_layout(request.shape, request.precision, parallelism, request.gpu, request.limits, request.workload)


def _parallelisms(request: Request) -> Iterator[Parallelism]:
    """Legal ones whose copies take all GPUs."""
    for world_size in _divisors(request.num_gpus):
        for tp_size in _divisors(world_size):
            pp_size = world_size // tp_size
            if request.tp_size not in (None, tp_size) or request.pp_size not in (None, pp_size):
                continue
            ep_sizes = expert_sizes(request.shape, tp_size) if request.ep_size is None else [request.ep_size]
            for ep_size in ep_sizes:
                parallelism = Parallelism(tp_size, pp_size, ep_size)
                if _is_legal(request, parallelism):
                    yield parallelism


def _is_legal(request: Request, parallelism: Parallelism) -> bool:
    return obstacle(request.shape, request.precision, parallelism) is None


def _takes_all(request: Request, parallelism: Parallelism) -> bool:
    """One copy on all GPUs, or as many of the size that was asked for as there is room for."""
    is_fixed = request.tp_size is not None and request.pp_size is not None
    return is_fixed or parallelism.world_size == request.num_gpus


def _why_none(request: Request) -> str:
    shape, num_gpus = request.shape, request.num_gpus
    asked = Parallelism(request.tp_size or 1, request.pp_size or 1, request.ep_size or 1)
    reason = obstacle(shape, request.precision, asked)
    tp_sizes = legal_tp_sizes(shape, request.precision, max(num_gpus, 8))
    legal = f"legal are tp_size {', '.join(map(str, tp_sizes))} and pp_size 1 to {shape.num_layers}"
    if reason is not None:
        return f"{reason}; {legal}"
    if request.tp_size is not None or request.pp_size is not None:
        world = f"tp_size {request.tp_size or 'any'} x pp_size {request.pp_size or 'any'}"
        return f"{num_gpus} GPUs are no multiple of {world}; {legal}"
    fitting = {tp_size * pp_size for tp_size in tp_sizes for pp_size in range(1, shape.num_layers + 1)}
    nearest = max(size for size in fitting if size < num_gpus)
    return f"{num_gpus} GPUs are no product of legal sizes; the nearest number is {nearest}; {legal}"


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _order(layout: Layout) -> tuple[int, int, int]:
    parallelism = layout.parallelism
    return parallelism.world_size, parallelism.pp_size, parallelism.ep_size

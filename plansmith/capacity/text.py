"""A capacity plan that fits, for a reader: a summary, a line for each layout, where the memory of the smallest goes."""

from __future__ import annotations

from typing import Any

from plansmith.console import human_bytes, table

_MOST_ROWS = 24
_NARROWEST = 90  # columns that the tables need
_PARTS = {
    "weights": "weights",
    "activations": "activations and scratch",
    "logits": "logits",
    "reserved": "CUDA context and communicators",
    "margin": "margin for fragmentation",
    "kv_cache": "KV cache",
}


def as_text(report: dict[str, Any]) -> str:
    """For a log or a pipe."""
    blocks = ["\n".join(summary_lines(report)), *(table(*rows) for rows in tables(report)), closing_text(report)]
    return "\n\n".join(blocks)


def as_rich(report: dict[str, Any], width: int) -> str:
    """For a terminal of ``width`` columns."""
    from io import StringIO

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=max(width, _NARROWEST), highlight=False, markup=False)
    console.print("\n".join(summary_lines(report)), soft_wrap=True)
    for headers, rows in tables(report):
        grid = Table(box=SIMPLE_HEAD, pad_edge=False)
        for header in headers:
            grid.add_column(header, justify="right", no_wrap=True)
        for row in rows:
            grid.add_row(*row, style=_style(row, report))
        console.print(grid)
    console.print(closing_text(report), soft_wrap=True)
    return screen.getvalue()


def closing_text(report: dict[str, Any]) -> str:
    omitted = len(report["layouts"]) - len(_shown(report))
    more = [f"({omitted} more layouts with --output json)"] if omitted else []
    return "\n".join([*more, *smallest_lines(report), *(f"note: {note}" for note in report["notes"])])


def tables(report: dict[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Headers and cells of what each layout holds, and of the least times of those that fit."""
    fitting = [layout for layout in _shown(report) if layout["fits"]]
    names = ["tp", "pp", *(["ep"] if report["model"]["has_experts"] else []), "GPUs"]
    holds = [*names, "fits", "weights", "activations", "KV cache", "tokens", "sequences", "largest batch"]
    speeds = [*names, "1 seq, ms", "bound", "seqs", "ms", "bound", "tokens/s", "prefill, ms", "bound"]
    return [
        (holds, [[*_names(layout, names), *_holds(layout)] for layout in _shown(report)]),
        (speeds, [[*_names(layout, names), *_speeds(layout)] for layout in fitting]),
    ]


def summary_lines(report: dict[str, Any]) -> list[str]:
    model, weights, cache, gpu = (report[key] for key in ("model", "weights", "kv_cache", "gpu"))
    limits, workload = report["limits"], report["workload"]
    active = f", {model['num_active_parameters'] / 1e9:.1f}B for each token" if model["has_experts"] else ""
    sequences = "sequence" if workload["batch_size"] == 1 else "sequences"
    return [
        f"model      {model['source']}: {model['architecture']}, {_parameters(model['num_parameters'])} parameters"
        f"{active}, {model['num_layers']} layers",
        f"weights    {weights['precision']}: {human_bytes(weights['nbytes'])}, "
        f"{weights['bytes_per_parameter']:.3f} bytes per parameter",
        f"KV cache   {cache['dtype']}: {cache['bytes_per_token'] / 1024:.6g} KiB per token",
        f"GPUs       {report['num_gpus']} x {gpu['title']}: {human_bytes(gpu['memory_bytes'])}, "
        f"{gpu['bandwidth']:g} GB/s, sm{gpu['sm']}",
        f"engine     max_batch_size {limits['max_batch_size']}, max_num_tokens {limits['max_num_tokens']}, "
        f"max_seq_len {limits['max_seq_len']}",
        f"wanted     {workload['batch_size']} {sequences} of {workload['context']} tokens",
    ]


def smallest_lines(report: dict[str, Any]) -> list[str]:
    chosen = report["smallest"]
    layout = next(layout for layout in report["layouts"] if all(layout[key] == chosen[key] for key in chosen))
    experts = f", ep_size {chosen['ep_size']}" if report["model"]["has_experts"] else ""
    copies = layout["num_copies"]
    more = f"; {copies} copies on {report['num_gpus']} GPUs" if copies > 1 else ""
    memory = layout["memory"]
    parts = ", ".join(f"{label} {human_bytes(memory[key])}" for key, label in _PARTS.items() if memory[key])
    return [
        f"smallest: tp_size {chosen['tp_size']}, pp_size {chosen['pp_size']}{experts}: "
        f"{_gpus(layout['num_gpus'])}{more}",
        f"  memory of a GPU: {parts}",
        f"  decode, 1 sequence: {_speed(layout['decode_one'])}",
        f"  decode, {layout['decode']['num_tokens']} sequences: {_speed(layout['decode'])}",
        f"  prefill of {layout['prefill']['num_tokens']} tokens: {_speed(layout['prefill'])}",
    ]


def _speed(step: dict[str, Any]) -> str:
    return (
        f"at least {_milliseconds(step['seconds'])} ms, {_milliseconds(step['seconds_per_token'])} ms per token, "
        f"at most {step['tokens_per_second']:.0f} tokens/s; bound by {step['bound']}"
    )


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _shown(report: dict[str, Any]) -> list[dict[str, Any]]:
    layouts: list[dict[str, Any]] = report["layouts"]
    return layouts if len(layouts) <= _MOST_ROWS else [layout for layout in layouts if layout["fits"]][:_MOST_ROWS]


def _names(layout: dict[str, Any], names: list[str]) -> list[str]:
    return [str(layout["num_gpus" if name == "GPUs" else f"{name}_size"]) for name in names]


def _style(row: list[str], report: dict[str, Any]) -> str:
    """The smallest layout stands out, those that do not fit step back."""
    chosen = report["smallest"]
    sizes = [
        str(chosen[key]) for key in ("tp_size", "pp_size", *(["ep_size"] if report["model"]["has_experts"] else []))
    ]
    return "bold green" if row[: len(sizes)] == sizes else "dim" if "no" in row else ""


def _holds(layout: dict[str, Any]) -> list[str]:
    memory = layout["memory"]
    return [
        "yes" if layout["fits"] else "no",
        human_bytes(memory["weights"]),
        human_bytes(memory["activations"]),
        human_bytes(max(memory["kv_cache"], 0)),
        *(str(layout[key]) for key in ("num_tokens", "num_sequences", "largest_batch")),
    ]


def _speeds(layout: dict[str, Any]) -> list[str]:
    one, decode, prefill = layout["decode_one"], layout["decode"], layout["prefill"]
    return [
        _milliseconds(one["seconds"]),
        one["bound"],
        str(decode["num_tokens"]),
        _milliseconds(decode["seconds"]),
        decode["bound"],
        f"{decode['tokens_per_second']:.0f}",
        _milliseconds(prefill["seconds"]),
        prefill["bound"],
    ]


def _milliseconds(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.3g}" if milliseconds < 1000 else f"{milliseconds:.0f}"

"""From a checkpoint to streamed tokens: runs the pipeline of build.yaml, serves it with Triton, chats, prints a table.

usage: python examples/demo/demo.py MODEL.gguf ["a question"]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from plansmith.console import human_bytes, table
from triton_repo import TritonServer, check_repository, render_chat_with, stream_generate

HERE = Path(__file__).parent
QUESTION = "Explain in simple words why the sky is blue."
MAX_TOKENS = 120


def run_pipeline(model: Path) -> dict:
    command = [sys.executable, "-m", "plansmith", "run", str(HERE / "build.yaml"), "--output", "json"]
    done = subprocess.run([*command, "--set", f"model={model.resolve()}"], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def chat(server: TritonServer, prompt: str) -> tuple[float, float, int]:
    """Print the answer as it arrives; returns seconds to the first token, seconds in all, and the number of tokens."""
    started, first, num_tokens = time.perf_counter(), None, 0
    for chunk in stream_generate(
        server.http_url, server.model_name, prompt, {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    ):
        first = first or time.perf_counter() - started
        num_tokens += chunk.num_output_tokens
        print(chunk.text, end="", flush=True)
    return first, time.perf_counter() - started, num_tokens


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    question = sys.argv[2] if len(sys.argv) > 2 else QUESTION
    result = run_pipeline(Path(sys.argv[1]))
    repository = Path(result["repository"])
    prompt = render_chat_with(check_repository(repository).tokenizer, [{"role": "user", "content": question}])

    started = time.perf_counter()
    with TritonServer(repository, http_port=0, grpc_port=0, metrics_port=0) as server:
        ready = time.perf_counter() - started
        print(f"\nTriton answers at {server.http_url}\n\n> {question}\n")
        chat(server, prompt)  # the first request also warms the engine; the second is timed
        print("\n\n(once more, timed)\n")
        ttft, seconds, num_tokens = chat(server, prompt)
    print("\n\nstopped cleanly\n")

    rows = [[s["stage"], f"{s['seconds']:.1f}", human_bytes(s["bytes"])] for s in result["stages"]]
    print(table(["stage", "seconds", "size"], [*rows, ["server ready", f"{ready:.1f}", ""]]))
    print(f"\nTTFT {ttft * 1000:.0f} ms, {(num_tokens - 1) / (seconds - ttft):.0f} tokens/s ({num_tokens} tokens)")
    measured = result["report"]["perplexity"]
    print(
        f"perplexity on {measured['text']}: {measured['quantized']['perplexity']:.2f}, unquantized "
        f"{measured['unquantized']['perplexity']:.2f} ({measured['unquantized_weights']})"
    )


if __name__ == "__main__":
    main()

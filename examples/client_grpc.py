"""Stream a completion over Triton's gRPC endpoint with tritonclient: python client_grpc.py "Once upon a time".

The stream is always read to its end: the server in the nvidia-pytriton wheel does not survive cancelled gRPC calls.
"""

from __future__ import annotations

import argparse
import json
import queue

import numpy as np
import tritonclient.grpc as triton


def tensor(name: str, value: object, dtype: str) -> triton.InferInput:
    item = triton.InferInput(name, [1], dtype)
    item.set_data_from_numpy(np.array([value], dtype=np.bool_ if dtype == "BOOL" else np.object_))
    return item


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:8001")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    sampling = {"max_tokens": arguments.max_tokens, "temperature": 0}
    inputs = [
        tensor("text_input", arguments.prompt.encode(), "BYTES"),
        tensor("stream", True, "BOOL"),
        tensor("sampling_parameters", json.dumps(sampling).encode(), "BYTES"),
    ]
    answers: queue.Queue[tuple[triton.InferResult, Exception | None]] = queue.Queue()
    with triton.InferenceServerClient(arguments.address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(arguments.model, inputs)
        finish_reason = ""
        while not finish_reason:
            result, error = answers.get()
            if error is not None:
                raise SystemExit(f"the server says: {error}")
            print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
            finish_reason = result.as_numpy("finish_reason")[0].decode()
        print(f"\n[{finish_reason}]")


if __name__ == "__main__":
    main()

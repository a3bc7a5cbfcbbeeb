"""Stream a completion over HTTP with the standard library alone: python client_http.py "Once upon a time"."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    body = {
        "text_input": arguments.prompt,
        "stream": True,
        # one JSON string: Triton's generate endpoint takes no nested objects
        "sampling_parameters": json.dumps({"max_tokens": arguments.max_tokens, "temperature": 0}),
    }
    request = urllib.request.Request(
        f"{arguments.url}/v2/models/{arguments.model}/generate_stream",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as response:
            for line in response:
                if line.startswith(b"data:"):
                    show(json.loads(line.removeprefix(b"data:")))
    except urllib.error.HTTPError as error:
        raise SystemExit(f"refused: {error.read().decode()}") from None


def show(message: dict[str, object]) -> None:
    if "error" in message:
        raise SystemExit(f"the server says: {message['error']}")
    print(message["text_output"], end="", flush=True)
    if message["finish_reason"]:
        print(f"\n[{message['finish_reason']}]")


if __name__ == "__main__":
    main()

"""Finding, starting, watching and stopping a Triton server."""

"""The CPU target: OpenVINO's operations and its PagedAttention kernel."""

"""``config.pbtxt``: built as Triton's own protobuf message, written as text, and read back to be compared.

The inputs and outputs are those of Triton's vLLM backend, so that its clients work; ``input_ids`` is ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plansmith_errors import RepositoryError
from triton_repo.options import PackageOptions

FILE_NAME = "config.pbtxt"

# name, data type, dims, optional
INPUTS = (
    ("text_input", "TYPE_STRING", [1], True),
    ("input_ids", "TYPE_INT32", [-1], True),
    ("stream", "TYPE_BOOL", [1], True),
    ("sampling_parameters", "TYPE_STRING", [1], True),
    ("exclude_input_in_output", "TYPE_BOOL", [1], True),
)
OUTPUTS = (
    ("text_output", "TYPE_STRING", [1]),
    ("finish_reason", "TYPE_STRING", [1]),
    ("num_input_tokens", "TYPE_INT32", [1]),
    ("num_output_tokens", "TYPE_INT32", [1]),
    ("logprobs", "TYPE_STRING", [1]),
)


def build_model_config(options: PackageOptions, plansmith_version: str) -> Any:
    """An ``inference.ModelConfig``: decoupled, batched by the engine alone, one instance that owns its devices."""
    pb = _model_config_pb2()
    config = pb.ModelConfig(name=options.model_name, backend="python", max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    for name, data_type, dims, optional in INPUTS:
        config.input.add(name=name, data_type=pb.DataType.Value(data_type), dims=dims, optional=optional)
    for name, data_type, dims in OUTPUTS:
        config.output.add(name=name, data_type=pb.DataType.Value(data_type), dims=dims)
    # KIND_MODEL also on GPUs: one engine process owns the scheduler and every device
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_MODEL)
    parameters = {"plansmith_version": plansmith_version, "max_queue_size": str(options.max_queue_size)}
    for name in ("kv_cache_tokens", "num_threads"):
        value = getattr(options, name)
        if value is not None:
            parameters[name] = str(value)
    for name, text in parameters.items():
        config.parameters[name].string_value = text
    return config


def write_model_config(config: Any, path: Path) -> None:
    """Write a ModelConfig as text and check that it reads back the same. Raises RepositoryError."""
    from google.protobuf import text_format

    text: str = text_format.MessageToString(config)
    head, rest = text.split("\n", 1)
    # the text format leaves out zeros, and Triton's auto-completion would take a missing size for "choose one"
    path.write_text(f"{head}\nmax_batch_size: 0\n{rest}", encoding="utf-8")
    if read_model_config(path) != config:
        raise RepositoryError(f"{path}: does not read back as it was written; this is a bug of protobuf's text format")


def read_model_config(path: Path) -> Any:
    """Parse a ``config.pbtxt``. Raises RepositoryError when it is missing or not one."""
    pb = _model_config_pb2()
    from google.protobuf import text_format

    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except FileNotFoundError:
        raise RepositoryError(f"{path}: no such file; package the engine again") from None
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise RepositoryError(f"{path}: not a Triton model configuration: {' '.join(str(error).split())}") from None


def _model_config_pb2() -> Any:
    try:
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise RepositoryError(f"{error}; install plansmith[serve] to write and read model repositories") from None
    return model_config_pb2

"""``TritonPythonModel``: what Triton's Python backend loads. Validates, admits, and leaves the rest to others."""

from __future__ import annotations

import json
import logging
import sys
from itertools import count
from pathlib import Path
from typing import Any

from plansmith_errors import EngineError, RequestError
from triton_repo.backend.engine_client import EngineClient
from triton_repo.backend.metrics import EngineMetrics
from triton_repo.backend.protocol import Submit
from triton_repo.backend.stream import Chunk, Stream
from triton_repo.backend.supervisor import PublishStats, Supervisor
from triton_repo.backend.triton_request import parse_request
from triton_repo.backend.triton_response import TritonResponses

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0


class TritonPythonModel:
    """Requests of one model. Triton calls every method from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine process. Raises TritonModelException with its one-line reason when it cannot load."""
        import triton_python_backend_utils as utils

        logging.basicConfig(level=logging.INFO, format="%(asctime)s stub %(levelname)s %(message)s")
        self._utils = utils
        self._model_name = args["model_name"]
        self._request_ids = count(1)
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        directory = Path(args["model_repository"], args["model_version"])
        command = self.engine_command(directory, parameters)
        self._client = EngineClient(command, max_queue_size=int(parameters["max_queue_size"]))
        self._supervisor = Supervisor(self._client, self._make_publisher)
        try:
            ready = self._client.start(LOAD_TIMEOUT_S)
        except EngineError as error:
            self._supervisor.close()
            raise utils.TritonModelException(str(error)) from None
        logger.info("model %s is ready: %s", self._model_name, ready)

    def engine_command(self, directory: Path, parameters: dict[str, str]) -> list[str]:
        """The argument list of the engine process for a version directory and the parameters of config.pbtxt."""
        command = [sys.executable, "-m", "triton_repo.backend.engine_process"]
        command += ["--engine", str(directory / "engine"), "--tokenizer", str(directory / "tokenizer")]
        for name in ("kv_cache_tokens", "num_threads"):
            if name in parameters:
                command += [f"--{name.replace('_', '-')}", parameters[name]]
        return command

    def execute(self, requests: list[Any]) -> None:
        """Take requests; their responses are sent later, by the sender threads."""
        for request in requests:
            responses = TritonResponses(self._utils, request.get_response_sender(), request.requested_output_names())
            try:
                refusal = self._submit(request, responses)
            except RequestError as error:
                refusal = f"[INVALID_ARGUMENT] {error}"
            except Exception as error:  # a bug of ours must cost this request, not the server
                logger.exception("a request could not be read")
                refusal = f"[INTERNAL] {type(error).__name__}: {error}"
            if refusal is not None:
                responses.send(Chunk("", 0, 0, error=refusal))

    def finalize(self) -> None:
        """Called after the open requests have ended."""
        self._supervisor.close()
        self._client.close()
        logger.info("model %s is unloaded", self._model_name)

    def _submit(self, request: Any, responses: TritonResponses) -> str | None:
        def read(name: str) -> Any:
            tensor = self._utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()

        parsed = parse_request(read)
        request_id = next(self._request_ids)
        stream = Stream(request_id, responses, parsed.is_streaming, (parsed.text or "") if parsed.echo else "")
        return self._client.submit(
            stream, Submit(request_id, parsed.text, parsed.input_ids, parsed.sampling_json, request.parameters())
        )

    def _make_publisher(self) -> PublishStats | None:
        try:
            return EngineMetrics(self._utils, self._model_name).update
        except self._utils.TritonModelException as error:  # the server runs with --allow-metrics=false
            logger.warning("engine metrics are not published: %s", error)
            return None

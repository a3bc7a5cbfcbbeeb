from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from triton_repo.backend.engine_client import EngineClient

SCRIPTED_ENGINE = Path(__file__).parent / "scripted_engine_process.py"


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level: 256 byte tokens, then <s> (256) and </s> (257)."""
    directory = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 257}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return directory


@pytest.fixture
def engine_client(tokenizer_directory: Path) -> Iterator[Callable[..., EngineClient]]:
    """Makes clients of engine processes whose engine is scripted; ends their processes after the test."""
    clients: list[EngineClient] = []

    def make(*flags: str, max_queue_size: int = 8) -> EngineClient:
        command = [sys.executable, str(SCRIPTED_ENGINE), str(tokenizer_directory), *flags]
        clients.append(EngineClient(command, max_queue_size=max_queue_size))
        return clients[-1]

    yield make
    for client in clients:
        client.close()

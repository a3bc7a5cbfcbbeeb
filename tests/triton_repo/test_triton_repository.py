from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from plansmith_errors import RepositoryError
from triton_repo import PackageOptions, check_repository, write_repository
from triton_repo.model_config import read_model_config
from triton_repo.repository import Repository

VERSION = "1.2.3"


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer_directory: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for file in tokenizer_directory.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (directory / "model.safetensors").write_bytes(b"not for the repository")
    return directory


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine directory whose weights are noise: packaging reads nothing but its manifest."""
    from builder.manifest import EngineManifest, KvCache, Limits, Source, describe_file, write_manifest

    directory = tmp_path / "engine"
    directory.mkdir()
    (directory / "model.xml").write_text("<net/>")
    (directory / "model.bin").write_bytes(bytes(2 << 20))
    manifest = EngineManifest(
        plansmith_version=VERSION,
        target="cpu",
        library={"openvino": "0"},
        precision="exact",
        compile_properties={},
        limits=Limits(max_batch_size=4, max_num_tokens=64, max_seq_len=128, vocab_size=258),
        kv_cache=KvCache(dtype="f32", tokens_per_block=16, bytes_per_block=4096),
        model={},
        weights={},
        source=Source(files={}, quantization=None),
        files={file.name: describe_file(file) for file in sorted(directory.iterdir())},
    )
    write_manifest(directory, manifest)
    return directory


@pytest.fixture
def repository(tmp_path: Path, engine: Path, checkpoint: Path) -> Repository:
    options = PackageOptions(model_name="tiny", max_queue_size=7, kv_cache_tokens=1000)
    return check_repository(
        write_repository(engine, checkpoint, tmp_path / "repository", options, plansmith_version=VERSION)
    )


def test_a_repository_has_the_engine_the_tokenizer_and_nothing_half_written(repository: Repository) -> None:
    files = {str(file.relative_to(repository.path)) for file in repository.path.rglob("*") if file.is_file()}
    assert files == {
        "tiny/config.pbtxt",
        "tiny/1/model.py",
        "tiny/1/engine/model.xml",
        "tiny/1/engine/model.bin",
        "tiny/1/engine/engine.json",
        "tiny/1/tokenizer/tokenizer.json",
        "tiny/1/tokenizer/tokenizer_config.json",
        "tiny/1/tokenizer/config.json",
        "tiny/1/tokenizer/chat_template.jinja",
    }
    assert repository.model_name == "tiny"
    assert repository.plansmith_version == VERSION


def test_weights_are_not_stored_twice(repository: Repository, engine: Path) -> None:
    assert (repository.engine / "model.bin").samefile(engine / "model.bin")
    assert not (repository.engine / "engine.json").samefile(engine / "engine.json")


def test_weights_are_copied_where_links_are_impossible(
    engine: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refuse)
    write_repository(engine, checkpoint, tmp_path / "r", PackageOptions(), plansmith_version=VERSION)
    copy = tmp_path / "r/llm/1/engine/model.bin"
    assert not copy.samefile(engine / "model.bin")
    assert hashlib.sha256(copy.read_bytes()).digest() == hashlib.sha256((engine / "model.bin").read_bytes()).digest()


def test_the_configuration_is_the_contract_of_vllms_backend(repository: Repository) -> None:
    path = repository.path / "tiny/config.pbtxt"
    assert "max_batch_size: 0\n" in path.read_text()
    config = read_model_config(path)
    assert config.model_transaction_policy.decoupled
    inputs = {item.name: item.optional for item in config.input}
    assert inputs.keys() >= {"text_input", "stream", "sampling_parameters", "exclude_input_in_output"}
    assert next(item.name for item in config.output) == "text_output"
    assert config.parameters["max_queue_size"].string_value == "7"
    assert config.parameters["kv_cache_tokens"].string_value == "1000"
    assert "num_threads" not in config.parameters


def test_an_existing_output_is_never_overwritten(repository: Repository, engine: Path, checkpoint: Path) -> None:
    with pytest.raises(RepositoryError, match="already exists and is not an empty directory"):
        write_repository(engine, checkpoint, repository.path, PackageOptions(), plansmith_version=VERSION)


@pytest.mark.parametrize("missing", ["engine/engine.json", "engine/model.bin", "checkpoint/tokenizer.json"])
def test_incomplete_inputs_leave_no_repository(engine: Path, checkpoint: Path, tmp_path: Path, missing: str) -> None:
    (tmp_path / missing).unlink()
    with pytest.raises(RepositoryError, match=Path(missing).name):
        write_repository(engine, checkpoint, tmp_path / "r", PackageOptions(), plansmith_version=VERSION)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "1/engine/model.bin").unlink(), "model.bin: no such file"),
        (lambda model: (model / "1/engine/engine.json").unlink(), "engine.json"),
        (lambda model: (model / "1/tokenizer/tokenizer.json").unlink(), "tokenizer.json: no such file"),
        (lambda model: (model / "1/tokenizer/tokenizer.json").write_text("{"), "not valid JSON"),
        (lambda model: (model / "1/model.py").unlink(), "model.py: no such file"),
        (lambda model: (model / "config.pbtxt").unlink(), "config.pbtxt: no such file"),
        (lambda model: (model / "config.pbtxt").write_text("nonsense: {"), "not a Triton model configuration"),
        (lambda model: (model / "config.pbtxt").write_text('name: "other"'), "name is 'other', expected 'tiny'"),
        (lambda model: (model / "config.pbtxt").write_text('name: "tiny"'), "expected a decoupled model"),
        (lambda model: (model.parent / "second").mkdir(), r"found 2 models \(second, tiny\)"),
    ],
)
def test_damage_is_found_and_named(repository: Repository, damage: object, message: str) -> None:
    damage(repository.path / "tiny")  # type: ignore[operator]
    with pytest.raises(RepositoryError, match=message):
        check_repository(repository.path)


def test_a_directory_that_is_no_repository_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="no such directory"):
        check_repository(tmp_path / "nowhere")
    with pytest.raises(RepositoryError, match="found no model"):
        check_repository(tmp_path)


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a b", "x" * 200, "naïve"])
def test_unsafe_model_names_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="letters, digits"):
        PackageOptions(model_name=name)


def test_the_model_file_names_the_remedy_when_versions_differ(repository: Repository) -> None:
    source = (repository.version_directory / "model.py").read_text()
    with pytest.raises(RuntimeError, match=f"packaged by plansmith {VERSION}.*package the engine again"):
        exec(compile(source, "model.py", "exec"), {})


def test_a_tokenizer_is_packaged_with_its_settings(repository: Repository) -> None:
    assert json.loads((repository.tokenizer / "config.json").read_text())["eos_token_id"] == 257


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("config.json", "{", "cannot be read as JSON"),
        ("generation_config.json", "[]", "expected a JSON object"),
        ("generation_config.json", '{"eos_token_id": 99999}', "eos_token_id 99999 is not one of the 258 tokens"),
    ],
)
def test_a_broken_tokenizer_is_refused_by_the_name_of_the_source(
    tmp_path: Path, engine: Path, checkpoint: Path, name: str, content: str, message: str
) -> None:
    (checkpoint / "config.json").write_text('{"vocab_size": 258}')
    (checkpoint / name).write_text(content)
    with pytest.raises(RepositoryError, match=message) as caught:
        write_repository(engine, checkpoint, tmp_path / "out", PackageOptions(), plansmith_version=VERSION)
    assert str(checkpoint) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_chat_template_that_does_not_compile_is_warned_about(
    tmp_path: Path, engine: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint / "chat_template.jinja").write_text("{% if")
    write_repository(engine, checkpoint, tmp_path / "out", PackageOptions(), plansmith_version=VERSION)
    assert "the chat template does not compile" in caplog.text

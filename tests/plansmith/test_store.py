"""A stage's output is whole or absent, is reused when nothing changed, and is never shared by two runs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from plansmith.directories import output_directory
from plansmith.store import RECORD, open_store
from plansmith_errors import ArtifactError


def write_weights(content):
    return lambda payload: (payload / "weights.bin").write_bytes(content)


def test_an_artifact_that_differs_in_one_thing_is_found_while_it_is_whole(tmp_path):
    with open_store(tmp_path) as store:
        made = store.make("build", {"checkpoint": "a", "sms": [89]}, write_weights(b"abc"))
        wanted = {"checkpoint": "b", "sms": [89]}
        assert store.find_alike("build", wanted, but_for="checkpoint").path == made.path
        assert store.find_alike("build", wanted, but_for="sms") is None
        assert store.find_alike("package", wanted, but_for="checkpoint") is None
        (made.payload / "weights.bin").write_bytes(b"a")
        assert store.find_alike("build", wanted, but_for="checkpoint") is None


def test_the_same_dependencies_make_an_artifact_once(tmp_path):
    with open_store(tmp_path) as store:
        first = store.make("quantize", {"recipe": "int4"}, write_weights(b"abc"))
        second = store.make("quantize", {"recipe": "int4"}, write_weights(b"never written"))
        other = store.make("quantize", {"recipe": "fp8"}, write_weights(b"fp8"))
    assert not first.reused and second.reused
    assert (second.payload / "weights.bin").read_bytes() == b"abc"
    assert second.seconds == first.seconds and second.num_bytes == 3
    assert other.path != first.path


def test_a_stage_that_fails_leaves_nothing(tmp_path):
    def fail(payload):
        (payload / "half").write_bytes(b"half")
        raise RuntimeError("the stage broke")

    with open_store(tmp_path) as store:
        with pytest.raises(RuntimeError):
            store.make("build", {"a": 1}, fail)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["lock"]
        assert not store.make("build", {"a": 1}, write_weights(b"whole")).reused


@pytest.mark.parametrize("damage", ["truncate", "remove", "add", "record"])
def test_a_damaged_artifact_is_made_again(tmp_path, damage):
    with open_store(tmp_path) as store:
        artifact = store.make("build", {"a": 1}, write_weights(b"whole"))
        weights = artifact.payload / "weights.bin"
        if damage == "truncate":
            weights.write_bytes(b"who")
        elif damage == "remove":
            weights.unlink()
        elif damage == "add":
            (artifact.payload / "stranger").write_bytes(b"x")
        else:
            (artifact.path / RECORD).write_text("{")
        again = store.make("build", {"a": 1}, write_weights(b"whole"))
        assert not again.reused
        assert (again.payload / "weights.bin").read_bytes() == b"whole"


def test_a_repository_that_was_served_is_not_made_again(tmp_path):
    with open_store(tmp_path) as store:
        artifact = store.make("package", {"a": 1}, write_weights(b"whole"))
        (artifact.payload / "__pycache__").mkdir()
        (artifact.payload / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"byte code")
        assert store.make("package", {"a": 1}, write_weights(b"whole")).reused


def test_two_runs_cannot_hold_one_store(tmp_path):
    with open_store(tmp_path), pytest.raises(ArtifactError, match="in use by another run"), open_store(tmp_path):
        pass
    with open_store(tmp_path):
        pass


KILLED_RUN = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from plansmith.store import open_store

    def produce(payload):
        for index in range(1000):
            (payload / f"part{index}").write_bytes(b"x" * 4096)
            if index == 3:
                print("working", flush=True)
            time.sleep(0.002)

    with open_store(Path(sys.argv[1])) as store:
        store.make("first", {"a": 1}, lambda payload: (payload / "done").write_bytes(b"1"))
        store.make("second", {"a": 2}, produce)
""")


def test_a_run_killed_in_the_middle_resumes_without_its_half_written_stage(tmp_path):
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED_RUN, str(tmp_path)], stdout=subprocess.PIPE)
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert any(path.name.endswith(".partial") for path in tmp_path.iterdir())
    with open_store(tmp_path) as store:
        assert not any(path.name.endswith(".partial") for path in tmp_path.iterdir())
        assert store.make("first", {"a": 1}, write_weights(b"never")).reused
        assert not store.make("second", {"a": 2}, write_weights(b"whole")).reused


def test_a_changed_file_has_a_new_hash_and_an_unchanged_one_is_not_read_again(tmp_path):
    source = tmp_path / "model.bin"
    source.write_bytes(b"a" * 1000)
    with open_store(tmp_path / "store") as store:
        before = store.file_hashes.hash(source)
    status = source.stat()
    with open_store(tmp_path / "store") as store:
        assert store.file_hashes.hash(source) == before
        time.sleep(0.01)
        source.write_bytes(b"b" * 1000)
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a tool that keeps times would leave it
        assert store.file_hashes.hash(source) != before


def test_an_output_that_exists_is_never_overwritten(tmp_path):
    final = tmp_path / "engine"
    with output_directory(final) as partial:
        (partial / "engine.json").write_text("{}")
        assert not final.exists()
    with pytest.raises(ArtifactError, match="exists already"), output_directory(final):
        pass
    assert sorted(path.name for path in Path(tmp_path).iterdir()) == ["engine"]

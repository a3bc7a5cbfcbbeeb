"""Ranks built by a Ray that is started here: placed by memory, and the loss of one told as on one machine."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

import pytest
from random_models import save_model

import builder
from builder.sharding.ray_cluster import RayExecutor
from builder.sharding.tasks import RankTask
from builder.sharding.workers import build_ranks
from plansmith_errors import BuildError

ray = pytest.importorskip("ray", reason="Ray is not installed: make setup-dev installs it")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        # What every machine of a cluster has installed is, of this one, found here.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        # "local": never a cluster that happens to be there
        ray.init(
            "local",
            num_cpus=2,
            _memory=4 * 2**30,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
        yield
        ray.shutdown()


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.mkdir()
    return path


def tasks(count: int, memory_bytes: int = 2**28, **fail: str) -> list[RankTask]:
    return [
        RankTask(
            rank=rank,
            function="ray_rank:build",
            arguments={"rank": rank, "fail": fail.get(f"rank{rank}")},
            memory_bytes=memory_bytes,
        )
        for rank in range(count)
    ]


def test_ranks_are_built_and_kept(engine):
    with pytest.raises(
        BuildError, match=r"rank 1 of 3 was not built: its process was killed \(SIGKILL\).*the other 2 are built"
    ):
        build_ranks(tasks(3, rank1="kill"), engine, RayExecutor(None))
    results = build_ranks(tasks(3), engine, RayExecutor(1))
    assert [result.reused for result in results] == [True, False, True]
    assert [(engine / f"rank{rank}.plan").read_text() for rank in range(3)] == ["0", "1", "2"]
    assert all(result.peak_rss_bytes > 5e6 for result in results)


def test_what_ranks_warn_of_is_logged_here(engine, caplog):
    build_ranks(tasks(1, rank0="warn"), engine, RayExecutor(None))
    assert "rank 0: groups are unusual" in caplog.text


def test_a_rank_that_no_machine_has_memory_for_is_refused(engine):
    with pytest.raises(
        BuildError, match=r"rank 0 needs about 64.0 GiB .* largest machine of the Ray cluster offers 4.0"
    ):
        build_ranks(tasks(1, memory_bytes=2**36), engine, RayExecutor(None))


def test_a_refusal_on_the_other_machine_is_one_line(engine):
    with pytest.raises(BuildError, match=r"^rank 0 of 1 was not built: no kernel for sm70$"):
        build_ranks(tasks(1, rank0="refuse"), engine, RayExecutor(None))


def test_the_plans_of_an_engine_are_those_of_one_machine(tmp_path):
    save_model(tmp_path / "model", "llama", {})
    manifests = [build_over(tmp_path, executor) for executor in ("ray", "local")]
    over_ray, at_home = (manifest.gpu for manifest in manifests)
    assert over_ray is not None and at_home is not None
    assert [rank.file_names for rank in over_ray.ranks] == [["rank0.plan"], ["rank1.plan"]]
    for there, here in zip(over_ray.ranks, at_home.ranks, strict=True):
        assert there.constants == here.constants
        assert [plan.layers for plan in there.plans] == [plan.layers for plan in here.plans]
        assert there.peak_rss_bytes is not None


def build_over(folder: Path, executor: Literal["ray", "local"]) -> builder.EngineManifest:
    output = folder / executor
    output.mkdir()
    options = builder.BuildOptions(
        target="tensorrt-rtx",
        sms=(89,),
        tp_size=2,
        max_batch_size=2,
        max_num_tokens=32,
        max_seq_len=64,
        executor=executor,
    )
    return builder.build_engine(folder / "model", output, options, plansmith_version="test")

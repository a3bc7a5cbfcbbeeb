"""The pipeline of a build file: each stage reuses its artifact or makes it, from source to verified repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import builder
import quantize
import triton_repo
from builder.compatibility import why_not_run
from builder.targets.facts import TARGETS
from plansmith.calibration import calibration_tools, quantize_dependencies
from plansmith.config import BuildFile
from plansmith.console import Console, human_bytes
from plansmith.fingerprint import code_fingerprint, fingerprint, library_versions
from plansmith.source_check import check_source
from plansmith.store import Artifact, ArtifactStore
from plansmith.verify.inputs import load_tokenizer, read_inputs
from plansmith.verify.measure import describe_weights, measure
from plansmith.verify.page import write_page
from plansmith.verify.subject import loaded, look_at
from plansmith.version import __version__

Producer = Callable[[Path], object]


@dataclass(frozen=True)
class PipelineResult:
    stages: tuple[Artifact, ...]
    repository: Path
    report: dict[str, Any] | None  # of the verify stage
    cannot_run: str | None = None  # why this machine cannot run the engine
    is_verify_skipped: bool = False  # for that reason

    @property
    def up_to_date(self) -> bool:
        return all(stage.reused for stage in self.stages)


class Pipeline:
    """One build file over one open store."""

    def __init__(self, build_file: BuildFile, store: ArtifactStore, console: Console) -> None:
        self._file = build_file
        self._store = store
        self._console = console
        self._source = quantize.open_checkpoint(build_file.model)
        self._is_checked = False
        self._stages: list[Artifact] = []

    def run(self) -> PipelineResult:
        """Bring every stage up to date. Raises PlansmithError; what was finished before stays in the store."""
        checkpoint = self._quantized()
        engine = self._engine(checkpoint.payload, {"checkpoint": checkpoint.key})
        repository = self._repository(engine, checkpoint)
        cannot_run = self._why_not_run(engine)
        is_verify_skipped = self._is_verify_asked and cannot_run is not None
        if is_verify_skipped:
            self._console.warning(f"verify is skipped, so its limits are not held to: the engine {cannot_run}")
        report = self._verified(engine, checkpoint) if cannot_run is None else None
        return PipelineResult(tuple(self._stages), repository.payload, report, cannot_run, is_verify_skipped)

    def _quantized(self) -> Artifact:
        section = self._file.quantize
        recipe = quantize.load_recipe(section.recipe)
        tools = calibration_tools(recipe, section.calibration, self._console)
        depends_on = quantize_dependencies(recipe, section.calibration, self._source_hashes())
        state = self._store.resume_state("quantize", depends_on)
        resume = quantize.Resume(state, self._store.key(depends_on), self._console.resuming)
        with self._console.progress("quantize") as progress:
            return self._stage(
                "quantize",
                depends_on,
                lambda output: quantize.quantize_checkpoint(
                    self._file.model, output, recipe, progress=progress, calibration_tools=tools, resume=resume
                ),
            )

    def _engine(self, checkpoint: Path, source: dict[str, Any], stage: str = "build") -> Artifact:
        options = self._file.build
        depends_on = {
            **source,
            **builder.build_identity(options),
            "code": code_fingerprint("builder", "quantize"),
            "libraries": library_versions("numpy", "ml_dtypes"),
        }
        shares_plans = TARGETS[options.target].is_gpu and options.resolved_weights == "external"
        if shares_plans:
            depends_on["layout"] = fingerprint(builder.plan_layout(quantize.open_checkpoint(checkpoint)))

        def produce(output: Path) -> None:
            builder.build_engine(
                checkpoint,
                output,
                options,
                plansmith_version=__version__,
                progress=progress,
                plans=self._plans_alike(stage, depends_on) if shares_plans else None,
                resume_state=self._store.resume_state(stage, depends_on),
            )

        with self._console.progress(stage) as progress:
            return self._stage(stage, depends_on, produce)

    def _plans_alike(self, stage: str, depends_on: dict[str, Any]) -> Path | None:
        """An engine whose plans were compiled for the same shape, so that only weights are to be written."""
        found = self._store.find_alike(stage, depends_on, but_for="checkpoint")
        if found is None:
            return None
        self._console.info(f"{stage}: the plans of {found.path.name} are taken; nothing is compiled")
        return found.payload

    def _repository(self, engine: Artifact, checkpoint: Artifact) -> Artifact:
        options = self._file.package
        depends_on = {
            "engine": engine.key,
            "checkpoint": checkpoint.key,
            "options": options.model_dump(mode="json"),
            "code": code_fingerprint("triton_repo"),
            "plansmith": __version__,
        }
        return self._stage(
            "package",
            depends_on,
            lambda output: triton_repo.write_repository(
                engine.payload, checkpoint.payload, output, options, plansmith_version=__version__
            ),
        )

    def _why_not_run(self, engine: Artifact) -> str | None:
        if not TARGETS[self._file.build.target].is_gpu:
            return None
        return why_not_run(builder.read_manifest(engine.payload))

    @property
    def _is_verify_asked(self) -> bool:
        return self._file.verify.perplexity is not None or self._file.verify.choices is not None

    def _verified(self, engine: Artifact, checkpoint: Artifact) -> dict[str, Any] | None:
        if not self._is_verify_asked:
            return None
        baseline = self._engine(self._file.model, {"source": self._source_hashes()}, stage="baseline")
        verified = self._stage(
            "verify",
            {
                "engine": engine.key,
                "baseline": baseline.key,
                **self._measured_on(),
                "code": code_fingerprint("plansmith", "builder"),
            },
            lambda output: self._write_report(output, engine, baseline, checkpoint),
        )
        report: dict[str, Any] = json.loads((verified.payload / "report.json").read_text())
        return report

    def _measured_on(self) -> dict[str, Any]:
        """What the verify section measures; its limits are held against the report, made anew or not."""
        section, hashes = self._file.verify, self._store.file_hashes
        measured: dict[str, Any] = {}
        if section.perplexity is not None:
            measured["text"] = hashes.hash(section.perplexity.text)
            measured["check"] = section.perplexity.model_dump(mode="json", exclude={"text", "max_increase"})
        if section.choices is not None:
            measured["choices"] = [hashes.hash(section.choices.questions), hashes.hash(section.choices.labels)]
        return measured

    def _write_report(self, output: Path, engine: Artifact, baseline: Artifact, checkpoint: Artifact) -> None:
        inputs = read_inputs(self._file.verify, load_tokenizer(self._source))
        ours, theirs = look_at(engine.payload), look_at(baseline.payload)
        options = self._file.build
        with (
            loaded(ours, options, reference=False, console=self._console) as (quantized, _),
            loaded(theirs, options, reference=False, console=self._console) as (unquantized, _),
            self._console.progress("verify") as progress,
        ):
            report = measure(quantized, unquantized, inputs, self._file.verify, progress)
        if "perplexity" in report:
            report["perplexity"]["unquantized_weights"] = self._source.origin
        weights = quantize.checkpoint_weights(quantize.open_checkpoint(checkpoint.payload))
        recipe = quantize.load_recipe(self._file.quantize.recipe).name
        precision = options.resolved_dtype if TARGETS[options.target].is_gpu else options.precision
        compiled = f"compiled for {options.target}, {precision}"
        report = {
            "engine": f"{self._file.model.name}: recipe {recipe}, {compiled}",
            "against": f"{self._file.model.name}: {self._source.origin}, {compiled}",
            **report,
            **describe_weights(weights),
        }
        (output / "report.json").write_text(json.dumps(report, indent=2))
        write_page(output / "report.html", report)

    def _check_source(self) -> None:
        """Once, and only where there is work to do."""
        if not self._is_checked:
            check_source(self._source, self._file)
            self._is_checked = True

    def _source_hashes(self) -> dict[str, str]:
        return self._store.file_hashes.hash_all(self._source.source_files())

    def _stage(self, stage: str, depends_on: dict[str, Any], produce: Producer) -> Artifact:
        def produce_checked(output: Path) -> None:
            self._check_source()
            produce(output)

        artifact = self._store.make(stage, depends_on, produce_checked)
        state = "up to date" if artifact.reused else f"done in {artifact.seconds:.1f} s"
        self._console.info(f"{stage:<9} {state}, {human_bytes(artifact.num_bytes)}")
        self._stages.append(artifact)
        return artifact

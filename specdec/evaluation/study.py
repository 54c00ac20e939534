"""A study: a prompt set decoded plainly and speculatively, interleaved, and what is known afterwards."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from specdec.core import SamplingParams
from specdec.data import TokenizedPrompt, load_prompts, render_prompts
from specdec.drafters.registry import DRAFTERS, TREES
from specdec.engine.engine import Engine
from specdec.engine.metrics import SpeculationStats
from specdec.evaluation.config import StudyConfig
from specdec.evaluation.equality import Comparison, compare
from specdec.evaluation.folder import (
    CONFIG,
    FAILURE,
    METRICS,
    claimed,
    finished_metrics,
    write_json,
    write_text,
)
from specdec.evaluation.metrics import Metrics, equality_metrics, measure
from specdec.evaluation.plots import write_plots
from specdec.evaluation.provenance import provenance
from specdec.evaluation.report import write_report
from specdec.evaluation.statistics import Bootstrap
from specdec.evaluation.trace import TraceWriter, write_steps
from specdec.evaluation.tracking import tracked
from specdec.evaluation.variant import RequestRecord, Variant
from specdec.models import TargetModel, load_target, load_tokenizer
from specdec.verifiers.registry import VERIFIERS

log = logging.getLogger(__name__)


def run_study(config: StudyConfig, folder: Path, *, progress: bool | None = None) -> Metrics:
    """Runs a study and writes its folder; a finished one is read instead.

    Args:
        config: what to measure.
        folder: where results go; created if missing.
        progress: show a bar; None shows it on a terminal.

    Returns:
        The content of `metrics.json`.

    Raises:
        ValueError: the configuration can't be run; the message says why and what to do.
    """
    text = OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
    with claimed(folder):
        finished = finished_metrics(folder, text)
        if finished is not None:
            log.info("%s is finished already", folder)
            return finished
        (folder / FAILURE).unlink(missing_ok=True)
        write_text(folder / CONFIG, text)
        try:
            with tracked(config, folder) as tracker:
                metrics = _Study(config, folder, progress).run()
                tracker.log(metrics)
        except BaseException as error:
            write_json(folder / FAILURE, {"error": f"{type(error).__name__}: {error}"})
            raise
        # Last, so that a folder with metrics has everything else.
        write_json(folder / METRICS, metrics)
        return metrics


class _Study:
    def __init__(self, config: StudyConfig, folder: Path, progress: bool | None) -> None:
        self.config = config
        self.folder = folder
        self.progress = progress

    def run(self) -> Metrics:
        _check_names(self.config)
        prompts = load_prompts(self.config.data)
        target, tokenizer = load(self.config)
        rendered = render_prompts(prompts, tokenizer, self.config.data.chat)
        write_json(self.folder / "provenance.json", provenance(self.config, target))
        variants = self._variants(target)
        self._decode(rendered, variants)
        plain, *others = variants
        speculative = others[0] if others else None
        for variant in variants:
            self._check_served(variant)
        comparisons = self._compare(plain, speculative) if speculative else None
        metrics = {
            "run": self._describe(target, speculative, len(rendered)),
            **measure(plain, speculative, self._bootstrap(plain)),
        }
        if speculative:
            expected = self._equality_expected(plain, speculative)
            metrics["equality"] = equality_metrics(comparisons if expected else None)
        write_steps(self.folder / "steps.parquet", variants)
        write_requests(self.folder / "requests.jsonl", variants, comparisons, tokenizer)
        write_plots(self.folder, metrics, [plain, *others])
        write_report(self.folder, metrics)
        return metrics

    def _variants(self, target: TargetModel) -> list[Variant]:
        # One copy of the weights serves both; each variant has its own pool.
        sizes = self.config.engine
        variants = [Variant("plain", Engine(target, sizes))]
        if self.config.speculative is not None:
            variants.append(Variant("speculative", Engine(target, sizes, self.config.speculative)))
        return variants

    def _decode(self, prompts: Sequence[TokenizedPrompt], variants: list[Variant]) -> None:
        """Batch by batch, the variants in alternating order, so that a drifting machine favours neither."""
        measurement = self.config.measurement
        batches = list(_batches(prompts, measurement.batch_size))
        if measurement.warmup_tokens:
            for variant in variants:
                variant.warm_up(batches[0], self.config.sampling, measurement.warmup_tokens)
        with self._tracing(variants[-1]), self._bar(len(prompts)) as bar:
            for index, batch in enumerate(batches):
                params = self._params(index * measurement.batch_size, len(batch))
                for variant in variants if index % 2 == 0 else reversed(variants):
                    variant.run(batch, params)
                bar.set_postfix_str(_rates(variants[-1]))
                bar.update(len(batch))

    def _params(self, first: int, count: int) -> list[SamplingParams]:
        """Each prompt has a seed of its own, the same in both variants."""
        sampling = self.config.sampling
        return [replace(sampling, seed=(sampling.seed or 0) + first + index) for index in range(count)]

    def _tracing(self, variant: Variant) -> AbstractContextManager[Any]:
        if not self.config.measurement.trace or variant.engine.speculation is None:
            return nullcontext()
        return TraceWriter(self.folder / "trace.parquet", variant)

    def _bar(self, total: int) -> tqdm:
        disable = None if self.progress is None else not self.progress
        return tqdm(total=total, unit="prompt", desc=self.config.label, disable=disable, leave=False)

    def _check_served(self, variant: Variant) -> None:
        requests = [request for batch in variant.batches for request in batch.requests]
        errors = [request.error for request in requests if request.error]
        if len(errors) == len(requests):
            raise ValueError(f"none of the {len(requests)} prompts could be served; the first: {errors[0]}")
        for request in requests:
            if request.error:
                log.warning("%s: prompt %s failed: %s", variant.name, request.prompt.id, request.error)

    def _compare(self, plain: Variant, speculative: Variant) -> list[Comparison]:
        judge = plain.engine if self.config.sampling.is_greedy else None
        pairs = zip(_requests(plain), _requests(speculative), strict=True)
        return [compare(first, second, judge, self.config.sampling) for first, second in pairs]

    def _equality_expected(self, plain: Variant, speculative: Variant) -> bool:
        verifier, baseline = (variant.engine.step_runner.verifier for variant in (speculative, plain))
        if verifier.lossy:
            return False
        # A rule that reproduces plain decoding does so where plain decoding draws in the same way.
        return self.config.sampling.is_greedy or (verifier.reproduces and type(verifier) is type(baseline))

    def _bootstrap(self, plain: Variant) -> Bootstrap:
        measurement = self.config.measurement
        return Bootstrap(
            len(plain.batches),
            resamples=measurement.resamples,
            confidence=measurement.confidence,
            seed=measurement.seed,
        )

    def _describe(self, target: TargetModel, speculative: Variant | None, num_prompts: int) -> Metrics:
        config, names = self.config, self.config.speculative
        lossy = False
        if speculative is not None and speculative.engine.speculation is not None:
            lossy = speculative.engine.speculation.verifier.lossy
        return {
            "label": config.label,
            "target": config.target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "drafter": names.drafter if names else None,
            "tree": names.tree if names else None,
            "verifier": names.verifier if names else None,
            "lossy": lossy,
            "data": config.data.name,
            "num_prompts": num_prompts,
            "batch_size": config.measurement.batch_size,
            "temperature": config.sampling.temperature,
            "confidence": config.measurement.confidence,
        }


def load(config: StudyConfig) -> tuple[TargetModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer.

    Raises:
        ValueError: there is no such target, or it can't be served.
    """
    target = config.target
    hub: dict[str, Any] = {
        "revision": target.revision,
        "trust_remote_code": target.trust_remote_code,
        "local_files_only": target.local_files_only,
    }
    try:
        model = load_target(target.name, dtype=target.dtype, device=target.device, fuse=target.fuse, **hub)
        tokenizer = load_tokenizer(target.name, **hub)
    except OSError as error:
        # Messages of transformers don't always name what was asked for.
        raise ValueError(f"target={target.name!r} cannot be loaded: {error}") from error
    return model, tokenizer


def write_requests(
    path: Path, variants: Sequence[Variant], comparisons: Sequence[Comparison] | None, tokenizer: Any
) -> None:
    """Writes one line a prompt, with what every variant made of it."""
    lines = []
    for index, records in enumerate(zip(*(_requests(variant) for variant in variants), strict=True)):
        line: dict[str, Any] = {
            "id": records[0].prompt.id,
            "num_prompt_tokens": len(records[0].prompt.token_ids),
        }
        for variant, record in zip(variants, records, strict=True):
            line[variant.name] = _request_row(record, tokenizer)
        if comparisons is not None:
            line["comparison"] = {**asdict(comparisons[index]), "verdict": comparisons[index].verdict.value}
        lines.append(json.dumps(line, ensure_ascii=False, allow_nan=False))
    write_text(path, "\n".join(lines) + "\n")


def _request_row(record: RequestRecord, tokenizer: Any) -> dict[str, Any]:
    stats = record.stats
    return {
        "text": tokenizer.decode(record.token_ids, skip_special_tokens=True),
        "token_ids": record.token_ids,
        "finish_reason": record.finish_reason.value,
        "error": record.error,
        "seconds": record.seconds,
        "ttft": record.ttft,
        "num_steps": stats.num_steps,
        "num_emitted": stats.num_emitted,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
    }


def _check_names(config: StudyConfig) -> None:
    """Refuses unknown names before a model is loaded."""
    if config.speculative is not None:
        DRAFTERS.get(config.speculative.drafter)
        TREES.get(config.speculative.tree)
        VERIFIERS.get(config.speculative.verifier)


def _batches(prompts: Sequence[TokenizedPrompt], size: int) -> Iterator[Sequence[TokenizedPrompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def _requests(variant: Variant) -> list[RequestRecord]:
    return [request for batch in variant.batches for request in batch.requests]


def _rates(variant: Variant) -> str:
    seconds = sum(batch.seconds for batch in variant.batches)
    tokens = sum(batch.num_tokens for batch in variant.batches)
    length = SpeculationStats.merge([batch.stats for batch in variant.batches]).acceptance_length
    rate = f"{tokens / seconds:.1f} tok/s" if seconds else ""
    return rate if length is None else f"{rate}, τ {length:.2f}"

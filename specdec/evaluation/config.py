"""What a study measures: frozen dataclasses; Hydra only composes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specdec.core import SamplingParams
from specdec.data import DataConfig
from specdec.engine.config import EngineConfig, SpeculativeConfig


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Which target, and how it is loaded; see `load_target`."""

    name: str = "smollm2-135m"
    """Packaged name, hub id, local folder or GGUF file."""
    dtype: str | None = None
    device: str | None = None
    fuse: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    local_files_only: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasurementConfig:
    """How a study measures."""

    batch_size: int = 1
    """Prompts decoded together; a batch is also the unit of the bootstrap."""
    warmup_tokens: int = 16
    """Tokens each variant decodes before anything is measured; 0 skips the warm-up."""
    resamples: int = 10_000
    """Bootstrap resamples of each interval."""
    confidence: float = 0.95
    seed: int = 0
    """Seed of the bootstrap."""
    trace: bool = True
    """Write `trace.parquet`, one row a drafted node."""

    def __post_init__(self) -> None:
        _check("batch_size", self.batch_size, self.batch_size >= 1, ">= 1")
        _check("warmup_tokens", self.warmup_tokens, self.warmup_tokens >= 0, ">= 0")
        _check("resamples", self.resamples, self.resamples >= 100, ">= 100")
        _check("confidence", self.confidence, 0 < self.confidence < 1, "in (0, 1)")
        _check("seed", self.seed, self.seed >= 0, ">= 0")


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Where a study is logged besides its folder."""

    name: Literal["wandb", "none"] = "none"
    mode: str = "offline"
    """`offline` needs no account; `online` and `disabled` as in W&B."""
    project: str = "specdec"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check("name", self.name, self.name in ("wandb", "none"), "wandb or none")
        _check(
            "mode", self.mode, self.mode in ("offline", "online", "disabled"), "offline, online or disabled"
        )


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """A target with one way to speculate, on a prompt set, against plain decoding."""

    target: TargetConfig = field(default_factory=TargetConfig)
    speculative: SpeculativeConfig | None = None
    """None measures plain decoding alone."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0, seed=0))
    """`seed` is the seed of the first prompt; the i-th one gets `seed + i`."""
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    measurement: MeasurementConfig = field(default_factory=MeasurementConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    def __post_init__(self) -> None:
        if self.engine.max_num_seqs < self.measurement.batch_size:
            raise ValueError(
                f"eval.batch_size={self.measurement.batch_size}: the engine decodes at most "
                f"engine.max_num_seqs={self.engine.max_num_seqs} requests together; raise it"
            )

    @property
    def label(self) -> str:
        """Short name, such as `ngram-chain-token-humaneval`."""
        if self.speculative is None:
            return f"plain-{self.data.name}"
        parts = (self.speculative.drafter, self.speculative.tree, self.speculative.verifier, self.data.name)
        return "-".join(part.rpartition(":")[2] for part in parts)


def _check(name: str, value: object, valid: bool, expectation: str) -> None:
    if not valid:
        raise ValueError(f"{name}={value!r}: expected {name} {expectation}")

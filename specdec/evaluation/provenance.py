"""Where a result comes from: code, versions, machine, seeds."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from specdec.evaluation.config import StudyConfig
from specdec.kernels.backend import describe_backend
from specdec.models.target import TargetModel

_PACKAGES = ("specdec-lab", "torch", "triton", "transformers", "tokenizers", "hydra-core", "wandb", "numpy")


def provenance(config: StudyConfig, model: TargetModel) -> dict[str, Any]:
    """Everything that is needed to say which code and machine made a result."""
    return {
        **environment(model),
        "seeds": {
            "sampling": config.sampling.seed,
            "engine": config.engine.seed,
            "data": config.data.seed,
            "bootstrap": config.measurement.seed,
        },
    }


def environment(model: TargetModel) -> dict[str, Any]:
    """Which code runs, on which machine, with which model."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git": _git_state(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "device": str(model.device),
        "device_name": torch.cuda.get_device_name(model.device)
        if model.device.type == "cuda"
        else _cpu_name(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": repr(model),
        "kernels": describe_backend(),
    }


def _git_state(folder: Path) -> dict[str, str | None] | None:
    """Commit, and a hash of what differs from it; None outside a checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    difference = (_git(folder, "diff", "HEAD") or "") + (_git(folder, "status", "--porcelain") or "")
    digest = hashlib.sha256(difference.encode()).hexdigest()[:16] if difference else None
    return {"commit": commit, "diff_hash": digest}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, errors="replace")
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

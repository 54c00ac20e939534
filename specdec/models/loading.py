"""Loads targets and their tokenizers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdec.models import sources, support
from specdec.models.target import TargetModel

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def load_target(
    name_or_path: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    fuse: bool = True,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
) -> TargetModel:
    """Loads a causal LM that runs on paged K/V.

    Args:
        name_or_path: packaged name (`smollm2-135m`), path of a `.gguf` file, local folder, or hub id.
        dtype: of weights and K/V. None or "auto": bfloat16 where the device computes in it, else float32.
        device: None or "auto": the GPU if there is one.
        fuse: see `TargetModel`.
        revision: of a hub repository.
        trust_remote_code: allow modelling code from the repository.
        local_files_only: never contact the hub.

    Raises:
        ValueError: nothing of that name exists, or the architecture cannot run on paged K/V.
        OSError: the hub cannot be reached or has no such repository (from transformers).
    """
    source = sources.resolve(name_or_path)
    hub: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": local_files_only,
    }
    chosen_device = resolve_device(device)
    chosen_dtype = resolve_dtype(dtype, chosen_device)
    config = AutoConfig.from_pretrained(source, **hub)
    support.check_config(config, name_or_path)
    model = AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=chosen_dtype, device_map={"": chosen_device}, **hub
    )
    return TargetModel(model.eval(), name=name_or_path, eos_token_ids=eos_token_ids(model), fuse=fuse)


def load_tokenizer(
    name_or_path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of the same source as `load_target`.

    Raises:
        ValueError: nothing of that name exists.
        OSError: the hub cannot be reached or has no such repository (from transformers).
    """
    return AutoTokenizer.from_pretrained(
        sources.resolve(name_or_path),
        revision=revision,
        trust_remote_code=trust_remote_code,
        local_files_only=local_files_only,
    )


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device of that name; None or "auto" picks the GPU if there is one.

    Raises:
        ValueError: a GPU was asked for and there is none.
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={str(device)!r}: torch finds no GPU; use device=cpu, or a CUDA build of torch"
        )
    return chosen


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The type of that name; None or "auto" picks bfloat16 where the device computes in it, else float32.

    Raises:
        ValueError: no such type.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None or dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_computes_bfloat16() else torch.float32
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}, expected auto or one of {', '.join(sorted(_DTYPES))}")
    return _DTYPES[dtype]


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end a generation: those of the generation configuration, then the model configuration's."""
    ids: list[int] = []
    for config in (model.generation_config, model.config):
        eos = getattr(config, "eos_token_id", None)
        ids += [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return tuple(dict.fromkeys(ids))


def _cpu_computes_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))

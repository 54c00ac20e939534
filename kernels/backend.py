"""Which implementation of the kernels runs: the one place that decides.

Every op has three implementations with one signature: `reference` (slow and obvious), `torch` (vectorised
PyTorch, any device and dtype) and `cpp` (compiled on first use, CPU, float32 and bfloat16). The fastest that
supports the tensors is used; the environment variable `SPECDEC_KERNELS` or `use_backend` pins one for
debugging and measurements.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from specdec.kernels import build

Backend = Literal["reference", "torch", "cpp"]

CPP_DTYPES = frozenset((torch.float32, torch.bfloat16))


def _from_environment() -> Backend | None:
    name = os.environ.get("SPECDEC_KERNELS")
    return _validated(name) if name else None


def _validated(name: str) -> Backend:
    if name not in get_args(Backend):
        known = ", ".join(get_args(Backend))
        raise ValueError(
            f"SPECDEC_KERNELS is {name!r}, expected one of {known}; unset it to choose automatically."
        )
    return cast(Backend, name)


_pinned: Backend | None = _from_environment()


def backend_for(tensor: Tensor) -> Backend:
    """The implementation that serves ops on tensors like this one.

    Raises:
        ValueError: `cpp` is pinned, and the device or dtype has no compiled kernel.
        RuntimeError: `cpp` is pinned, and the kernels could not be compiled.
    """
    if _pinned is not None:
        return _pinned if _pinned != "cpp" else _require_cpp(tensor)
    return "cpp" if tensor.is_cpu and tensor.dtype in CPP_DTYPES and build.library() is not None else "torch"


def _require_cpp(tensor: Tensor) -> Backend:
    if not tensor.is_cpu or tensor.dtype not in CPP_DTYPES:
        raise ValueError(
            f"SPECDEC_KERNELS=cpp serves float32 and bfloat16 on the CPU, got {tensor.dtype} on "
            f"{tensor.device}; unset it or use SPECDEC_KERNELS=torch."
        )
    build.require_library()
    return "cpp"


@contextmanager
def use_backend(name: Backend | None) -> Iterator[None]:
    """Pin an implementation inside a `with` block; None chooses automatically."""
    global _pinned
    previous = _pinned
    _pinned = _validated(name) if name is not None else None
    try:
        yield
    finally:
        _pinned = previous


def describe_backend() -> str:
    """What CPU tensors run on, for reports: `"cpp (g++ 12.2, avx512)"`, `"torch"` or `"reference"`."""
    name = backend_for(torch.empty(0))
    return f"cpp ({build.describe_toolchain()})" if name == "cpp" else name

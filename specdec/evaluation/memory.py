"""Peak memory of a piece of tensor code, counted by storages: the same on every device, and no sampling."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _PeakMode(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in given:
                self._track(leaf.untyped_storage())
        return result

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._known.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def peak_bytes(run: Callable[[], Any]) -> int:
    """Bytes of the tensors that `run` makes, at the moment it holds most of them."""
    with _PeakMode() as mode:
        run()
    return mode.peak

"""Weight matrices rounded to 8 or 4 bits, and products with them.

A value becomes `code * scale + zero`, with one scale and zero for a group of neighbouring columns of a row:

    8 bits    one group a row, codes -127 to 127, zero = 0: the largest magnitude sets the scale
    4 bits    groups of 32, 64 or 128 columns, codes -8 to 7: least and greatest value set scale and zero

Where torch has weight-only kernels (a CPU; float32, bfloat16, float16), products read the packed codes, a half or
a quarter of the bytes of bfloat16, and a product of few rows is as much faster. Elsewhere the rounded values are
kept in the dtype of the weights: the same model up to rounding, neither smaller nor faster.
Source: round-to-nearest weight-only quantisation, the baseline of GPTQ (arXiv:2210.17323) and AWQ
(arXiv:2306.00978); int8 per row as in LLM.int8() (arXiv:2208.07339), without its outliers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_GROUP_SIZES = (32, 64, 128)
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Above this many rows of x, an ordinary product on dequantised codes is faster than the 8-bit kernel (measured).
_MAX_INT8_ROWS = 24


@dataclass(frozen=True)
class Rounding:
    """How weights are rounded.

    Args:
        bits: 8 or 4.
        group_size: columns that share a scale: 32, 64 or 128 at 4 bits, where None means 32. At 8 bits whole rows
            do, and None is the only choice.

    Raises:
        ValueError: another value.
    """

    bits: int = 4
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits!r}, expected 4 or 8")
        if self.bits == 8 and self.group_size is not None:
            raise ValueError(
                f"group_size={self.group_size!r} with bits=8: 8 bits are rounded by whole rows; leave group_size "
                "out (null), or set bits=4"
            )
        if self.group_size is not None and self.group_size not in _GROUP_SIZES:
            raise ValueError(f"group_size={self.group_size!r}, expected 32, 64, 128 or null (32)")

    def round(self, weight: Tensor) -> RoundedWeight:
        """The nearest weight that the codes can express. `weight`: `[N, K]`, any float dtype."""
        return _round_rows(weight) if self.bits == 8 else _round_groups(weight, self.group_size or 32)

    def __call__(self, weight: Weight) -> Weight:
        """Rounds, and packs where a kernel multiplies with the codes."""
        assert isinstance(weight, Tensor), "the weight is packed already"
        rounded = self.round(weight)
        if not has_kernels(weight.device, weight.dtype):
            return rounded.dequantise()
        return Int8Weight(rounded) if self.bits == 8 else Int4Weight(rounded)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products read the packed codes."""
    return device.type == "cpu" and dtype in _KERNEL_DTYPES


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundedWeight:
    """A matrix `[N, K]` as codes in G groups a row; the last group may be short."""

    codes: Tensor
    """`[N, K]` int8."""
    scale: Tensor
    """`[N, G]` in the dtype of the weights; 0 where a group's values are all the same."""
    zero: Tensor
    """`[N, G]` in the dtype of the weights."""
    group_size: int

    def dequantise(self) -> Tensor:
        """`[N, K]` in the dtype of the weights."""
        num_columns = self.codes.shape[1]
        scale, zero = (
            grouped.float().repeat_interleave(self.group_size, 1)[:, :num_columns]
            for grouped in (self.scale, self.zero)
        )
        return torch.addcmul(zero, self.codes.float(), scale).to(self.scale.dtype)


class PackedWeight(ABC):
    """A rounded matrix `[N, K]` in the layout of a kernel, padded to whole tiles of it.

    Args:
        rounded: the matrix.
        row_tile: the kernel wants a multiple of this many rows.
        column_tile: and of this many columns.
    """

    def __init__(self, rounded: RoundedWeight, row_tile: int, column_tile: int) -> None:
        self.shape = rounded.codes.shape
        self._missing_rows = -self.shape[0] % row_tile
        self._missing_columns = -self.shape[1] % column_tile

    def multiply(self, x: Tensor) -> Tensor:
        """`[M, K]` to `[M, N]`, both in the dtype of the weights."""
        if self._missing_columns:
            x = F.pad(x, (0, self._missing_columns))
        product = self._product(x.contiguous())
        return product[:, : self.shape[0]].contiguous() if self._missing_rows else product

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """The same with padded columns and rows."""

    def _padded(self, rows: Tensor) -> Tensor:
        """`[N, K]` with the missing rows and columns."""
        return F.pad(rows, (0, self._missing_columns, 0, self._missing_rows))


class Int8Weight(PackedWeight):
    """8 bits, one scale a row."""

    def __init__(self, rounded: RoundedWeight) -> None:
        # Other numbers of columns are not refused, but their end is read from beyond the row.
        super().__init__(rounded, row_tile=1, column_tile=32)
        self._codes = self._padded(rounded.codes)
        self._scale = rounded.scale.squeeze(1)  # [N]

    def _product(self, x: Tensor) -> Tensor:
        if len(x) > _MAX_INT8_ROWS:
            return F.linear(x, self._codes.to(x.dtype) * self._scale.unsqueeze(1))
        return torch._weight_int8pack_mm(x, self._codes, self._scale)


class Int4Weight(PackedWeight):
    """4 bits, one scale and zero a group."""

    def __init__(self, rounded: RoundedWeight) -> None:
        super().__init__(rounded, row_tile=16, column_tile=rounded.group_size)
        self._group_size = rounded.group_size
        # The kernel's codes are 0 to 15, from which it subtracts 8.
        self._codes = torch._convert_weight_to_int4pack_for_cpu(self._padded(rounded.codes).int() + 8, 1)
        scale_and_zero = torch.stack((rounded.scale, rounded.zero), -1)  # [N, G, 2]
        padded = F.pad(scale_and_zero, (0, 0, 0, 0, 0, self._missing_rows))
        self._scale_and_zero = padded.transpose(0, 1).contiguous()  # [G, N, 2]

    def _product(self, x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, self._codes, self._group_size, self._scale_and_zero)


Weight = Tensor | PackedWeight
"""A matrix `[N, K]`, as it is or packed."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, as `torch.nn.functional.linear`: `[M, K]` to `[M, N]`."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    product = weight.multiply(x)
    return product if bias is None else product.add_(bias)


class QuantisedLinear(nn.Module):
    """A linear layer on a rounded matrix, for use in place of `nn.Linear`."""

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def _round_rows(weight: Tensor) -> RoundedWeight:
    values = weight.float()
    scale = (values.abs().amax(1, keepdim=True) / 127).to(weight.dtype)  # [N, 1]
    codes = (values / _divisor(scale)).round_().clamp_(-127, 127).to(torch.int8)
    return RoundedWeight(codes=codes, scale=scale, zero=torch.zeros_like(scale), group_size=weight.shape[1])


def _round_groups(weight: Tensor, group_size: int) -> RoundedWeight:
    num_columns = weight.shape[1]
    # The edge is repeated to fill the last group, whose least and greatest value it leaves as they are.
    padded = F.pad(weight.float(), (0, -num_columns % group_size), mode="replicate")
    groups = padded.unflatten(1, (-1, group_size))  # [N, G, group_size]
    least, greatest = groups.aminmax(dim=2)
    # Codes are found with scale and zero as the kernels will read them, rounded to the dtype of the weights.
    scale = ((greatest - least) / 15).to(weight.dtype)  # [N, G]
    zero = (least + 8 * scale.float()).to(weight.dtype)
    codes = (groups - zero.float().unsqueeze(2)) / _divisor(scale).unsqueeze(2)
    codes = codes.round_().clamp_(-8, 7).to(torch.int8).flatten(1)[:, :num_columns]
    return RoundedWeight(codes=codes, scale=scale, zero=zero, group_size=group_size)


def _divisor(scale: Tensor) -> Tensor:
    return scale.float().masked_fill(scale == 0, 1.0)

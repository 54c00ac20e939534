"""Attention of packed queries, committed tokens and tree nodes alike, over a paged KV cache."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.backend import backend_for
from specdec.kernels.tree_attention import native, reference, vectorised
from specdec.kernels.tree_attention.metadata import AttentionMetadata

_IMPLEMENTATIONS = {
    "reference": reference.tree_attention,
    "torch": vectorised.tree_attention,
    "cpp": native.tree_attention,
}


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attend every packed query to the slots that `meta` shows it. Inference only: no gradients.

    Grouped-query attention is implied by the shapes: query head h reads key head `h // (Hq // Hkv)`. Slots
    that no query sees are never used, whatever they hold.

    Args:
        q: `[N, Hq, D]` queries in the order of `meta.query_offsets`, position-encoded.
        k_cache: `[num_blocks, block_size, Hkv, D]` keys of this layer, same dtype as `q`.
        v_cache: `[num_blocks, block_size, Hkv, D]` values of this layer.
        meta: what each query may see.
        scale: factor on the scores, usually `D ** -0.5`.
        window: number of positions a query sees, its own included; None sees all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.

    Returns:
        `[N, Hq, D]` contiguous, dtype of `q`. Rows past the last request (padding) are zero.

    Raises:
        ValueError: shapes, dtypes or layouts that do not fit together.
    """
    return _IMPLEMENTATIONS[backend_for(q)](
        q, k_cache, v_cache, meta, scale=scale, window=window, soft_cap=soft_cap
    )

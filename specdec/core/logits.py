"""Logits before temperature and filters: masks and bias, then penalties, in vLLM's order.

A row follows a node of a tree: its history is what the request has committed and the drafted tokens on the path
to the node, exactly what plain decoding would have seen there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdec.core.sampling_batch import SamplingBatch

_IMPOSSIBLE = float("-inf")


def change_logits(
    logits: Tensor, sampling: SamplingBatch, requests: Tensor, paths: Tensor | None = None
) -> Tensor:
    """Applies each request's masks, bias and penalties to its rows; other rows keep their values.

    Args:
        logits: `[n, V]`, any float dtype; not modified.
        sampling: parameters of the batch, with the histories that they need.
        requests: `[n]` int64, the request each row belongs to.
        paths: `[n, D]` int64, drafted tokens from the root (excluded) to the row's node, the node included; -1
            pads. Needed if `sampling.uses_history`.

    Returns:
        `[n, V]` float32; `logits` itself, of its own dtype, if no request changes them.

    Raises:
        ValueError: paths or a history are missing.
    """
    if not sampling.changes_logits:
        return logits
    scores = logits.to(torch.float32, copy=True)  # [n, V]
    _add_bias(scores, sampling, requests)
    if sampling.uses_history:
        if paths is None:
            raise ValueError("paths=None: penalties and min_tokens need the drafted tokens before each row")
        _forbid_ends(scores, sampling, requests, paths)
        _penalise(scores, sampling, requests, paths)
    return scores


def counts_after(sampling: SamplingBatch, own: Tensor, paths: Tensor, ids: Tensor) -> Tensor:
    """How often tokens were put out before each of m rows: committed, and drafted on the row's path.

    Args:
        sampling: the batch.
        own: `[m]` int64, index of each row's request in `sampling.penalised`.
        paths: `[m, D]` int64, -1 pads.
        ids: `[m, K]` int64, the tokens to count.

    Returns:
        `[m, K]` int32.
    """
    counts = sampling.output_counts[own.unsqueeze(1), ids]
    for level in paths.unbind(1):
        counts += ids == level.unsqueeze(1)
    return counts


def _add_bias(scores: Tensor, sampling: SamplingBatch, requests: Tensor) -> None:
    rows, own = _rows_of(sampling.biased, sampling, requests)
    if not len(rows):
        return
    params = [sampling.params[row] for row in sampling.biased]
    restricted = [line for line, one in enumerate(params) if one.allowed_token_ids is not None]
    table = torch.zeros(len(params), scores.shape[1], device=scores.device)  # [S, V]
    table[restricted] = _IMPOSSIBLE
    table[_entries([one.allowed_token_ids or () for one in params], scores.device)] = 0
    table[_entries([one.banned_token_ids for one in params], scores.device)] = _IMPOSSIBLE
    bias = [value for one in params for value in one.logit_bias.values()]
    table[_entries([one.logit_bias for one in params], scores.device)] += scores.new_tensor(bias)
    scores.index_add_(0, rows, table[own])


def _forbid_ends(scores: Tensor, sampling: SamplingBatch, requests: Tensor, paths: Tensor) -> None:
    rows, own = _rows_of(sampling.unripe, sampling, requests)
    if not len(rows):
        return
    histories = [sampling.history(row) for row in sampling.unripe]
    lacking = [
        sampling.params[row].min_tokens - history.num_output
        for row, history in zip(sampling.unripe, histories, strict=True)
    ]
    width = max(len(history.end_ids) for history in histories)
    # An id may be listed twice.
    padded = [
        list(history.end_ids) + [history.end_ids[0]] * (width - len(history.end_ids)) for history in histories
    ]
    early = (paths[rows] >= 0).sum(1) < torch.tensor(lacking, device=scores.device)[own]
    ends = torch.tensor(padded, device=scores.device)[own[early]]  # [m, E]
    scores[rows[early].unsqueeze(1), ends] = _IMPOSSIBLE


def _penalise(scores: Tensor, sampling: SamplingBatch, requests: Tensor, paths: Tensor) -> None:
    rows, own = _rows_of(sampling.penalised, sampling, requests)
    if not len(rows):
        return
    paths = paths[rows]
    # Only tokens seen before change. An id may be listed twice, a padding 0 need not be one of them: each entry
    # gets the value that is right for its id.
    ids = torch.cat((sampling.known_ids[own], paths.clamp(min=0)), dim=1)  # [m, K]
    counts = counts_after(sampling, own, paths, ids)
    known = sampling.in_prompt[own.unsqueeze(1), ids] | (counts > 0)
    repetition, presence, frequency = (
        values[requests[rows]].unsqueeze(1)
        for values in (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    )
    values = scores[rows.unsqueeze(1), ids]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(known, repeated, values) - frequency * counts - presence * (counts > 0)
    scores[rows.unsqueeze(1), ids] = values


def _rows_of(wanted: Sequence[int], sampling: SamplingBatch, requests: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of some requests, and the index of each one's request in `wanted`; both `[m]` int64."""
    index = [-1] * len(sampling.params)
    for position, row in enumerate(wanted):
        index[row] = position
    own = torch.tensor(index, device=requests.device)[requests]
    rows = (own >= 0).nonzero().squeeze(1)
    return rows, own[rows]


def _entries(ids: Sequence[Iterable[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Line and column of every id, for a table with one line a list; both `[k]` int64."""
    lines = [line for line, tokens in enumerate(ids) for _ in tokens]
    columns = [int(token) for tokens in ids for token in tokens]
    return (
        torch.tensor(lines, dtype=torch.int64, device=device),
        torch.tensor(columns, dtype=torch.int64, device=device),
    )

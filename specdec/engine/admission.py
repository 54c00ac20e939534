"""What a request's sampling parameters must fulfil on a given target."""

from __future__ import annotations

from collections.abc import Collection

from specdec.core import SamplingParams


def check_sampling(params: SamplingParams, vocab_size: int, end_ids: Collection[int]) -> None:
    """Checks parameters against the vocabulary.

    Args:
        params: of the request.
        vocab_size: ids of the target.
        end_ids: ids that end the request.

    Raises:
        ValueError: an id outside the vocabulary, more `logprobs` than ids, or nothing left to draw.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
        outside = [token for token in getattr(params, name) or () if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(f"{name} holds {outside[0]}: the target's ids are 0 to {vocab_size - 1}")
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ValueError(f"logprobs={params.logprobs}: the target has {vocab_size} ids; ask for no more")
    if params.has_bias or params.min_tokens:
        _check_something_is_left(params, vocab_size, end_ids)


def _check_something_is_left(params: SamplingParams, vocab_size: int, end_ids: Collection[int]) -> None:
    allowed = params.allowed_token_ids
    possible = set(range(vocab_size) if allowed is None else allowed) - set(params.banned_token_ids)
    if not possible:
        raise ValueError("banned_token_ids holds the whole vocabulary: leave at least one id to draw")
    if params.min_tokens and possible <= set(end_ids):
        raise ValueError(
            f"min_tokens={params.min_tokens}: every id that is allowed and not banned ends the request; allow "
            "another one, or set min_tokens=0"
        )

"""Running requests for checks: many at once, until each has the tokens that are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from specdec.core import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.request import Request


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    enough: int | None = None,
    wave: int | None = None,
) -> list[Request]:
    """Completes requests and returns them in order.

    Args:
        engine: without other work.
        prompts: token ids of each request.
        params: one for each.
        enough: ends a request once it has this many tokens, though its trees are as large as if it went on;
            its tokens are cut to that number by the caller. None lets `max_tokens` end it.
        wave: requests that are decoded together; None takes all at once.

    Raises:
        ValueError: the engine could not serve a request.
    """
    size = wave or len(prompts)
    finished: list[Request] = []
    for start in range(0, len(prompts), size):
        pairs = zip(prompts[start : start + size], params[start : start + size], strict=True)
        numbers = [engine.add_request(prompt, own) for prompt, own in pairs]
        while engine.has_work:
            for output in engine.step():
                if enough is not None and engine.request(output.request_id).num_output_tokens >= enough:
                    engine.abort(output.request_id)
        finished += [engine.pop_finished(number) for number in numbers]
    for request in finished:
        if request.error is not None:
            raise ValueError(f"a request of the check failed: {request.error}")
    return finished


def tokens_of(requests: Sequence[Request], length: int | None = None) -> list[tuple[int, ...]]:
    """Output tokens of each request, the first `length` of them."""
    return [tuple(request.output_token_ids[:length]) for request in requests]


def seeded(params: SamplingParams, seeds: Sequence[int], max_tokens: int) -> list[SamplingParams]:
    """The same parameters with other seeds, decoding `max_tokens` whatever the tokens are."""
    endless = replace(params, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=())
    return [replace(endless, seed=seed) for seed in seeds]


@contextmanager
def scarce_pages(engine: Engine, num_free: int) -> Iterator[None]:
    """Leaves only so many pages of the pool free, so that requests preempt one another."""
    taken = engine.blocks.allocate(engine.blocks.num_free - num_free)
    try:
        yield
    finally:
        engine.blocks.free(taken)

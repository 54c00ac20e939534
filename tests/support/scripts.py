"""Scripts for the scripted drafter, made from what plain decoding will say."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from specdec_tests.models import TinyLM

Entries = list[int | tuple[int, int]]


def truth(lm: TinyLM, num_tokens: int) -> Callable[[int, Sequence[int]], Entries]:
    """Always drafts the next greedy tokens."""
    return lambda request, committed: list(lm.greedy(committed, num_tokens))


def truth_of(
    continuations: Mapping[tuple[int, ...], Sequence[int]],
) -> Callable[[int, Sequence[int]], Entries]:
    """Drafts the known continuations of prompts."""

    def script(request: int, committed: Sequence[int]) -> Entries:
        for prompt, continuation in continuations.items():
            whole = [*prompt, *continuation]
            if list(committed) == whole[: len(committed)]:
                return whole[len(committed) :]
        return []

    return script


def second_branch(lm: TinyLM) -> Callable[[int, Sequence[int]], Entries]:
    """A wrong child of the root first, then the right one with its right child: K/V must move."""

    def script(request: int, committed: Sequence[int]) -> Entries:
        right, next_right = lm.greedy(committed, 2)
        return [((right + 1) % lm.target.vocab_size, 0), (right, 0), (next_right, 2)]

    return script


def half_right(
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    vocab_size: int,
    siblings: bool = False,
) -> Callable[[int, Sequence[int]], Entries]:
    """Drafts each request's known continuation with half of the tokens replaced by wrong ones.

    Requests are known by their number: the i-th added has the i-th prompt. With siblings a wrong token stands
    before each one, so that paths are not contiguous.
    """

    def script(request: int, committed: Sequence[int]) -> Entries:
        chooser = random.Random(hash(tuple(committed)))
        done = len(committed) - len(prompts[request])
        entries: Entries = []
        last = 0
        for token in continuations[request][done : done + num_tokens]:
            wrong = (token + chooser.randrange(1, vocab_size)) % vocab_size
            if siblings:
                entries.append((wrong, last))
            entries.append((chooser.choice([token, wrong]), last))
            last = len(entries)
        return entries

    return script


def mixed_tree(lm: TinyLM, num_nodes: int, right: float = 0.5) -> Callable[[int, Sequence[int]], Entries]:
    """Random trees in random order that contain part of the greedy continuation; a function of the text."""

    def script(request: int, committed: Sequence[int]) -> Entries:
        chooser = random.Random(hash(tuple(committed)))
        continuation = lm.greedy(committed, num_nodes)
        entries: Entries = []
        last, depth = 0, 0
        for _ in range(chooser.randrange(num_nodes + 1)):
            if chooser.random() < right:
                entries.append((continuation[depth], last))
                last, depth = len(entries), depth + 1
            else:
                entries.append((chooser.randrange(lm.target.vocab_size), chooser.randrange(len(entries) + 1)))
        return entries

    return script

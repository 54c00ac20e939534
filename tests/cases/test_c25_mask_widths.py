"""C25: ancestor sets wider than a machine word: every node sees prefix, ancestors and itself, whatever the size."""

from __future__ import annotations

import random

import pytest
import torch
from specdec_tests.models import tiny_lm
from specdec_tests.serving import complete, make_engine, scripted

from specdec.core import SamplingParams, TokenTree

SIZES = [1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 100]


def parents_of(shape: str, size: int) -> list[int]:
    chooser = random.Random(size)
    return [
        {"chain": node, "star": 0, "random": chooser.randrange(node + 1)}[shape] for node in range(size - 1)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", ["chain", "star", "random"])
def test_logits_of_every_node(shape: str, size: int) -> None:
    """Three trees in a batch, after prefixes of 0, 1 and 17 tokens."""
    lm = tiny_lm(max_position_embeddings=256)
    engine = make_engine(lm.target, block_size=16, num_blocks=64)
    shapes = [(shape, size), ("random", 34), ("chain", 3)]
    prefixes = [list(range(17)), [], [7]]
    entries = [
        [(1 + (7 * node) % 99, parent) for node, parent in enumerate(parents_of(*own))] for own in shapes
    ]
    positions = [len(prefix) for prefix in prefixes]
    tree = TokenTree.from_lists(torch.tensor([2, 3, 4]), entries, torch.tensor(positions))
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:27].view(3, 9).int()
    logits = engine.target.node_logits(engine.target.pack_tree(tree, positions, tables, prefixes))
    for row, prefix in enumerate(prefixes):
        start = tree.host_offsets[row]
        for path in tree.paths(row)[:12]:
            tokens = tree.tokens[[start + node for node in path]].tolist()
            plain = lm.logits([*prefix, *tokens])[len(prefix) :]
            own = logits[[start + node for node in path]]
            torch.testing.assert_close(own, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [33, 64, 65, 100])
def test_wide_trees_through_the_engine(size: int) -> None:
    """The right token is the last node: seen only if nothing was truncated."""
    lm = tiny_lm(max_position_embeddings=256)
    prompt, params = [5, 3, 8], SamplingParams(temperature=0, max_tokens=6)
    truth = lm.greedy(prompt, 7)

    def script(request_id: int, committed: list[int]) -> list[tuple[int, int]]:
        right = truth[len(committed) - len(prompt)]
        return [((right + 1 + node) % 101, 0) for node in range(size - 1)] + [(right, 0)]

    engine = make_engine(lm.target, scripted(script, max_nodes=size), num_blocks=512)
    (request,) = complete(engine, [prompt], params)
    assert request.output_token_ids == truth[:6]
    assert request.stats.num_accepted >= 2

"""C26: a node's position is the context plus its depth, so its logits are a plain forward's over its path."""

from __future__ import annotations

import pytest
import torch
from specdec_tests.models import tiny_lm
from specdec_tests.serving import make_engine

from specdec.core import TokenTree

# Parents as node indices: breadth first, depth first, and neither.
ORDERS = {
    "bfs": [0, 0, 1, 1, 2, 2],
    "dfs": [0, 1, 1, 0, 4, 4],
    "mixed": [0, 1, 0, 3, 1, 3],
    "chain": [0, 1, 2, 3, 4, 5],
    "star": [0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("order", ORDERS)
def test_logits_of_every_node(family: str, order: str) -> None:
    lm = tiny_lm(family)
    context = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    parents = ORDERS[order]
    nodes = [(20 + index, parent) for index, parent in enumerate(parents)]
    tree = TokenTree.from_lists(torch.tensor(context[-1:]), [nodes], torch.tensor([10]))
    depths = {"bfs": [0, 1, 1, 2, 2, 2, 2], "star": [0, 1, 1, 1, 1, 1, 1]}
    if order in depths:
        assert tree.positions.tolist() == [10 + depth for depth in depths[order]]
    engine = make_engine(lm.target)
    tables = torch.tensor([[5, 2, 9, 0, 7]], dtype=torch.int32)
    logits = engine.target.node_logits(engine.target.pack_tree(tree, [10], tables, [context[:-1]]))
    for path in tree.paths(0):
        plain = lm.logits(context + tree.tokens[path[1:]].tolist())[10:]
        torch.testing.assert_close(logits[path], plain, atol=1e-4, rtol=1e-4)

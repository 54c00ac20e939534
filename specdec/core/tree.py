"""`TokenTree`: a ragged batch of drafted token trees, stored flat.

Within a request parents come before children and node 0 is the root: the last committed token, whose K/V is
not in the cache yet. Plain decoding is a root-only tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from specdec.core.law import ProposalLaw


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTree:
    """The trees of B requests with N nodes in all. V is the target's vocabulary size."""

    tokens: Tensor
    """`[N]` int64."""
    parents: Tensor
    """`[N]` int64, index inside the request; -1 for a root."""
    depth: Tensor
    """`[N]` int64; 0 for a root."""
    num_nodes: Sequence[int]
    """Nodes of each request, roots included; length B, on the host."""
    root_positions: Tensor
    """`[B]` int64, sequence position of each root (committed tokens minus one)."""
    laws: Sequence[ProposalLaw]
    """How the children were chosen, for each request; length B."""
    q: Tensor | None = None
    """`[E, V]` float32, distributions that children were drawn from; only where the law needs it."""
    q_row: Tensor | None = None
    """`[N]` int64, row of `q` that the children of each node were drawn from; -1 for a leaf."""
    score: Tensor | None = None
    """`[N]` float32, log probability of the node's path under the drafter; 0 for a root."""
    draft_slots: Tensor | None = None
    """`[N]` int64, tree slot in the draft model's cache that holds the node's K/V; -1 if it has none."""

    @property
    def batch_size(self) -> int:
        return len(self.num_nodes)

    @property
    def num_drafted(self) -> list[int]:
        """Drafted tokens of each request, on the host."""
        return [count - 1 for count in self.num_nodes]

    @cached_property
    def host_offsets(self) -> list[int]:
        offsets = [0]
        for count in self.num_nodes:
            offsets.append(offsets[-1] + count)
        return offsets

    @cached_property
    def offsets(self) -> Tensor:
        """`[B + 1]` int64: request b owns the nodes `offsets[b]:offsets[b + 1]`."""
        return torch.tensor(self.host_offsets, device=self.tokens.device)

    @cached_property
    def roots(self) -> Tensor:
        """`[B]` int64, flat index of each root."""
        return self.offsets[:-1]

    @cached_property
    def request_of_node(self) -> Tensor:
        """`[N]` int64."""
        rows = [row for row, count in enumerate(self.num_nodes) for _ in range(count)]
        return torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)

    @cached_property
    def index_in_request(self) -> Tensor:
        """`[N]` int64."""
        indices = [index for count in self.num_nodes for index in range(count)]
        return torch.tensor(indices, dtype=torch.int64, device=self.tokens.device)

    @cached_property
    def flat_parents(self) -> Tensor:
        """`[N]` int64, flat index of each node's parent; -1 for a root."""
        if self.batch_size == 1:
            return self.parents
        return torch.where(self.parents < 0, -1, self.parents + self.roots[self.request_of_node])

    @cached_property
    def positions(self) -> Tensor:
        """`[N]` int64, sequence position: root position plus depth, never the flat index."""
        return self.root_positions[self.request_of_node] + self.depth

    @cached_property
    def host_depths(self) -> list[int]:
        """Levels of each request's tree, length B, on the host."""
        depth = self.depth.tolist()
        return [max(depth[start:end]) for start, end in pairwise(self.host_offsets)]

    @property
    def max_depth(self) -> int:
        return max(self.host_depths, default=0)

    @cached_property
    def host_parents(self) -> list[int]:
        return self.parents.tolist()

    @cached_property
    def ancestor_words(self) -> Tensor:
        """`[N, W]` int32, W = ceil(largest tree / 32): bit i of word w is set if node `32 * w + i` of the
        request is the node itself or one of its ancestors."""
        index = self.index_in_request
        width = -(-max(self.num_nodes) // 32)
        words = torch.zeros(len(index) + 1, width, dtype=torch.int64, device=index.device)
        words[:-1].scatter_(1, (index >> 5).unsqueeze(1), (1 << (index & 31)).unsqueeze(1))
        # Pointer doubling: after round r a node has gathered its 2**r nearest ancestors. Roots point to the
        # extra last row, which stays empty.
        pointer = torch.full((len(index) + 1,), len(index), dtype=torch.int64, device=index.device)
        pointer[:-1] = torch.where(self.flat_parents < 0, len(index), self.flat_parents)
        for _ in range(self.max_depth.bit_length()):
            words |= words[pointer]
            pointer = pointer[pointer]
        # int64 to int32 keeps the low 32 bits, bit 31 included.
        return words[:-1].to(torch.int32)

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """`[N, max_nodes]` bool, the dense form of `ancestor_words`."""
        shifts = torch.arange(32, device=self.tokens.device)
        bits = (self.ancestor_words.long().unsqueeze(-1) >> shifts) & 1  # [N, W, 32]
        return bits.flatten(1)[:, : max(self.num_nodes)].bool()

    @cached_property
    def first_child(self) -> Tensor:
        """`[N]` int64, flat index of the first child; -1 for a leaf."""
        return self._links[0]

    @cached_property
    def next_sibling(self) -> Tensor:
        """`[N]` int64, flat index of the next child of the same parent; -1 for the last."""
        return self._links[1]

    @cached_property
    def _links(self) -> tuple[Tensor, Tensor]:
        first, following = [-1] * len(self.tokens), [-1] * len(self.tokens)
        last_child: dict[int, int] = {}
        for node, parent in enumerate(self.flat_parents.tolist()):
            if parent < 0:
                continue
            if parent in last_child:
                following[last_child[parent]] = node
            else:
                first[parent] = node
            last_child[parent] = node
        device = self.tokens.device
        return torch.tensor(first, device=device), torch.tensor(following, device=device)

    @cached_property
    def num_children(self) -> Tensor:
        """`[N]` int64."""
        is_node = (self.flat_parents >= 0).long()
        return torch.zeros_like(is_node).scatter_add_(0, self.flat_parents.clamp(min=0), is_node)

    @cached_property
    def path_nodes(self) -> Tensor:
        """`[N, D]` int64, D = `max_depth`: the flat nodes from depth 1 down to each node itself; -1 pads."""
        count, width = len(self.tokens), self.max_depth
        paths = torch.full((count, width), -1, dtype=torch.int64, device=self.tokens.device)
        drafted, nodes = self.depth > 0, torch.arange(count, device=self.tokens.device)
        pointer = self.flat_parents
        paths[nodes[drafted], self.depth[drafted] - 1] = nodes[drafted]
        # Level by level a node inherits its parent's path, which is complete by then.
        for level in range(2, width + 1):
            below = nodes[self.depth == level]
            paths[below, : level - 1] = paths[pointer[below], : level - 1]
        return paths

    @cached_property
    def path_tokens(self) -> Tensor:
        """`[N, D]` int64, the tokens of `path_nodes`: what was drafted down to each node, itself included; -1
        pads."""
        nodes = self.path_nodes
        return torch.where(nodes < 0, -1, self.tokens[nodes.clamp(min=0)])

    @cached_property
    def has_drawn_children(self) -> Tensor:
        """`[N]` bool, whether a node has children that were drawn from a row of `q`."""
        if self.q_row is None:
            return torch.zeros_like(self.tokens, dtype=torch.bool)
        return (self.q_row >= 0) & (self.first_child >= 0)

    def q_of(self, nodes: Tensor) -> Tensor:
        """A copy of the distributions that the children of n nodes were drawn from, `[n, V]` float32.

        Args:
            nodes: `[n]` int64, nodes with drawn children.
        """
        assert self.q is not None, "only drawn children have a q"
        assert self.q_row is not None, "q comes with q_row"
        return self.q[self.q_row[nodes]]

    def paths(self, request: int) -> list[list[int]]:
        """Root-to-leaf paths of one request as node indices, the root included."""
        start, end = self.host_offsets[request], self.host_offsets[request + 1]
        parents = self.host_parents[start:end]
        leaves = sorted(set(range(end - start)) - set(parents))
        paths = []
        for leaf in leaves:
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            paths.append(path[::-1])
        return paths

    def validate(self) -> None:
        """Checks the structure.

        Raises:
            ValueError: names the field, the offending node and the rule it breaks.
        """
        total = sum(self.num_nodes)
        for name in ("tokens", "parents", "depth"):
            if len(getattr(self, name)) != total:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries; num_nodes sums to {total}")
        if min(self.num_nodes, default=1) < 1:
            raise ValueError(f"num_nodes={list(self.num_nodes)}: every request needs at least its root")
        for row, (start, end) in enumerate(pairwise(self.host_offsets)):
            parents, depth = self.parents[start:end].tolist(), self.depth[start:end].tolist()
            if parents[0] != -1 or depth[0] != 0:
                raise ValueError(
                    f"request {row}: node 0 must be the root (parent -1, depth 0), got {parents[0]}"
                )
            for node, parent in enumerate(parents[1:], start=1):
                if not 0 <= parent < node:
                    raise ValueError(
                        f"request {row}: parents[{node}]={parent}; parents must precede children"
                    )
                if depth[node] != depth[parent] + 1:
                    raise ValueError(
                        f"request {row}: depth[{node}]={depth[node]}, expected {depth[parent] + 1}"
                    )
        for row, law in enumerate(self.laws):
            if law.needs_q and self.num_nodes[row] > 1 and (self.q is None or self.q_row is None):
                raise ValueError(
                    f"request {row}: law {law.value} needs q and q_row, the distributions drawn from"
                )

    @staticmethod
    def root_only(tokens: Tensor, root_positions: Tensor) -> TokenTree:
        """Trees of plain decoding: one root a request. Both arguments are `[B]` int64."""
        batch_size = len(tokens)
        return TokenTree(
            tokens=tokens,
            parents=torch.full_like(tokens, -1),
            depth=torch.zeros_like(tokens),
            num_nodes=[1] * batch_size,
            root_positions=root_positions,
            laws=[ProposalLaw.DETERMINISTIC] * batch_size,
        )

    @staticmethod
    def concat(first: TokenTree, second: TokenTree) -> TokenTree:
        """The requests of two batches in one; the second must not carry `q`."""
        assert second.q is None, "only trees without q can be appended"

        def join(name: str, fill: float) -> Tensor | None:
            a, b = getattr(first, name), getattr(second, name)
            if a is None:
                return None
            tail = a.new_full((len(second.tokens),), fill) if b is None else b
            return torch.cat((a, tail))

        return TokenTree(
            tokens=torch.cat((first.tokens, second.tokens)),
            parents=torch.cat((first.parents, second.parents)),
            depth=torch.cat((first.depth, second.depth)),
            num_nodes=[*first.num_nodes, *second.num_nodes],
            root_positions=torch.cat((first.root_positions, second.root_positions)),
            laws=[*first.laws, *second.laws],
            q=first.q,
            q_row=join("q_row", -1),
            score=join("score", 0.0),
            draft_slots=join("draft_slots", -1),
        )

    @staticmethod
    def chain(
        roots: Tensor,
        drafts: Sequence[Sequence[int]],
        root_positions: Tensor,
        law: ProposalLaw = ProposalLaw.DETERMINISTIC,
        **fields: Tensor | None,
    ) -> TokenTree:
        """One chain a request, of any lengths.

        Args:
            roots: `[B]` int64, last committed tokens.
            drafts: B lists of drafted tokens.
            root_positions: `[B]` int64.
            law: how the drafts were chosen.
            fields: `q`, `q_row`, `score`, `draft_slots` as in `TokenTree`.
        """
        parents = [list(range(-1, len(draft))) for draft in drafts]
        trees = [
            [(token, parent) for token, parent in zip(draft, links[1:], strict=True)]
            for draft, links in zip(drafts, parents, strict=True)
        ]
        return TokenTree.from_lists(roots, trees, root_positions, law, **fields)

    @staticmethod
    def from_lists(
        roots: Tensor,
        trees: Sequence[Sequence[tuple[int, int]]],
        root_positions: Tensor,
        law: ProposalLaw = ProposalLaw.DETERMINISTIC,
        **fields: Tensor | None,
    ) -> TokenTree:
        """Trees from host lists of `(token, parent)`, one entry a drafted node; parent 0 is the root.

        Raises:
            ValueError: a parent that does not precede its child.
        """
        tokens, parents, depth = [], [], []
        for row, (root, tree) in enumerate(zip(roots.tolist(), trees, strict=True)):
            levels = [0]
            for node, (_, parent) in enumerate(tree, start=1):
                if not 0 <= parent < node:
                    raise ValueError(
                        f"request {row}: parents[{node}]={parent}; parents must precede children"
                    )
                levels.append(levels[parent] + 1)
            tokens += [root, *(token for token, _ in tree)]
            parents += [-1, *(parent for _, parent in tree)]
            depth += levels
        device = roots.device
        return TokenTree(
            tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
            parents=torch.tensor(parents, dtype=torch.int64, device=device),
            depth=torch.tensor(depth, dtype=torch.int64, device=device),
            num_nodes=[len(tree) + 1 for tree in trees],
            root_positions=root_positions,
            laws=[law] * len(trees),
            **fields,
        )

"""One step of speculative decoding for a batch: propose, forward, verify. A loop around it owns the requests.

Plain decoding and prefill are the same step: their trees have only a root.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import CounterRng, SamplingBatch, TokenTree
from specdec.drafters.base import Commit, DraftBatch, Drafter
from specdec.engine.logprobs import TokenLogprobs, token_logprobs
from specdec.engine.metrics import StepTimes
from specdec.engine.model_runner import ModelRunner
from specdec.engine.packing import physical_slots
from specdec.engine.request import Request
from specdec.verifiers.base import Acceptance, TargetProbs, Verifier

_INVALID = "nothing can be drawn: the target's logits hold NaN or no finite value, impossible ids apart"


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """What a step decided, on the host and as tensors. B requests, N nodes."""

    requests: Sequence[Request]
    tree: TokenTree
    p: TargetProbs
    acceptance: Acceptance
    paths: list[list[int]]
    """Accepted nodes of each request as indices inside its tree, the root excluded."""
    tokens: list[list[int]]
    """Tokens each request gains: the accepted ones, then the correction or bonus; before any cut."""
    logprobs: list[list[TokenLogprobs]]
    """One entry a gained token, for the requests that ask for them; empty lists for the others."""
    errors: list[str | None]
    """Why a request cannot go on."""
    times: StepTimes


class SpeculativeStep:
    """Propose, forward, verify over requests whose pages are reserved.

    Args:
        target: the target on its cache.
        verifier: acceptance rule.
        drafter: None decodes plainly.
    """

    def __init__(self, target: ModelRunner, verifier: Verifier, drafter: Drafter | None = None) -> None:
        self.target = target
        self.verifier = verifier
        self.drafter = drafter
        # Replaced by checks that record coins or spoil them.
        self.make_rng: Callable[[Tensor], CounterRng] = CounterRng

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], block_tables: Tensor) -> StepResult:
        """Runs one step.

        Args:
            requests: those ready for a tree first, then those with missing committed tokens.
            block_tables: `[B, P]` int32, the requests' pages.
        """
        times = StepTimes()
        start = time.perf_counter()
        sampling = self._sampling(requests)
        rng = self.make_rng(torch.tensor([request.seed for request in requests], device=self.target.device))
        roots = torch.tensor([request.token_ids[-1] for request in requests], device=self.target.device)
        positions = [request.root_position for request in requests]
        root_positions = torch.tensor(positions, device=self.target.device)
        times.schedule = _lap(start)

        start = time.perf_counter()
        tree = self._propose(requests, block_tables, roots, root_positions, sampling, rng)
        times.draft = _lap(start)

        start = time.perf_counter()
        missing = [request.token_ids[request.num_cached : -1] for request in requests]
        batch = self.target.pack_tree(tree, positions, block_tables, missing if any(missing) else None)
        times.schedule += _lap(start)

        start = time.perf_counter()
        logits = self.target.node_logits(batch)  # [N, V]
        times.forward = _lap(start)

        start = time.perf_counter()
        p = TargetProbs(logits, tree, sampling)
        invalid = p.invalid.nonzero().squeeze(1).tolist()
        if invalid:
            # A row that can't be drawn from must not stop the batch: it is blanked here; its request fails.
            p = TargetProbs(
                logits.index_fill(0, torch.tensor(invalid, device=logits.device), 0), tree, sampling
            )
        acceptance = self.verifier.verify(tree, p, rng)
        result = self._read_back(requests, tree, p, acceptance, set(invalid), times)
        times.verify = _lap(start)
        return result

    def compact(self, result: StepResult) -> None:
        """Moves the K/V of accepted nodes to contiguous slots behind the root's, in the target's cache."""
        rows, sources, targets = [], [], []
        for row, (request, path) in enumerate(zip(result.requests, result.paths, strict=True)):
            for depth, node in enumerate(path, start=1):
                if node != depth:
                    rows.append(row)
                    sources.append(request.root_position + node)
                    targets.append(request.root_position + depth)
        if rows:
            tables = [request.blocks for request in result.requests]
            size = self.target.block_size
            self.target.move_kv(
                physical_slots(tables, rows, sources, size), physical_slots(tables, rows, targets, size)
            )

    def observe(self, result: StepResult, num_committed: Sequence[int], block_tables: Tensor) -> None:
        """Tells the drafter what the step committed; `num_committed` has one entry a request."""
        if self.drafter is not None:
            self.drafter.observe(
                Commit(
                    request_ids=[request.request_id for request in result.requests],
                    tree=result.tree,
                    acceptance=result.acceptance,
                    num_committed=num_committed,
                    block_tables=block_tables,
                )
            )

    def _sampling(self, requests: Sequence[Request]) -> SamplingBatch:
        device, vocab_size = self.target.device, self.target.model.vocab_size
        histories = None
        if any(request.params.uses_history for request in requests):
            histories = [request.recall(vocab_size, device) for request in requests]
        return SamplingBatch([request.params for request in requests], device, histories)

    def _propose(
        self,
        requests: Sequence[Request],
        block_tables: Tensor,
        roots: Tensor,
        root_positions: Tensor,
        sampling: SamplingBatch,
        rng: CounterRng,
    ) -> TokenTree:
        ready = sum(request.is_prefilled for request in requests)
        if self.drafter is None or not any(request.budget for request in requests[:ready]):
            return TokenTree.root_only(roots, root_positions)
        drafting = requests[:ready]
        batch = DraftBatch(
            request_ids=[request.request_id for request in drafting],
            token_ids=[request.token_ids for request in drafting],
            num_prompt_tokens=[len(request.prompt_token_ids) for request in drafting],
            max_depths=[request.num_remaining - 1 for request in drafting],
            root_positions=root_positions[:ready],
            roots=roots[:ready],
            block_tables=block_tables[:ready],
            sampling=sampling if ready == len(requests) else sampling.select(range(ready)),
            rng=rng,
        )
        tree = self.drafter.propose(batch, [request.budget for request in drafting])
        for request, drafted in zip(drafting, tree.num_drafted, strict=True):
            assert drafted <= request.budget, f"{drafted} nodes drafted, {request.budget} allowed"
        if ready == len(requests):
            return tree
        return TokenTree.concat(tree, TokenTree.root_only(roots[ready:], root_positions[ready:]))

    def _read_back(
        self,
        requests: Sequence[Request],
        tree: TokenTree,
        p: TargetProbs,
        acceptance: Acceptance,
        invalid: set[int],
        times: StepTimes,
    ) -> StepResult:
        """Brings the decision to the host in one transfer."""
        path = acceptance.path
        path_tokens = torch.where(path >= 0, tree.tokens[path.clamp(min=0)], -1)
        columns = [
            acceptance.num_accepted.unsqueeze(1),
            acceptance.next_token.unsqueeze(1),
            path,
            path_tokens,
        ]
        depth = path.shape[1]
        paths, tokens, errors = [], [], []
        for row, values in enumerate(torch.cat(columns, dim=1).tolist()):
            accepted = values[0]
            nodes = values[2 : 2 + accepted]
            start = tree.host_offsets[row]
            paths.append([node - start for node in nodes])
            tokens.append([*values[2 + depth : 2 + depth + accepted], values[1]])
            failed = invalid and not invalid.isdisjoint([start, *nodes])
            errors.append(_INVALID if failed else None)
        return StepResult(
            requests=requests,
            tree=tree,
            p=p,
            acceptance=acceptance,
            paths=paths,
            tokens=tokens,
            logprobs=_logprobs(requests, tree, p, paths, tokens),
            errors=errors,
            times=times,
        )


def _logprobs(
    requests: Sequence[Request],
    tree: TokenTree,
    p: TargetProbs,
    paths: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
) -> list[list[TokenLogprobs]]:
    """Log probabilities of the gained tokens: the root's row has the first one's, an accepted node's the next."""
    asking = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    results: list[list[TokenLogprobs]] = [[] for _ in requests]
    if not asking:
        return results
    nodes = [tree.host_offsets[row] + node for row in asking for node in (0, *paths[row])]
    gained = [token for row in asking for token in tokens[row]]
    counts = [requests[row].params.logprobs or 0 for row in asking for _ in tokens[row]]
    entries = iter(token_logprobs(p.logits[nodes], gained, counts))
    for row in asking:
        results[row] = [next(entries) for _ in tokens[row]]
    return results


def _lap(start: float) -> float:
    return time.perf_counter() - start

"""Continuous batching: who runs in the next step, with which pages and how many drafted nodes."""

from __future__ import annotations

from collections import deque

from specdec.engine.block_manager import BlockManager
from specdec.engine.request import Request


class Scheduler:
    """First come, first served; requests join and leave at every step.

    A running request holds pages for its committed tokens and its whole tree before anything is drafted. When
    pages run out, the youngest running request is preempted: it gives its pages back, returns to the head of
    the queue and later computes its committed tokens again. Trees never shrink under memory pressure, so a
    request's tokens don't depend on it.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, node_cap: int) -> tuple[list[Request], list[Request]]:
        """Chooses the requests of the next step and reserves their pages.

        Args:
            node_cap: drafted nodes a request may have.

        Returns:
            The requests to run, those ready for a tree first, then those with a prompt to process; and the
            requests preempted to make room.
        """
        preempted = self._reserve_running(node_cap)
        admitted = [] if preempted else self._admit(node_cap)
        return self.running[: len(self.running) - len(admitted)] + admitted, preempted

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees its pages."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def trim(self, request: Request) -> None:
        """Frees the pages behind the committed tokens: rejected nodes leave no reservation."""
        needed = self.blocks.blocks_for(len(request.token_ids))
        if len(request.blocks) > needed:
            self.blocks.free(request.blocks[needed:])
            del request.blocks[needed:]

    def _reserve_running(self, node_cap: int) -> list[Request]:
        preempted: list[Request] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            # One token of the remaining ones is the correction or bonus.
            request.budget = node_cap if request.num_remaining > 1 else 0
            while not self._reserve(request):
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            index += 1
        return preempted

    def _admit(self, node_cap: int) -> list[Request]:
        admitted: list[Request] = []
        num_tokens = sum(1 + request.budget for request in self.running)
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            num_tokens += len(request.token_ids) - request.num_cached
            if num_tokens > self.max_num_batched_tokens and (admitted or self.running):
                break
            request.budget = 0
            # Its next step brings a token and a tree: admitted without room for them, it would be preempted.
            ahead = 1 + node_cap if request.num_remaining > 1 else 0
            if not self.blocks.can_allocate(self.blocks.blocks_for(len(request.token_ids) + ahead)):
                break
            if not self._reserve(request):
                break
            self.running.append(self.waiting.popleft())
            admitted.append(request)
        return admitted

    def _reserve(self, request: Request) -> bool:
        """Makes sure the request has pages for its committed tokens and its tree."""
        missing = self.blocks.blocks_for(len(request.token_ids) + request.budget) - len(request.blocks)
        if missing <= 0:
            return True
        if not self.blocks.can_allocate(missing):
            return False
        request.blocks += self.blocks.allocate(missing)
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.blocks.free(request.blocks)
        request.reset_cache()

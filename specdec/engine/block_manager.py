"""Pages of the K/V pool: reference-counted blocks, handed out and taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class BlockManager:
    """Keeps account of the pool's pages; it never touches their content.

    One block table addresses the target's cache and every draft cache, so a page is allocated once for all.

    Args:
        num_blocks: pages of the pool.
        block_size: tokens a page.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages; the caller has asked `can_allocate` before."""
        assert self.can_allocate(count), f"{count} blocks asked, {len(self._free)} free"
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self.peak_used = max(self.peak_used, self.num_blocks - len(self._free))
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Drops one reference a page; a page without references is free again."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                # Last freed, first reused: its lines may still be in a cache.
                self._free.appendleft(block)

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Asserts that the given block tables account for every page in use."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._references, "block references differ from the block tables"
        assert sorted(self._free) == [block for block, count in enumerate(counts) if count == 0]

"""What penalties and `min_tokens` know of a request: the tokens of its prompt, and counts of its output."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch


class TokenHistory:
    """The committed tokens of one request, as counts. Drafted tokens never enter it.

    Args:
        prompt: token ids of the prompt.
        output: token ids committed since.
        vocab_size: V, of the logits.
        device: where the counts live.
        end_ids: ids that end the request, for `min_tokens`; those outside the vocabulary can't be drawn and
            are left out.
    """

    @torch.inference_mode()
    def __init__(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        vocab_size: int,
        device: torch.device,
        end_ids: Collection[int] = (),
    ) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        """`[V]` bool."""
        self.in_prompt[torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        """`[V]` int32, how often each token is in the output."""
        self.num_output = 0
        self.end_ids = tuple(sorted(int(token) for token in end_ids if 0 <= token < vocab_size))
        self.extend(output)

    # The step runs in inference mode: what it made can't be changed outside of it.
    @torch.inference_mode()
    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in committed output tokens."""
        ids = torch.tensor(list(tokens), dtype=torch.int64, device=self.counts.device)
        self.counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.num_output += len(tokens)

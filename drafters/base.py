"""The drafter contracts: a draft model answers "what comes next?", a tree proposer decides the topology.

    ModelDrafter(model, proposer)     is what most drafters are; the engine sees a `Drafter`
    Drafter                           can be implemented directly where no next-token distribution exists

Every object is created through `build(context, **arguments)`, the arguments being the `args` of its config.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from specdec.core import CounterRng, ProposalLaw, SamplingBatch, TokenTree
from specdec.verifiers.base import Acceptance

if TYPE_CHECKING:
    from specdec.drafters.trees.builder import Frontier
    from specdec.engine.model_runner import ModelRunner


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Target features a draft model reads.

    Tap i is Hugging Face's `hidden_states[i]`: 0 the embeddings, i the output of layer i - 1, before the
    final norm.
    """

    taps: tuple[int, ...] = ()
    last_hidden: bool = False


NO_FEATURES = FeatureSpec()


class DraftOutput(Enum):
    """What a draft model can be asked; a tree proposer needs one of them."""

    CONDITIONALS = "conditionals"
    """Next-token logits after any path, one call of `expand` a level."""
    MARGINALS = "marginals"
    """The distribution at each depth from one pass, whatever was drafted before it: `marginals`."""


@dataclass(frozen=True, kw_only=True)
class DrafterContext:
    """What the engine offers a drafter when it is built."""

    target: ModelRunner
    """The target on its paged cache; its block tables address every draft cache as well."""
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """No request grows longer than this, prompt and output."""
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftBatch:
    """The requests to draft for, B of them; every list has length B and is read-only for drafters."""

    request_ids: Sequence[int]
    token_ids: Sequence[Sequence[int]]
    """Committed tokens, prompt and output; the last one is the root."""
    num_prompt_tokens: Sequence[int]
    max_depths: Sequence[int]
    """Deepest node that can still be committed (context limit, max_tokens)."""
    root_positions: Tensor
    """`[B]` int64, `len(token_ids[b]) - 1`."""
    roots: Tensor
    """`[B]` int64, the last committed tokens."""
    block_tables: Tensor
    """`[B, P]` int32, pages with room for the committed tokens and the whole tree."""
    sampling: SamplingBatch
    rng: CounterRng

    @property
    def size(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Commit:
    """What a step committed, for drafters that keep state."""

    request_ids: Sequence[int]
    tree: TokenTree
    acceptance: Acceptance
    num_committed: Sequence[int]
    """Tokens each request gained: accepted plus one, less when EOS or a limit cut them."""
    block_tables: Tensor
    """`[B, P]` int32."""


class DraftModel(ABC):
    """A conditional next-token distribution over the target's vocabulary."""

    features: ClassVar[FeatureSpec] = NO_FEATURES
    provides: ClassVar[frozenset[DraftOutput]] = frozenset({DraftOutput.CONDITIONALS})
    """What proposers may ask of it; `MARGINALS` promises that `marginals` is implemented."""

    @classmethod
    def build(cls, context: DrafterContext, **arguments: Any) -> Self:
        """Creates the model. The default passes the arguments on.

        Raises:
            ValueError: an argument that doesn't fit, or a target the model can't serve.
        """
        return cls(**arguments)

    def extend(self, batch: DraftBatch) -> None:
        """Takes in the tokens committed since the last call, the root included. Stateless models skip it."""

    @abstractmethod
    def expand(self, frontier: Frontier) -> Tensor:
        """Logits for the children of the n frontier nodes.

        Returns:
            `[n, V]`, any float dtype; -inf where a token is impossible.
        """

    def top_k(self, frontier: Frontier, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest children of each frontier node. Models that know few candidates override it.

        Returns:
            Tokens `[n, k]` int64 and log q `[n, k]` float32, best first; log q of -inf marks no candidate.
        """
        log_q = self.expand(frontier).float().log_softmax(-1)  # [n, V]
        if k == 1:
            # Unlike topk, max settles ties as the target's argmax does: towards the lower id.
            best, tokens = log_q.max(-1, keepdim=True)
            return tokens, best
        best, tokens = log_q.topk(min(k, log_q.shape[-1]), dim=-1)
        lacking = k - best.shape[-1]
        return F.pad(tokens, (0, lacking)), F.pad(best, (0, lacking), value=float("-inf"))

    def marginals(self, batch: DraftBatch, depth: int) -> Tensor:
        """Logits at each depth below the root, only for models that provide `DraftOutput.MARGINALS`.

        Returns:
            `[B, depth, V]`, any float dtype; -inf where a token is impossible, in the whole row where nothing is
            known.
        """
        raise NotImplementedError(f"{type(self).__name__} provides {self.provides}, no marginals")

    def observe(self, commit: Commit) -> None:
        """Learns what was committed. Stateless models skip it."""

    def free(self, request_ids: Sequence[int]) -> None:
        """Forgets requests that finished, were aborted, or lost their cache to preemption."""

    def memory_bytes(self) -> int:
        """Bytes of draft cache, for reports; weights not counted."""
        return 0


class TreeProposer(ABC):
    """Decides which nodes a tree has."""

    law: ProposalLaw
    """How it chooses the children of a node."""
    possible_laws: ClassVar[tuple[ProposalLaw, ...]] = ()
    """Laws an argument chooses among; empty where the class fixes `law`."""
    needs: ClassVar[DraftOutput] = DraftOutput.CONDITIONALS
    """What it asks of the draft model."""
    max_nodes: int
    """Drafted nodes of its largest tree, root not counted."""

    @abstractmethod
    def propose(self, model: DraftModel, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        """Grows one tree a request.

        Args:
            model: already extended with the committed tokens of the batch.
            batch: B requests.
            budget: drafted nodes allowed for each request, on the host so that node counts need no
                synchronisation; 0 asks for a root alone.
        """


def laws_of(proposer: type[TreeProposer]) -> tuple[ProposalLaw, ...]:
    """The laws a class of proposers can give."""
    return proposer.possible_laws or (proposer.law,)


class Drafter(ABC):
    """What the engine sees."""

    law: ProposalLaw
    max_nodes: int
    features: FeatureSpec = NO_FEATURES
    scores_nodes: bool = False
    """Its trees carry `score`, so that nodes of several requests can be compared."""

    @classmethod
    def build(cls, context: DrafterContext, **arguments: Any) -> Self:
        """Creates the drafter. The default passes the arguments on."""
        return cls(**arguments)

    @abstractmethod
    def propose(self, batch: DraftBatch, budget: Sequence[int]) -> TokenTree:
        """Proposes one tree a request: at most `budget[b]` drafted nodes, no deeper than `max_depths[b]`."""

    def observe(self, commit: Commit) -> None:
        """Learns what was committed."""

    def free(self, request_ids: Sequence[int]) -> None:
        """Forgets requests."""

    def memory_bytes(self) -> int:
        """Bytes of draft cache, for reports."""
        return 0

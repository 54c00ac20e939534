"""What every part shares. Letters follow the papers: `p` is the target's distribution, `q` the drafter's."""

from specdec.core.history import TokenHistory
from specdec.core.law import ProposalLaw
from specdec.core.registry import Registry
from specdec.core.rng import CounterRng, Stream
from specdec.core.sampling_batch import SamplingBatch
from specdec.core.sampling_params import SamplingParams
from specdec.core.tree import TokenTree

__all__ = [
    "CounterRng",
    "ProposalLaw",
    "Registry",
    "SamplingBatch",
    "SamplingParams",
    "Stream",
    "TokenHistory",
    "TokenTree",
]

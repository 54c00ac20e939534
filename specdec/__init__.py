"""specdec: a research framework for speculative decoding.

from specdec import LLM, SamplingParams, SpeculativeConfig

llm = LLM("smollm2-135m", speculative=SpeculativeConfig(drafter="ngram"))
print(llm.generate("def fib(n):", SamplingParams(temperature=0))[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.core import ProposalLaw, SamplingParams, TokenTree
    from specdec.drafters.base import Drafter, DraftModel, TreeProposer
    from specdec.drafters.registry import DRAFTERS, TREES
    from specdec.engine.config import EngineConfig, SpeculativeConfig
    from specdec.engine.engine import Engine
    from specdec.engine.llm import LLM
    from specdec.models import TargetModel, load_target, load_tokenizer
    from specdec.verifiers.base import Verifier
    from specdec.verifiers.registry import VERIFIERS

# Imported on first use: `import specdec` alone must not load torch.
_HOMES = {
    "DRAFTERS": "specdec.drafters.registry",
    "Drafter": "specdec.drafters.base",
    "DraftModel": "specdec.drafters.base",
    "Engine": "specdec.engine.engine",
    "EngineConfig": "specdec.engine.config",
    "LLM": "specdec.engine.llm",
    "ProposalLaw": "specdec.core",
    "SamplingParams": "specdec.core",
    "SpeculativeConfig": "specdec.engine.config",
    "TREES": "specdec.drafters.registry",
    "TargetModel": "specdec.models",
    "TokenTree": "specdec.core",
    "TreeProposer": "specdec.drafters.base",
    "VERIFIERS": "specdec.verifiers.registry",
    "Verifier": "specdec.verifiers.base",
    "load_target": "specdec.models",
    "load_tokenizer": "specdec.models",
}

__all__ = [
    "DRAFTERS",
    "LLM",
    "TREES",
    "VERIFIERS",
    "DraftModel",
    "Drafter",
    "Engine",
    "EngineConfig",
    "ProposalLaw",
    "SamplingParams",
    "SpeculativeConfig",
    "TargetModel",
    "TokenTree",
    "TreeProposer",
    "Verifier",
    "load_target",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

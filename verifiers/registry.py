"""Names of the verification rules; plug-ins register under the entry-point group `specdec.verifiers`."""

from __future__ import annotations

from specdec.core import Registry
from specdec.verifiers.base import Verifier

VERIFIERS: Registry[Verifier] = Registry(
    "verifier",
    {
        "block": "specdec.verifiers.block:BlockVerifier",
        "entropy_gate": "specdec.verifiers.entropy_gate:EntropyGateVerifier",
        "greedy": "specdec.verifiers.greedy:GreedyVerifier",
        "gumbel": "specdec.verifiers.gumbel:GumbelVerifier",
        "kseq": "specdec.verifiers.kseq:KSeqVerifier",
        "rrs": "specdec.verifiers.rrs:RecursiveRejectionWithReplacementVerifier",
        "rrsw": "specdec.verifiers.rrsw:RecursiveRejectionWithoutReplacementVerifier",
        "synthetic": "specdec.verifiers.synthetic:SyntheticVerifier",
        "target_only": "specdec.verifiers.target_only:TargetOnlyVerifier",
        "token": "specdec.verifiers.token_rejection:TokenRejectionVerifier",
        "traversal": "specdec.verifiers.traversal:TraversalVerifier",
        "typical": "specdec.verifiers.typical:TypicalVerifier",
    },
    group="specdec.verifiers",
)

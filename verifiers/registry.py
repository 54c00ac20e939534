"""Names of the verification rules; plug-ins register under the entry-point group `specdec.verifiers`."""

from __future__ import annotations

from specdec.core import Registry
from specdec.verifiers.base import Verifier

VERIFIERS: Registry[Verifier] = Registry(
    "verifier",
    {
        "greedy": "specdec.verifiers.greedy:GreedyVerifier",
        "target_only": "specdec.verifiers.target_only:TargetOnlyVerifier",
        "token": "specdec.verifiers.token_rejection:TokenRejectionVerifier",
    },
    group="specdec.verifiers",
)

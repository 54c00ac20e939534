"""Names of drafters and trees; plug-ins use the entry-point groups `specdec.drafters` and `specdec.trees`."""

from __future__ import annotations

from specdec.core import Registry
from specdec.drafters.base import Drafter, DraftModel, TreeProposer

DRAFTERS: Registry[Drafter | DraftModel] = Registry(
    "drafter",
    {
        "early_exit": "specdec.drafters.models.early_exit:EarlyExitModel",
        "ngram": "specdec.drafters.models.ngram:NGramModel",
        "quantised": "specdec.drafters.models.quantised:QuantisedModel",
        "scripted": "specdec.drafters.models.scripted:ScriptedDrafter",
        "self": "specdec.drafters.models.self_draft:SelfDraftModel",
        "small_lm": "specdec.drafters.models.small_lm:SmallLMModel",
    },
    group="specdec.drafters",
)

TREES: Registry[TreeProposer] = Registry(
    "tree",
    {
        "best_first": "specdec.drafters.trees.best_first:BestFirstProposer",
        "chain": "specdec.drafters.trees.chain:ChainProposer",
        "ddtree": "specdec.drafters.trees.ddtree:DDTreeProposer",
        "dyspec": "specdec.drafters.trees.dyspec:DySpecProposer",
        "eagle2": "specdec.drafters.trees.eagle2:Eagle2Proposer",
        "expansion": "specdec.drafters.trees.expansion:ExpansionProposer",
        "opt_tree": "specdec.drafters.trees.opt_tree:OptTreeProposer",
        "sequoia": "specdec.drafters.trees.sequoia:SequoiaProposer",
        "static": "specdec.drafters.trees.static:StaticProposer",
    },
    group="specdec.trees",
)

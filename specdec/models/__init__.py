"""Targets: any Hugging Face decoder on paged K/V, and how to load one."""

from specdec.models.loading import load_target, load_tokenizer
from specdec.models.target import ForwardOutput, KVSpec, TargetModel

__all__ = ["ForwardOutput", "KVSpec", "TargetModel", "load_target", "load_tokenizer"]

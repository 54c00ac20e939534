"""Prompt sets: where prompts come from, in which order, and how they become tokens of a target."""

from specdec.data.config import DataConfig
from specdec.data.load import load_prompts
from specdec.data.prompt import Message, Prompt
from specdec.data.render import TokenizedPrompt, render_prompts

__all__ = ["DataConfig", "Message", "Prompt", "TokenizedPrompt", "load_prompts", "render_prompts"]

"""Text that grows with the tokens: chunks whose concatenation is the decoded whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that decoding needs."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns tokens into text chunks; holds back bytes that don't make a whole character yet.

    Args:
        tokenizer: decodes token ids.
        skip_special_tokens: leave EOS and the like out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.token_ids: list[int] = []
        self.text = ""
        # Tokens before this index are never decoded again: decoding stays linear in the output.
        self._window_start = 0
        self._window_text = ""

    def add(self, token_ids: Sequence[int], final: bool = False) -> str:
        """Appends tokens and returns the text that became certain; `final` releases what was held back."""
        self.token_ids += token_ids
        window = self._decode(self.token_ids[self._window_start :])
        if window.endswith(_REPLACEMENT) and not final:
            return ""
        chunk = window[len(self._window_text) :]
        self.text += chunk
        # One token of left context keeps tokenizers right that strip a leading space from the first piece.
        self._window_start = max(len(self.token_ids) - 4, 0)
        self._window_text = self._decode(self.token_ids[self._window_start :])
        return chunk

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)

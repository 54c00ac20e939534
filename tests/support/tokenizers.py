"""A tokenizer whose tokens are bytes: characters often need several."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    """Ids 0-255 are bytes; id 256 is a special token."""

    special = 256

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        parts = [token for token in token_ids if token < self.special or not skip_special_tokens]
        text = b"".join(bytes([token]) if token < self.special else b"<eos>" for token in parts)
        return text.decode(errors="replace")

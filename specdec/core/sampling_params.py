"""`SamplingParams`: how one request is decoded. Names follow vLLM's class of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.core.checks import are_integers, check, is_integer, is_real

# Below this temperature logits divided by it could overflow; the distribution is one-hot long before.
_GREEDY_BELOW = 1e-5
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is decoded; `specdec.core.sampling` says in which order the options apply."""

    max_tokens: int | None = 128
    """New tokens at most; None decodes until EOS or the context limit."""
    min_tokens: int = 0
    """The ids that end the request (EOS unless ignored, stop ids) are impossible before so many new tokens."""
    temperature: float = 1.0
    """0, like anything below 1e-5, is greedy decoding."""
    top_k: int = 0
    """Keep the k most likely tokens (ties kept); 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this mass."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or output by this, and multiplies the others; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these ids."""
    allowed_token_ids: tuple[int, ...] | None = None
    """All other ids are impossible; None allows all."""
    banned_token_ids: tuple[int, ...] = ()
    """Impossible ids; transformers calls them `suppress_tokens`."""
    seed: int | None = None
    """Seed of the request's random streams; None derives one from engine seed and request number."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request besides the model's EOS ids; the id itself is kept in the output."""
    ignore_eos: bool = False
    """Go on past the model's EOS ids (never past `stop_token_ids`)."""
    logprobs: int | None = None
    """Report the log probability of each output token and of this many likeliest ones; None reports none. They
    are the target's own: taken before penalties, bias, masks, temperature and filters, as vLLM's default is."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def has_bias(self) -> bool:
        """Whether some logits change whatever was said before: bias, allowed and banned ids."""
        return bool(self.logit_bias or self.banned_token_ids or self.allowed_token_ids is not None)

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def uses_history(self) -> bool:
        """Whether the distribution depends on which tokens, or how many, came before."""
        return self.has_penalties or self.min_tokens > 0

    def _check_types(self) -> None:
        for name in ("max_tokens", "seed", "logprobs"):
            value = getattr(self, name)
            check(name, value, value is None or is_integer(value), "to be an integer or None")
        for name in ("top_k", "min_tokens"):
            check(name, getattr(self, name), is_integer(getattr(self, name)), "to be an integer")
        for name in _NUMBERS:
            check(name, getattr(self, name), is_real(getattr(self, name)), "to be a number")
        for name in ("stop_token_ids", "banned_token_ids"):
            check(name, getattr(self, name), are_integers(getattr(self, name)), "to hold token ids")
        allowed, bias = self.allowed_token_ids, self.logit_bias
        listed = allowed is None or are_integers(allowed)
        check("allowed_token_ids", allowed, listed, "to hold token ids, or to be None")
        mapped = isinstance(bias, Mapping) and are_integers(list(bias)) and all(map(is_real, bias.values()))
        check("logit_bias", bias, mapped, "to map token ids to numbers")

    def _check_ranges(self) -> None:
        most, least = self.max_tokens, self.min_tokens
        check("max_tokens", most, most is None or most >= 1, ">= 1 or None")
        check("min_tokens", least, least >= 0 and (most is None or least <= most), ">= 0 and <= max_tokens")
        check("temperature", self.temperature, 0 <= self.temperature < float("inf"), "finite and >= 0")
        check("top_k", self.top_k, self.top_k >= 0, ">= 0 (0 keeps all tokens)")
        check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        check("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        repetition = self.repetition_penalty
        check("repetition_penalty", repetition, 0.01 <= repetition <= 100, "in [0.01, 100] (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "in [-2, 2] (0 is off)")
        for token, bias in self.logit_bias.items():
            check(f"logit_bias[{token}]", bias, -100 <= bias <= 100, "in [-100, 100]; ban ids instead")
        if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= set(self.banned_token_ids):
            raise ValueError(
                f"allowed_token_ids={tuple(self.allowed_token_ids)} without banned_token_ids="
                f"{tuple(self.banned_token_ids)}: expected at least one id to be left; None allows all"
            )
        check("seed", self.seed, self.seed is None or 0 <= self.seed < 2**63, "in [0, 2**63) or None")
        check("logprobs", self.logprobs, self.logprobs is None or self.logprobs >= 0, ">= 0 or None")

"""How one request's tokens are chosen and when it stops."""

import sys
from dataclasses import dataclass, field

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256  # each is looked for at each token


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """ValueError names the field, the value and the rule.

    temperature: 0 is greedy.                     top_k: 0 keeps the whole vocabulary.
    top_p: smallest set of likeliest tokens with at least this probability.
    seed: None draws one for the request.         max_tokens: at most this many new tokens.
    stop: at most 16 strings, of at most 256 characters, that end the text (not part of it).
    stop_token_ids: tokens that end it, beside the model's own end tokens (kept in token_ids).
    ignore_eos: the model's own end tokens do not end it.
    logprobs: None, or how many of the likeliest tokens to report beside the chosen one.
    return_logits: keep the float32 logits of every new token (for comparing bits).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    return_logits: bool = False
    _stop_tokens: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, scalar in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            value = () if value is None else (value,) if isinstance(value, scalar) else value
            several = isinstance(value, list | tuple | range | set | frozenset)
            self._require(several, name, "must be a list or a tuple")
            object.__setattr__(self, name, tuple(value))
        for name in ("temperature", "top_p"):
            self._require(type(getattr(self, name)) in (int, float), name, "must be a number")
        self._require(isinstance(self.ignore_eos, bool), "ignore_eos", "must be a bool")
        self._require(isinstance(self.return_logits, bool), "return_logits", "must be a bool")
        finite = 0.0 <= self.temperature <= sys.float_info.max
        self._require(finite, "temperature", "must be >= 0 and finite")
        self._require(_is_int(self.top_k) and self.top_k >= 0, "top_k", "must be >= 0 (0: all)")
        self._require(0.0 < self.top_p <= 1.0, "top_p", "must be in (0, 1]")
        in_range = self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 1 << 63)
        self._require(in_range, "seed", "must be None or in [0, 2**63)")
        self._require(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            "max_tokens",
            "must be an integer >= 1",
        )
        self._require(len(self.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
        self._require(all(isinstance(s, str) and s for s in self.stop), "stop", "no empty strings")
        short = all(len(s) <= MAX_STOP_CHARACTERS for s in self.stop)
        self._require(short, "stop", f"at most {MAX_STOP_CHARACTERS} characters each")
        ids = all(_is_int(i) and i >= 0 for i in self.stop_token_ids)
        self._require(ids, "stop_token_ids", "must be token ids")
        object.__setattr__(self, "_stop_tokens", frozenset(self.stop_token_ids))
        enough = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 20)
        self._require(enough, "logprobs", "must be None or in [0, 20]")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r:.1000}: {rule}")

    def stops_at(self, token_id: int, eos_token_ids: tuple[int, ...]) -> bool:
        """Whether this token ends the request."""
        if token_id in self._stop_tokens:
            return True
        return not self.ignore_eos and token_id in eos_token_ids


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""Log-probabilities as OpenAI writes them."""

from collections.abc import Sequence

from engine.api_replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from engine.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -inf; OpenAI's value for "impossible"


class LogprobWriter:
    """Spells the tokens of one answer, which are given to it in order and in pieces.

    Every generated token is told, one that ends the answer without being part of its text too.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = (
            None if tokenizer is None else tokenizer.detokenizer(skip_special_tokens=True)
        )
        self._offset = 0

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]
    ) -> CompletionLogprobs:
        """The next tokens, in the shape of /v1/completions."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.append(token_id))
        return CompletionLogprobs(
            tokens=[self._spell(token_id) for token_id in token_ids],
            token_logprobs=[
                max(top[token_id], LOWEST)
                for token_id, top in zip(token_ids, logprobs, strict=True)
            ],
            top_logprobs=[
                {self._spell(other): max(value, LOWEST) for other, value in top.items()}
                for top in logprobs
            ],
            text_offset=offsets,
        )

    def chat(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, float]], *, count: int
    ) -> ChatLogprobs:
        """The next tokens, each with the `count` likeliest, in the shape of chat completions."""
        content = []
        for token_id, top in zip(token_ids, logprobs, strict=True):
            chosen = self._top(token_id, top[token_id])
            others = [self._top(other, value) for other, value in top.items()]
            others.sort(key=lambda each: each.logprob, reverse=True)
            content.append(TokenLogprob(**chosen.model_dump(), top_logprobs=others[:count]))
        return ChatLogprobs(content=content)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=self._spell(token_id),
            logprob=max(logprob, LOWEST),
            bytes=list(self._bytes(token_id)),
        )

    def _bytes(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def _spell(self, token_id: int) -> str:
        """The token's text; its bytes where they are no text; its id where it has neither."""
        raw = self._bytes(token_id)
        if not raw:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

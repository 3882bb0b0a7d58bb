"""The text of one answer as its tokens come, and the stop strings that end it."""

from collections.abc import Sequence

from engine.tokenizer import Tokenizer


class AnswerText:
    """Decodes token by token and is cut at the first stop string. Empty without a tokenizer.

    Special tokens add no text. `text` may end in what can still become a stop string; `settled`
    leaves that out.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, stops: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self.restart(())

    def restart(self, token_ids: Sequence[int], *, ended: bool = False) -> None:
        """As after these tokens. ended: the last one ended the answer, no other did."""
        self.text = ""
        self._detokenizer = (
            None
            if self._tokenizer is None
            else self._tokenizer.detokenizer(skip_special_tokens=True)
        )
        for index, token_id in enumerate(token_ids, start=1):
            self.append(token_id, last=ended and index == len(token_ids))

    def append(self, token_id: int, *, last: bool) -> bool:
        """Decode one more token. True, and the text cut there, if a stop string has appeared.

        last: nothing follows; bytes that are held back for a character become U+FFFD.
        """
        if self._detokenizer is None:
            return False
        seen = len(self.text)
        self.text += self._detokenizer.append(token_id)
        if last:
            self.text += self._detokenizer.flush()
        starts = (self.text.find(stop, max(0, seen - len(stop) + 1)) for stop in self._stops)
        found = [start for start in starts if start >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def settled(self) -> str:
        """The text without an ending that may yet become a stop string."""
        held = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:length]):
                    held = length
                    break
        return self.text[: len(self.text) - held]

"""Text to token ids and back, and the incremental way back for streaming.

A thin layer over the `tokenizers` library for byte-level BPE. Streaming keeps a UTF-8 decoder of
its own: the library's `DecodeStream` holds all text back while it ends in a replacement character,
final or not, and decodes what it holds again at each step.
"""

import codecs
import math
from functools import cached_property
from pathlib import Path

import tokenizers

NFC_SHRINKS = 4  # at most: U+1FBE, U+0308, U+0301 are 7 bytes, and 2 as the one U+0390


class Tokenizer:
    """A byte-level tokenizer read from `tokenizer.json`."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Raises ValueError where the tokenizer is not byte-level."""
        decoder = type(inner.decoder).__name__
        if not isinstance(inner.decoder, tokenizers.decoders.ByteLevel):
            raise ValueError(f"decoder is {decoder}; expected ByteLevel")
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._special_ids = frozenset(
            i for i, token in inner.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer | None":
        """The tokenizer of a model directory, or None where it has no `tokenizer.json`.

        Raises ValueError for a file that can't be read or is not byte-level.
        """
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise ValueError(f"{file}: {error}") from None

    @property
    def vocab_size(self) -> int:
        """Number of ids that have a token; the model's own vocabulary may be padded beyond."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_bytes_per_token(self) -> float:
        """The most bytes of text that become one token; infinite where there is no telling."""
        normalizer = self._inner.normalizer
        if not isinstance(normalizer, tokenizers.normalizers.NFC | None):
            return math.inf
        added = self._inner.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):  # they take the spaces around them
            return math.inf
        longest = max(len(_bytes_of(token)) for token in self._inner.get_vocab())
        return longest * (1 if normalizer is None else NFC_SHRINKS)

    def token_id(self, token: str) -> int | None:
        """Id of a token as `tokenizer.json` spells it, for example `<|im_end|>`, or None."""
        return self._inner.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Nothing is added; special tokens written in the text become their ids.

        Raises ValueError for a text that UTF-8 can't hold (a lone surrogate).
        """
        text.encode()  # UnicodeEncodeError is a ValueError that names the character
        # One text as a batch, because `encode` keeps the interpreter locked: 1 s for 2 MB.
        [encoding] = self._inner.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of some ids. Bytes that are not UTF-8 become U+FFFD, ids without a token nothing."""
        known = b"".join(
            self.token_bytes(i) for i in ids if not self._skips(i, skip_special_tokens)
        )
        return known.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; empty for an id of the padding beyond the vocabulary.

        Raises ValueError for a negative id.
        """
        known = self._bytes.get(token_id)
        if known is None:
            if token_id < 0:
                raise ValueError(f"token id is {token_id}; expected 0 or more")
            token = self._inner.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else _bytes_of(token)
        return known

    def detokenizer(self, *, skip_special_tokens: bool = False) -> "Detokenizer":
        """A new incremental decoder for one sequence."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)

    def _skips(self, token_id: int, skip_special_tokens: bool) -> bool:
        return skip_special_tokens and token_id in self._special_ids


class Detokenizer:
    """Turns ids into text one at a time.

    Text is final once returned: the pieces joined, with `flush` at the end, are `Tokenizer.decode`
    of all the ids. At most three bytes are held back. A step costs the bytes of its token.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_id: int) -> str:
        """The text that this id makes final; empty while a character lacks bytes."""
        if self._tokenizer._skips(token_id, self._skip_special_tokens):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What was held back, as U+FFFD; the next `append` starts afresh."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _byte_alphabet() -> dict[str, int]:
    """Character of each byte in byte-level BPE: Latin-1 where printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """Bytes of a vocabulary entry; an added token outside the alphabet is plain text."""
    if all(character in BYTE_ALPHABET for character in token):
        return bytes(BYTE_ALPHABET[character] for character in token)
    return token.encode()

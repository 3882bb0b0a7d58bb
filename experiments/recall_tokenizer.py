"""One token for each word that the documents use, and one for each byte of everything else."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from engine.tokenizer import BYTE_ALPHABET
from experiments.model_shapes import SPECIAL_TOKENS
from experiments.recall_documents import vocabulary

# A word with the space before it, a run of digits, signs one by one, other space.
_SPLIT = r" ?\p{L}+| ?\p{N}+|[^\s\p{L}\p{N}]|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}"
    "{% endif %}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def recall_tokenizer() -> Tokenizer:
    """Byte-level; a word of `vocabulary()` is one token, any other is its bytes."""
    vocab = dict(BYTE_ALPHABET)
    first = 256 + len(SPECIAL_TOKENS)
    letter = {byte: character for character, byte in BYTE_ALPHABET.items()}
    for i, word in enumerate(vocabulary()):
        vocab["".join(letter[byte] for byte in word.encode())] = first + i
    for i, token in enumerate(SPECIAL_TOKENS):
        vocab[token] = 256 + i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer

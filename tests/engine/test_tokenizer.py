"""Text to ids and back, whole and in a stream."""

import json
import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Library

from engine.tokenizer import Tokenizer
from experiments.make_model import byte_tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the theatre there, naïve café",
    "日本語のテキスト 日本",
    "emoji 🙂🙃 🙂",
    "  indent\n\n\tx",
]
UTF8_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def trained():
    """A byte-level BPE with merges, special tokens, and one added token that is not special."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS * 4, trainer)
    library.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    library.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    return library


LIBRARIES = {"bytes": byte_tokenizer(), "merges": trained()}
TOKENIZERS = {name: Tokenizer(library) for name, library in LIBRARIES.items()}
both = pytest.mark.parametrize("kind", list(TOKENIZERS))


def stream(tokenizer, ids, **options):
    detokenizer = tokenizer.detokenizer(**options)
    pieces = [detokenizer.append(i) for i in ids]
    return [*pieces, detokenizer.flush()]


@both
@given(text=UTF8_TEXT)
def test_any_text_survives_the_round_trip(kind, text):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@both
@given(text=UTF8_TEXT)
def test_a_streamed_text_is_the_text(kind, text):
    tokenizer = TOKENIZERS[kind]
    assert "".join(stream(tokenizer, tokenizer.encode(text))) == text


@both
@given(data=st.data(), skip=st.booleans())
def test_any_ids_decode_as_the_library_decodes_them_streamed_or_whole(kind, data, skip):
    tokenizer, library = TOKENIZERS[kind], LIBRARIES[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 50)))
    expected = library.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == expected


@given(content=st.binary())
def test_any_bytes_decode_as_utf8_with_replacements(content):
    ids = list(content)
    assert TOKENIZERS["bytes"].decode(ids) == content.decode(errors="replace")
    assert "".join(stream(TOKENIZERS["bytes"], ids)) == content.decode(errors="replace")


def test_ids_are_byte_values_and_specials_follow():
    tokenizer = TOKENIZERS["bytes"]
    assert tokenizer.encode("aé\n<|im_start|>\x00<|im_end|>") == [97, 195, 169, 10, 257, 0, 258]
    assert [tokenizer.token_id(token) for token in SPECIALS] == [256, 257, 258]
    assert tokenizer.token_id("<|other|>") is None
    assert tokenizer.vocab_size == 259


def test_other_threads_run_while_a_long_text_is_tokenised():
    stop, gaps = threading.Event(), []

    def beat():
        last = time.perf_counter()
        while not stop.wait(0.005):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    beating = threading.Thread(target=beat)
    beating.start()
    begin = time.perf_counter()
    ids = TOKENIZERS["bytes"].encode("Ada lives in Paris. " * 50_000)
    seconds = time.perf_counter() - begin
    stop.set()
    beating.join()
    assert len(ids) == 1_000_000 and max(gaps) < seconds / 2


@both
@given(text=UTF8_TEXT)
def test_no_token_stands_for_more_bytes_than_it_says(kind, text):
    tokenizer = TOKENIZERS[kind]
    text += "<|endoftext|>"
    assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.max_bytes_per_token


def test_a_normalizer_or_a_token_that_takes_spaces_moves_the_bytes_of_a_token():
    assert TOKENIZERS["bytes"].max_bytes_per_token == len("<|endoftext|>")
    library = byte_tokenizer()
    library.normalizer = normalizers.NFC()
    composed = Tokenizer(library)
    assert composed.max_bytes_per_token == 4 * len("<|endoftext|>")
    assert len(composed.encode("\u1fbe\u0308\u0301")) == 2, "seven bytes"
    library.normalizer = normalizers.Lowercase()
    assert Tokenizer(library).max_bytes_per_token == math.inf
    library = byte_tokenizer()
    library.add_special_tokens([AddedToken("<pad>", lstrip=True)])
    assert Tokenizer(library).max_bytes_per_token == math.inf


def test_merges_shorten_the_text():
    tokenizer = TOKENIZERS["merges"]
    assert len(tokenizer.encode("the theatre 日本")) < len("the theatre 日本".encode()) // 2


def test_nothing_is_added_around_a_text(tmp_path):
    library = byte_tokenizer()
    library.enable_truncation(max_length=2)
    library.enable_padding(length=9)
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("abc") == [97, 98, 99]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


def test_a_character_appears_with_its_last_byte():
    assert stream(TOKENIZERS["bytes"], [0x61, 0xE6, 0x97, 0xA5, 0x62]) == [
        "a",
        "",
        "",
        "日",
        "b",
        "",
    ]


def test_flush_gives_up_on_an_incomplete_character_and_starts_afresh():
    detokenizer = TOKENIZERS["bytes"].detokenizer()
    assert [detokenizer.append(byte) for byte in (0xE6, 0x97)] == ["", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert [detokenizer.append(byte) for byte in (0xC3, 0xA9)] == ["", "é"]


def test_a_real_replacement_character_is_not_held_back():
    ids = list("\ufffd".encode())
    assert stream(TOKENIZERS["bytes"], ids) == ["", "", "\ufffd", ""]


def test_special_tokens_are_text_unless_they_are_skipped():
    tokenizer = TOKENIZERS["merges"]
    ids = tokenizer.encode("<|im_start|>a<tool é>b<|im_end|>")
    assert tokenizer.decode(ids) == "<|im_start|>a<tool é>b<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool é>b"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=True)) == "a<tool é>b"


def test_invalid_bytes_are_told_at_once_and_not_collected():
    assert stream(TOKENIZERS["bytes"], [0xFF] * 100) == ["\ufffd"] * 100 + [""]


def test_a_negative_id_and_a_lone_surrogate_are_refused():
    tokenizer = TOKENIZERS["bytes"]
    with pytest.raises(ValueError, match="token id is -1; expected 0 or more"):
        tokenizer.decode([65, -1])
    with pytest.raises(ValueError, match="token id is -1; expected 0 or more"):
        tokenizer.detokenizer().append(-1)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("a\ud800")


def test_a_directory_without_tokenizer_has_none(tmp_path):
    assert Tokenizer.from_directory(tmp_path) is None


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "Other"}}'])
def test_a_broken_tokenizer_file_is_named(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(ValueError) as error:
        Tokenizer.from_directory(tmp_path)
    assert str(error.value).startswith(f"{file}: ")


@pytest.mark.parametrize("decoder", ["Metaspace", "NoneType"])
def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path, decoder):
    library = byte_tokenizer()
    file = tmp_path / "tokenizer.json"
    library.save(str(file))
    raw = json.loads(file.read_text())
    raw["decoder"] = None
    if decoder == "Metaspace":
        raw["decoder"] = {
            "type": "Metaspace",
            "replacement": "_",
            "prepend_scheme": "never",
            "split": False,
        }
    file.write_text(json.dumps(raw))
    with pytest.raises(ValueError) as error:
        Tokenizer.from_directory(tmp_path)
    assert str(error.value) == f"{file}: decoder is {decoder}; expected ByteLevel"

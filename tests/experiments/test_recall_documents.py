"""The built-in model's documents say what their facts say, and its tokenizer knows their words."""

import random

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer import BYTE_ALPHABET, Tokenizer
from experiments.recall_documents import (
    ASSISTANT,
    END,
    NAMES,
    RELATIONS,
    Fact,
    answer_turn,
    filler_sentence,
    make_document,
    prompt,
    training_text,
    vocabulary,
)
from experiments.recall_tokenizer import CHAT_TEMPLATE, recall_tokenizer
from experiments.recall_workload import (
    LONGEST_QUESTION,
    document_tokens,
    fitting_document,
    question_prompts,
    spread_facts,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(recall_tokenizer())


def last_values(sentences):
    """(name, verb) -> value, as a reader who goes through the sentences finds them."""
    found = {}
    for sentence in sentences:
        for relation in RELATIONS:
            words = sentence.rstrip(".").split(" ")
            if words[0] in NAMES and " ".join(words[1:3]) == relation.verb:
                found[words[0], relation.verb] = words[3]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_facts_of_a_document_are_the_last_values_that_its_sentences_state(seed):
    document = make_document(seed, num_facts=20, num_sentences=40, num_updates=9)
    assert len(document.facts) == 20 and len(document.sentences) == 40
    expected = {(fact.name, fact.relation.verb): fact.value for fact in document.facts}
    assert last_values(document.sentences) == expected
    for fact, place in zip(document.facts, document.positions, strict=True):
        assert document.sentences[place] in (fact.sentence, fact.update)
    assert list(document.positions) == sorted(document.positions)


def test_updates_change_the_value_they_replace():
    document = make_document(3, num_facts=4, num_sentences=8, num_updates=4)
    values = {}
    for sentence in document.sentences:
        name, first, second, value = sentence.rstrip(".").split(" ")[:4]
        assert values.get((name, first, second)) != value
        assert sentence.endswith(" now.") == ((name, first, second) in values)
        values[name, first, second] = value


def test_a_seed_is_a_document_and_another_seed_another():
    sizes = {"num_facts": 6, "num_sentences": 12}
    assert make_document("a", **sizes) == make_document("a", **sizes)
    assert make_document("a", **sizes) != make_document("b", **sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_facts": 0, "num_sentences": 5}, "num_facts is 0; expected 1 to 784"),
        ({"num_facts": 785, "num_sentences": 5000}, "num_facts is 785; expected 1 to 784"),
        ({"num_facts": 8, "num_sentences": 8}, "num_sentences is 8; expected at least 9"),
        (
            {"num_facts": 4, "num_sentences": 20, "num_updates": 5},
            "num_updates is 5; expected 0 to num_facts = 4",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_document(0, **sizes)


def test_filler_names_nobody_and_no_value():
    rng = random.Random(0)
    values = {value for relation in RELATIONS for value in relation.values}
    for _ in range(2000):
        words = set(filler_sentence(rng).rstrip(".").split(" "))
        assert not words & (set(NAMES) | values)


def test_words_are_unique_and_relations_have_as_many_values():
    assert len(set(NAMES)) == len(NAMES) == 196
    for relation in RELATIONS:
        assert len(set(relation.values)) == len(relation.values) == 40


@pytest.mark.parametrize("seed", range(10))
def test_every_answer_of_a_training_text_is_what_was_said_last(seed):
    pieces = list(
        training_text(random.Random(seed), num_facts=16, num_questions=12, num_sentences=30)
    )
    said, asked, answers = "", "", 0
    for text, is_answer in pieces:
        if is_answer:
            name, first, second, value = text.removesuffix(f".{END}").split()
            sentences = [s.strip() + "." for s in said.replace(END, ".").split(".")]
            assert last_values(sentences)[name, f"{first} {second}"] == value
            assert name in asked
            answers += 1
        else:
            body = text.removeprefix("<|im_start|>user:").removesuffix(f"{END}{ASSISTANT}")
            *statements, asked = body.split(". ") if ". " in body else ["", body]
            said += " " + ". ".join(statements) + "."
    assert answers >= 8


# ---- the tokenizer


def test_every_word_is_one_token(tokenizer):
    for word in vocabulary():
        assert len(tokenizer.encode(word)) == 1, word
    assert tokenizer.vocab_size == 256 + 3 + len(vocabulary())


def test_a_document_and_its_answers_take_no_byte_tokens_but_signs(tokenizer):
    document = make_document(1, num_facts=60, num_sentences=400)
    text = prompt(document, document.facts[0]) + answer_turn(document.facts[0].sentence)
    signs = {BYTE_ALPHABET[sign] for sign in ".?:"}
    assert {token for token in tokenizer.encode(text) if token < 256} <= signs


@given(st.text())
def test_any_text_comes_back(text):
    tokenizer = Tokenizer(recall_tokenizer())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_name_is_the_same_token_in_fact_question_and_answer(tokenizer):
    fact = Fact("Maria", RELATIONS[0], "Oslo")
    [name] = tokenizer.encode(" Maria")
    for text in (f"We met. {fact.sentence}", fact.question, answer_turn(fact.sentence)):
        assert tokenizer.encode(text).count(name) == 1


def test_the_chat_template_writes_what_the_model_was_trained_on():
    document = make_document(1, num_facts=3, num_sentences=5)
    fact = document.facts[1]
    messages = [{"role": "user", "content": f" {document.text} {fact.question}\n"}]
    template = jinja2.Template(CHAT_TEMPLATE)
    asked = template.render(messages=messages, add_generation_prompt=True)
    assert asked == prompt(document, fact)
    messages.append({"role": "assistant", "content": answer_turn(fact.sentence).removesuffix(END)})
    assert template.render(messages=messages) == asked + answer_turn(fact.sentence)


# ---- documents of a length


@pytest.mark.parametrize("max_tokens", [64, 65, 200, 1000, 4096])
def test_a_fitting_document_is_as_long_as_it_may_be(tokenizer, max_tokens):
    document = fitting_document(tokenizer, "fits", max_tokens=max_tokens)
    assert len(document.facts) == max_tokens // 64
    assert max_tokens - 20 < document_tokens(tokenizer, document) <= max_tokens


def test_prompts_share_the_document_and_nothing_of_the_question(tokenizer):
    document = fitting_document(tokenizer, "shared", max_tokens=300)
    prompts = list(question_prompts(tokenizer, document, spread_facts(document, 4)))
    shared = document_tokens(tokenizer, document)
    assert len({tuple(ids[:shared]) for ids in prompts}) == 1
    assert len({tuple(ids[shared:]) for ids in prompts}) == len(prompts)
    assert max(len(ids) for ids in prompts) - shared <= LONGEST_QUESTION


def test_facts_that_do_not_fit_are_refused(tokenizer):
    with pytest.raises(ValueError, match="40 facts don't fit into 100 tokens"):
        fitting_document(tokenizer, 0, max_tokens=100, num_facts=40)


def test_facts_are_spread_over_the_document_and_come_again_when_few(tokenizer):
    document = make_document(0, num_facts=10, num_sentences=20)
    assert spread_facts(document, 2) == [document.facts[0], document.facts[5]]
    assert spread_facts(document, 12) == [*document.facts, *document.facts[:2]]

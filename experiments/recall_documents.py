"""What does the built-in model read and answer? Documents of facts, and questions about them.

A document is plain sentences: facts ("Maria lives in Oslo."), facts that replace an earlier one
("Maria lives in Bergen now."; the last value counts), and filler that says nothing about anybody.
A question asks for one fact and is answered by its sentence. Everything follows from a seed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

USER, ASSISTANT, END = "<|im_start|>user:", "<|im_start|>assistant:", "<|im_end|>"


@dataclass(frozen=True)
class Relation:
    """A kind of fact: `{name} {verb} {value}`, three words and the value, and its question."""

    verb: str
    question: str
    values: tuple[str, ...]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""
    Ada Adam Agnes Alan Albert Alice Alma Amir Amos Andrea Anita Anna Anton Arne Arthur Astrid Aziz
    Beatrice Ben Bertha Boris Bruno Camille Carl Carmen Cecil Clara Cora Cyrus Dagmar Daniel Daria
    David Diana Diego Dora Edgar Edith Edwin Elena Elias Elsa Emil Emma Enzo Erik Esther Eva Fatima
    Felix Fiona Flora Frank Frida Gabriel Georg Gerda Gita Grace Greta Gustav Hamid Hanna Harald
    Hector Heidi Helen Henry Hilda Hugo Ibrahim Ida Igor Ines Ingrid Irene Iris Ivan Jack Jakob
    James Jana Jasmin Joan Johan Jonas Jorge Judith Julia Kamal Karen Karl Kate Kemal Kira Klara
    Klaus Lara Lars Laura Leah Leila Lena Leo Liam Lilian Linus Lisa Louis Lucia Luka Lydia Magnus
    Malik Marco Maria Marta Martin Matilda Max Maya Mehmet Mia Milan Mina Mona Nadia Naomi Nathan
    Nico Nina Noah Nora Olaf Olga Oliver Omar Oscar Otto Pablo Paul Paula Pedro Peter Petra Philip
    Priya Quentin Rachel Rafael Rahel Ralf Ramon Raya Rita Robert Rosa Ruben Ruth Salma Samuel
    Sandra Sara Selma Simon Sofia Sonja Stefan Stella Sven Tamar Tania Teresa Theo Thomas Tilda
    Tobias Tomas Ulla Umar Ursula Valentin Vera Victor Viola Walter Wanda Werner William Xenia
    Yara Yasmin Yusuf Zara Zelda Zoe
""")

RELATIONS = (
    Relation(
        "lives in",
        "Where does {name} live?",
        _words("""
            Oslo Bergen Paris Lyon Rome Milano Turin Madrid Seville Lisbon Porto Berlin Hamburg
            Vienna Graz Zurich Geneva Prague Warsaw Krakow Athens Cairo Tunis Lagos Nairobi Dakar
            Delhi Mumbai Tokyo Osaka Seoul Lima Bogota Quito Boston Chicago Denver Toronto Sydney
            Perth
        """),
    ),
    Relation(
        "plays the",
        "What does {name} play?",
        _words("""
            violin viola cello bass guitar lute harp banjo piano organ flute oboe clarinet bassoon
            trumpet trombone tuba horn cornet bugle drums timpani marimba xylophone triangle cymbals
            tambourine accordion harmonica recorder saxophone mandolin zither sitar ukulele bagpipes
            fiddle lyre gong celesta
        """),
    ),
    Relation(
        "keeps a",
        "What does {name} keep?",
        _words("""
            cat dog parrot canary rabbit hamster goat sheep pony donkey horse cow pig duck goose
            turkey peacock pigeon falcon raven turtle lizard snake frog newt goldfish carp ferret
            squirrel mouse rat hedgehog llama camel mule lamb calf swan hawk beetle
        """),
    ),
    Relation(
        "bakes fresh",
        "What does {name} bake?",
        _words("""
            bread rolls bagels pretzels croissants muffins scones biscuits cookies brownies waffles
            pancakes crepes doughnuts cupcakes cakes tarts pies quiches strudel baguettes buns toast
            crackers flatbread cornbread gingerbread shortbread macaroons eclairs pastries pizza
            focaccia ciabatta brioche challah naan tortillas dumplings rusks
        """),
    ),
)

_FILLER_SUBJECTS = _words("""
    rain wind river harbour market bridge tower garden museum library station mill forest valley
    lake road village castle theatre bakery
""")
_FILLER_VERBS = _words("""
    changed rested waited opened closed shone glittered slept grew faded stirred lingered returned
    vanished appeared
""")
_FILLER_TIMES = (
    "at dawn",
    "at noon",
    "in the evening",
    "after the storm",
    "before winter",
    "for many hours",
    "as it always had",
    "without a sound",
    "by the old wall",
    "under a pale sky",
)
_FILLER_FORMS = (
    "The {subject} {verb} {time}.",
    "That year the {subject} {verb}.",
    "Nobody knew why the {subject} {verb} {time}.",
    "People said that the {subject} {verb} {time}.",
    "The {subject} and the {other} {verb}.",
)


@dataclass(frozen=True)
class Fact:
    """One value of one person, and the sentences about it."""

    name: str
    relation: Relation
    value: str

    @property
    def sentence(self) -> str:
        return f"{self.name} {self.relation.verb} {self.value}."

    @property
    def update(self) -> str:
        """The sentence where this value replaces an earlier one."""
        return f"{self.name} {self.relation.verb} {self.value} now."

    @property
    def question(self) -> str:
        return self.relation.question.format(name=self.name)


@dataclass
class Notebook:
    """The facts written so far: the value that counts now, for each person and relation."""

    rng: random.Random
    relations: tuple[Relation, ...] = RELATIONS
    current: dict[tuple[str, str], Fact] = field(default_factory=dict)
    _unused: list[tuple[str, Relation]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._unused = [(name, relation) for name in NAMES for relation in self.relations]
        self.rng.shuffle(self._unused)

    def new_fact(self) -> Fact:
        """A fact about something that nothing has been said about."""
        name, relation = self._unused.pop()
        fact = Fact(name, relation, self.rng.choice(relation.values))
        self.current[name, relation.verb] = fact
        return fact

    def changed_fact(self) -> Fact:
        """Another value for something that has one."""
        old = self.rng.choice(list(self.current.values()))
        values = [value for value in old.relation.values if value != old.value]
        fact = Fact(old.name, old.relation, self.rng.choice(values))
        self.current[old.name, old.relation.verb] = fact
        return fact


def filler_sentence(rng: random.Random) -> str:
    """A sentence without any fact."""
    return rng.choice(_FILLER_FORMS).format(
        subject=rng.choice(_FILLER_SUBJECTS),
        other=rng.choice(_FILLER_SUBJECTS),
        verb=rng.choice(_FILLER_VERBS),
        time=rng.choice(_FILLER_TIMES),
    )


@dataclass(frozen=True)
class Document:
    """Sentences in order; `facts` holds the last value of each, in the order they were written.

    `positions[i]` is the index of the sentence that states `facts[i]`.
    """

    sentences: tuple[str, ...]
    facts: tuple[Fact, ...]
    positions: tuple[int, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def make_document(
    seed: int | str, *, num_facts: int, num_sentences: int, num_updates: int | None = None
) -> Document:
    """`num_facts` facts, spread evenly at random over `num_sentences` sentences.

    `num_updates` of them (None: one in eight) are replaced by a later sentence. Raises ValueError
    when they don't fit.
    """
    updates = num_facts // 8 if num_updates is None else num_updates
    stated = num_facts + updates
    most = len(NAMES) * len(RELATIONS)
    if not 1 <= num_facts <= most:
        raise ValueError(f"num_facts is {num_facts}; expected 1 to {most}")
    if not 0 <= updates <= num_facts:
        raise ValueError(f"num_updates is {updates}; expected 0 to num_facts = {num_facts}")
    if stated > num_sentences:
        raise ValueError(
            f"num_sentences is {num_sentences}; expected at least {stated} for the facts"
        )
    rng = random.Random(f"document {seed}")
    book = Notebook(rng)
    places = sorted(rng.sample(range(num_sentences), stated))
    kinds = _kinds(rng, num_facts, updates)
    sentences = [""] * num_sentences
    where: dict[tuple[str, str], int] = {}
    for place, is_new in zip(places, kinds, strict=True):
        fact = book.new_fact() if is_new else book.changed_fact()
        sentences[place] = fact.sentence if is_new else fact.update
        where[fact.name, fact.relation.verb] = place
    sentences = [sentence or filler_sentence(rng) for sentence in sentences]
    facts = sorted(book.current.items(), key=lambda item: where[item[0]])
    return Document(
        tuple(sentences),
        tuple(fact for _, fact in facts),
        tuple(where[key] for key, _ in facts),
    )


def _kinds(rng: random.Random, num_new: int, num_changed: int) -> list[bool]:
    """True for a new fact; the first is new, so that there is one to change."""
    kinds = [True] * (num_new - 1) + [False] * num_changed
    rng.shuffle(kinds)
    return [True, *kinds]


# ---- as the model reads it


def user_turn(text: str) -> str:
    """A user's message and the start of the answer."""
    return f"{USER} {text}{END}{ASSISTANT}"


def answer_turn(answer: str) -> str:
    """What the model is to write: a space, the sentence and the end of the turn."""
    return f" {answer}{END}"


def prompt(document: Document, fact: Fact) -> str:
    """One user message: the document, then the question."""
    return user_turn(f"{document.text} {fact.question}")


def training_text(
    rng: random.Random, *, num_facts: int, num_questions: int, num_sentences: int
) -> Iterator[tuple[str, bool]]:
    """Pieces of one conversation, and whether a piece is an answer.

    Facts come all along the way among filler; a user's message ends in a question about any fact
    said so far, each equally likely. Often all facts are of one or two relations, so that nothing
    but the name tells them apart.
    """
    book = Notebook(rng, tuple(rng.sample(RELATIONS, rng.choice((1, 1, 2, 4)))))
    updates = num_facts // 8
    events = ["fact"] * (num_facts + updates)
    events += ["filler"] * max(0, num_sentences - len(events)) + ["question"] * num_questions
    # Half of the questions come after the last fact, when there is most to remember.
    places = [rng.random() + rng.random() * (event == "question") for event in events]
    order = [event for _, event in sorted(zip(places, events, strict=True))]
    kinds = iter(_kinds(rng, num_facts, updates))
    text = USER
    for event in order:
        if event == "filler":
            text += " " + filler_sentence(rng)
        elif event == "fact":
            if next(kinds):
                text += " " + book.new_fact().sentence
            else:
                text += " " + book.changed_fact().update
        elif book.current:
            fact = rng.choice(list(book.current.values()))
            yield text + f" {fact.question}{END}{ASSISTANT}", False
            yield answer_turn(fact.sentence), True
            text = USER
    yield text, False


def vocabulary() -> list[str]:
    """Every word of the documents and the questions as a token: words with the space before them.

    The role names and the full stop stand without one.
    """
    words: dict[str, None] = {}
    texts = [*NAMES, *_FILLER_SUBJECTS, *_FILLER_VERBS, *_FILLER_TIMES, *_FILLER_FORMS, "now"]
    for relation in RELATIONS:
        texts += [relation.verb, *relation.values, relation.question]
    for text in texts:
        for word in text.replace(".", " ").replace("?", " ").split():
            if "{" not in word:
                words[" " + word] = None
    return ["user", "assistant", *words]

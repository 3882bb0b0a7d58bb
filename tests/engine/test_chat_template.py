"""Chat templates: the same text as transformers, and where the next turn leaves this prompt."""

import copy
import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

import engine.chat_template
from engine.builtin import BUILTIN_MODEL_DIR
from engine.chat_template import ChatTemplate, next_turn_prefix, reusable_points
from engine.tokenizer import Tokenizer
from experiments.make_model import byte_tokenizer

THINKING = r"""
{%- set ns = namespace(last=messages | length) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- macro text(content) %}
    {%- if content is string %}{{ content }}
    {%- else %}{% for part in content %}{{ part.text }}{% endfor %}{% endif %}
{%- endmacro %}
{%- if tools %}{{ '<|im_start|>tools' }}
    {% for tool in tools %}
    {{ tool | tojson }}
    {% endfor %}
{{ tools[0] | tojson(indent=2) }}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' }}
    {%- if message.role == 'assistant' and message.reasoning_content and loop.index0 > ns.last %}
        {{- '<think>\n' ~ message.reasoning_content | trim ~ '\n</think>\n\n' }}
    {%- endif %}
    {%- generation %}{{ text(message.content) | trim }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function or call %}
        {{- '\n<tool_call>\n<function=' ~ call.name ~ '>' }}
        {%- for key, value in call.arguments | items %}
            {%- if key == 'hidden' %}{% continue %}{% endif %}
            {{- '\n' ~ key ~ '=' ~ (value if value is string else value | tojson) }}
        {%- endfor %}
        {{- '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""
ENVIRONMENT = (
    "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ tools is none }}{{ documents }}"
    "{{ messages | tojson }}{{ messages.__class__ }}{{ strftime_now('%Y') }}\n"
)
TOOLS = [
    {"type": "function", "function": {"name": "größe", "parameters": {"b": "<é>", "a": [1, None]}}}
]
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning": "Ask & see.",
    "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"hidden": 0, "n": {"ü": 1.5}}}}
    ],
}
USER = {"role": "user", "content": "Where does Ada live?"}
LOOP = [USER, CALL, {"role": "tool", "content": "<Oslo>"}]
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "x"}],
}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": " Be brief.\n"}, USER],
    [*LOOP, {"role": "assistant", "content": "Oslo.", "reasoning_content": "r", "name": None}],
    [*LOOP, {"role": "assistant", "content": "Oslo.", "thinking": "it says"}, USER],
    [*LOOP, PARTS],
]
TRANSFORMERS = """
import json, sys
sys.modules["fla"] = sys.modules["causal_conv1d"] = None
from transformers import PreTrainedTokenizerFast
out = []
for directory, messages, tools, prompt in json.load(sys.stdin):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    options = {"tools": tools, "add_generation_prompt": prompt, "tokenize": False}
    out.append(tokenizer.apply_chat_template(messages, **options))
print(json.dumps(out))
"""
BUILTIN = ChatTemplate.from_directory(BUILTIN_MODEL_DIR)
WORDS = Tokenizer.from_directory(BUILTIN_MODEL_DIR)


def merging():
    """Bytes, but two newlines, or a colon and a bracket, or a blank and a letter, are one token."""
    library = byte_tokenizer()
    vocab = {**library.get_vocab(with_added_tokens=False), "ĊĊ": 300, ":(": 301, "ĠW": 302}
    merges = [("Ċ", "Ċ"), (":", "("), ("Ġ", "W")]
    library.model = models.BPE(vocab=vocab, merges=merges)
    return Tokenizer(library)


PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}\n<|im_end|>{% endfor %}"
PROMPT = "<|im_start|>assistant:"
PAIRS = {
    "built-in": (BUILTIN, WORDS),
    "thinking": (ChatTemplate({"default": THINKING}), WORDS),
    "colon": (ChatTemplate({"default": PLAIN + PROMPT}), merging()),
    "newline": (ChatTemplate({"default": (PLAIN + PROMPT).replace(":", "\n")}), merging()),
    "blank": (ChatTemplate({"default": (PLAIN + PROMPT).replace(":", " ")}), merging()),
}


def directory(path, config=None, jinja=None):
    path.mkdir()
    shutil.copy(BUILTIN_MODEL_DIR / "tokenizer.json", path)
    if config is not None:
        (path / "tokenizer_config.json").write_text(
            config if isinstance(config, str) else json.dumps(config)
        )
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    return path


def test_texts_are_those_of_transformers(tmp_path):
    named = [{"name": "default", "template": THINKING}, {"name": "tool_use", "template": "T\n\n"}]
    tokens = {"bos_token": {"__type": "AddedToken", "content": "<b>"}, "eos_token": "<|im_end|>"}
    directories = [
        BUILTIN_MODEL_DIR,
        directory(tmp_path / "jinja", {"chat_template": "not this"}, THINKING),
        directory(tmp_path / "named", {"chat_template": named}),
        directory(tmp_path / "variables", tokens | {"pad_token": None}, ENVIRONMENT),
    ]
    jobs = [
        (str(path), messages, tools, prompt)
        for path in directories
        for messages in CONVERSATIONS
        for tools in (None, TOOLS)
        for prompt in (False, True)
    ]
    command = [sys.executable, "-c", TRANSFORMERS]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for (path, messages, tools, prompt), expected in zip(jobs, theirs, strict=True):
        ours = ChatTemplate.from_directory(path)
        text = ours.render(messages, tools=tools, add_generation_prompt=prompt)
        assert text == expected, path
    assert len(set(theirs)) > 40


def test_a_special_token_may_be_a_string_or_an_object_with_its_content(tmp_path):
    config = {"bos_token": {"content": "<b>"}, "eos_token": "<e>", "unk_token": None}
    path = directory(tmp_path / "d", config, "{{ bos_token }}{{ eos_token }}{{ unk_token }}")
    assert ChatTemplate.from_directory(path).render([USER]) == "<b><e>"


def test_a_directory_without_a_template_has_none(tmp_path):
    assert ChatTemplate.from_directory(directory(tmp_path / "a")) is None
    assert ChatTemplate.from_directory(directory(tmp_path / "b", {"eos_token": "x"})) is None


@pytest.mark.parametrize("config", ["{", "[]", '{"chat_template": 3}', '{"chat_template": [{}]}'])
def test_a_bad_config_is_refused_by_its_name(tmp_path, config):
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: "):
        ChatTemplate.from_directory(directory(tmp_path / "d", config))


def test_a_template_that_does_not_compile_is_refused_by_its_file(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: .*compile"):
        ChatTemplate.from_directory(directory(tmp_path / "c", {"chat_template": "{% if %}"}))
    with pytest.raises(ValueError, match=r"chat_template\.jinja: .*compile"):
        ChatTemplate.from_directory(directory(tmp_path / "d", "{}", "{{"))
    with pytest.raises(ValueError, match="expected one named 'default'"):
        ChatTemplate({"tool_use": ""})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[0].content.text.x }}", "has no attribute 'text'"),
        ("{{ 'a' + 1 }}", "TypeError: .*str"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'.* is unsafe"),
        ("{{ messages.append(1) }}", "is not safely callable|is unsafe"),
        ("{{ messages[0].update(role='x') }}", "is not safely callable|is unsafe"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_a_value_error(source, message):
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match=message):
        ChatTemplate({"default": source}).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("messages", [[], None, [USER, "hi"], [{"content": {1, 2}}]])
def test_messages_that_are_none_are_refused(messages):
    with pytest.raises(ValueError, match=r"expected one or more objects|set is not JSON"):
        BUILTIN.render(messages)


def test_nesting_without_end_is_refused():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="RecursionError"):
        BUILTIN.render([{"role": "user", "content": deep}])


def test_the_next_turn_extends_the_prompt_and_the_answer_of_the_built_in_template():
    prompt = WORDS.encode(BUILTIN.render([USER]))
    assert reusable_points(BUILTIN, WORDS, [USER], prompt) == [len(prompt)]
    generated = WORDS.encode(" Ada lives in Oslo.<|im_end|>")
    for sent_back in (" Ada lives in Oslo.", "Ada lives in Oslo."):
        expected = prompt + generated + WORDS.encode("<|im_start|>user:")
        assert next_turn_prefix(BUILTIN, WORDS, [USER], sent_back) == expected


def test_earlier_reasoning_is_dropped_by_the_next_user_turn_and_kept_by_a_tool_result():
    """trap 30"""
    template, _ = PAIRS["thinking"]
    prompt = WORDS.encode(template.render([USER]))
    ending = WORDS.encode("<think>\n")
    points = reusable_points(template, WORDS, [USER], prompt)
    assert points == [len(prompt) - len(ending), len(prompt)]
    # In a tool loop the next user turn drops all reasoning since the last one.
    looped = WORDS.encode(template.render(LOOP, tools=TOOLS))
    start = len(WORDS.encode(template.render([USER], tools=TOOLS))) - len(ending)
    other = WORDS.encode(template.render([{**USER, "content": "?"}], tools=TOOLS))
    opening = shared_length(looped, other)
    points = reusable_points(template, WORDS, LOOP, looped, TOOLS)
    assert points == [opening, start, len(looped)]
    assert WORDS.decode(looped[:opening]).endswith("<|im_start|>user\n")
    prefix = next_turn_prefix(template, WORDS, LOOP, "Oslo.", TOOLS)
    assert prefix[:start] == looped[:start] and WORDS.decode(prefix).endswith("<|im_start|>user\n")
    assert "think" not in WORDS.decode(prefix)


def shared_length(a, b):
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


@pytest.mark.parametrize(("source", "role"), [(THINKING, "system"), (PLAIN, "developer")])
def test_another_conversation_starts_with_the_same_system_message(source, role):
    template = ChatTemplate({"default": source})
    opening = [{"role": role, "content": "Answer from the document: Ada lives in Oslo."}]
    prompts = [
        WORDS.encode(template.render([*opening, {"role": "user", "content": text}]))
        for text in ("Where?", "who?")
    ]
    messages = [*opening, {"role": "user", "content": "Where?"}]
    first = reusable_points(template, WORDS, messages, prompts[0])[0]
    assert first == shared_length(*prompts)
    assert reusable_points(template, WORDS, opening, WORDS.encode(template.render(opening)))


def test_a_turn_that_the_template_refuses_gives_no_point():
    no_tools = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    template = ChatTemplate({"default": no_tools + THINKING})
    prompt = WORDS.encode(template.render([USER]))
    assert len(reusable_points(template, WORDS, [USER], prompt)) == 1
    single = "{{ raise_exception('one only') if messages | length > 1 }}x"
    template = ChatTemplate({"default": single})
    assert reusable_points(template, WORDS, [USER], WORDS.encode("x")) == []
    assert next_turn_prefix(template, WORDS, [USER], "y") == []


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    [" Ada", "Ada lives", "\n", "\n\nWhere", " 3", "<|im_end|>", "(", "", ":", "<|im_start|>user:"]
)


@pytest.mark.parametrize("name", list(PAIRS))
@given(
    texts=st.lists(TEXT, min_size=1, max_size=5), answer=TEXT, following=TEXT, system=st.booleans()
)
def test_the_next_prompt_starts_as_predicted(name, texts, answer, following, system):
    template, tokenizer = PAIRS[name]
    roles = ["user", "assistant"] * 3
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    messages = [{"role": "system", "content": "Be brief."}][:system] + messages
    before = copy.deepcopy(messages)
    prompt = tokenizer.encode(template.render(messages))
    points = reusable_points(template, tokenizer, messages, prompt)
    prefix = next_turn_prefix(template, tokenizer, messages, answer)
    assert messages == before
    with pytest.MonkeyPatch.context() as patch:  # nothing known: each text is tokenised in full
        patch.setattr(engine.chat_template, "_shared", lambda *_: (0, 0))
        assert reusable_points(template, tokenizer, messages, prompt) == points
        assert next_turn_prefix(template, tokenizer, messages, answer) == prefix
    turn = [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
    later = tokenizer.encode(template.render(messages + turn))
    if system:
        opening, *points = points
        other = tokenizer.encode(template.render([messages[0], {**turn[1]}]))
        assert other[:opening] == prompt[:opening]
        assert 0 < opening < points[0]
    assert later[: points[0]] == prompt[: points[0]]
    assert later[: len(prefix)] == prefix
    assert len(prefix) >= points[0] > 0


def test_of_a_long_prompt_only_the_end_and_its_opening_are_tokenised():
    class Counting(Tokenizer):
        num_characters = num_decoded = 0

        def encode(self, text):
            self.num_characters += len(text)
            return super().encode(text)

        def decode(self, ids, **options):
            self.num_decoded += len(ids)
            return super().decode(ids, **options)

    system = {"role": "system", "content": "Be brief."}
    for opening in ([], [system]):
        tokenizer = Counting.from_directory(BUILTIN_MODEL_DIR)
        long = [*opening, {"role": "user", "content": USER["content"] * 5000}]
        prompt = WORDS.encode(BUILTIN.render(long))
        assert reusable_points(BUILTIN, tokenizer, long, prompt)[-1] == len(prompt)
        assert tokenizer.num_characters < 1000 and tokenizer.num_decoded < 1000

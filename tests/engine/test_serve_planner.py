"""What the engine is told of a request, without an engine that runs."""

import pytest

from engine import LLM
from engine.api_types import ChatRequest, CompletionRequest
from engine.builtin import BUILTIN_MODEL_DIR
from engine.chat_template import ChatTemplate, next_turn_prefix, reusable_points
from engine.request_planner import RequestPlanner
from tests.engine.server_fixture import FACTS, NAME

SIZES = {"max_num_seqs": 2, "num_slots": 4, "num_blocks": 20}
ASK = [{"role": "user", "content": FACTS}]
TEMPLATE = ChatTemplate.from_directory(BUILTIN_MODEL_DIR)


def planner(*, template=TEMPLATE, **sizes):
    llm = LLM(BUILTIN_MODEL_DIR, **(SIZES | sizes))
    return RequestPlanner(llm, template)


def chat(**fields):
    return ChatRequest.model_validate({"model": NAME, "messages": ASK} | fields)


def completion(**fields):
    return CompletionRequest.model_validate({"model": NAME, "prompt": "x"} | fields)


def test_a_chat_is_the_rendered_conversation_with_its_points_of_reuse():
    plan = planner()
    [job] = plan.chat_jobs(chat(), "r")
    assert plan.tokenizer.decode(job.prompt) == TEMPLATE.render(ASK)
    points = reusable_points(TEMPLATE, plan.tokenizer, ASK, job.prompt)
    assert list(job.save_points) == points != []


def test_the_second_conversation_with_a_system_message_resumes_at_its_end():
    llm = LLM(BUILTIN_MODEL_DIR, num_slots=8, num_blocks=100, max_num_seqs=1)
    plan = RequestPlanner(llm, TEMPLATE)
    system = {"role": "system", "content": FACTS * 3}
    boundaries, prompts = [], []
    for text in ("Ada lives in Oslo. " * 30, "Who lives there? " * 30):
        body = chat(messages=[system, {"role": "user", "content": text}], max_tokens=1)
        [job] = plan.chat_jobs(body, "r")
        llm.add_request(job.prompt, job.sampling, save_points=job.save_points)
        while llm.has_unfinished():
            [output] = llm.step()
        boundaries.append(output.boundary)
        prompts.append(job.prompt)
    shared = next(i for i, (a, b) in enumerate(zip(*prompts, strict=False)) if a != b)
    assert shared < len(prompts[0]) - 128 and boundaries == [0, shared // 64 * 64]
    assert boundaries[1] >= 64


@pytest.mark.parametrize("num_blocks, room", [(6, 5 * 64 + 1), (1000, 32768)])
def test_a_chat_without_a_limit_gets_all_the_room_there_is(num_blocks, room):
    """The pool's, or the model's; the last token needs no K/V row."""
    [job] = planner(num_blocks=num_blocks).chat_jobs(chat(), "r")
    assert job.sampling.max_tokens == room - len(job.prompt)


def test_a_chat_that_leaves_no_room_is_left_to_the_engine_to_refuse():
    [job] = planner(num_blocks=2).chat_jobs(chat(), "r")
    assert len(job.prompt) > 64 + 1 and job.sampling.max_tokens == 1


def test_a_limit_is_taken_under_both_names():
    plan = planner()
    for name in ("max_tokens", "max_completion_tokens"):
        [job] = plan.chat_jobs(chat(**{name: 7}), "r")
        assert job.sampling.max_tokens == 7


def test_the_next_turn_is_prefilled_up_to_its_last_whole_stride():
    plan = planner()
    job = plan.next_turn_job(chat(warmstate={"cache_salt": "s"}), "Bob lives in Rome.")
    prefix = next_turn_prefix(TEMPLATE, plan.tokenizer, ASK, "Bob lives in Rome.")
    assert job.prompt == prefix and job.save_points == (len(prefix) // 64 * 64,)
    assert (job.sampling.max_tokens, job.cache_salt, job.exact) == (1, "s", True)


def test_a_next_turn_below_one_stride_is_not_worth_it():
    short = chat(messages=[{"role": "user", "content": "x"}])
    assert planner().next_turn_job(short, "y") is None


def test_choices_differ_in_seed_and_id_and_wait_for_the_first_of_their_prompt():
    body = completion(prompt=["a", "b"], n=2, seed=3, warmstate={"cache_salt": "s", "exact": False})
    jobs = planner().completion_jobs(body, "r")
    assert [job.request_id for job in jobs] == ["r", "r-1", "r-2", "r-3"]
    assert [job.sampling.seed for job in jobs] == [3, 4, 3, 4]
    assert [job.after for job in jobs] == [None, 0, None, 2]
    assert {job.cache_salt for job in jobs} == {"s"} and not any(job.exact for job in jobs)


@pytest.mark.parametrize(
    "prompt, count", [("x", 1), ([1, 2], 1), (["x", "y"], 2), ([[1], [2], [3]], 3)]
)
def test_answers_are_counted_before_anything_is_planned(prompt, count):
    assert completion(prompt=prompt).num_answers == count
    assert completion(prompt=prompt, n=3).num_answers == 3 * count
    assert chat(n=3).num_answers == 3


def test_what_can_never_fit_is_refused_before_it_is_tokenised_or_checked(monkeypatch):
    """The pool has 19 blocks of 64 tokens; one token stands for at most 13 bytes."""
    plan = planner()

    def tokenise(text):
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(plan.tokenizer, "encode", tokenise)
    limit, most = 19 * 64, 19 * 64 * plan.tokenizer.max_bytes_per_token
    with pytest.raises(ValueError, match=f"has {most + 2} bytes; at most {most} can fit"):
        plan.completion_jobs(completion(prompt="é" * (most // 2 + 1)), "r")
    with pytest.raises(ValueError, match=f"bytes; at most {most} can fit"):
        plan.chat_jobs(chat(messages=[{"role": "user", "content": "x" * most}]), "r")
    with pytest.raises(ValueError, match=f"has {limit + 1} tokens; at most {limit} fit"):
        plan.completion_jobs(completion(prompt=[99999] * (limit + 1)), "r")
    [job] = plan.completion_jobs(completion(prompt=[1] * limit), "r")
    assert len(job.prompt) == limit


def test_a_model_without_a_template_has_no_chat():
    with pytest.raises(ValueError, match="no chat template"):
        planner(template=None).chat_jobs(chat(), "r")

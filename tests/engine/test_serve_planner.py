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


def planner(*, template=TEMPLATE, max_answers=8, **sizes):
    llm = LLM(BUILTIN_MODEL_DIR, **(SIZES | sizes))
    return RequestPlanner(llm, template, max_answers=max_answers)


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


def test_more_answers_than_can_be_queued_are_refused():
    plan = planner(max_answers=8)
    assert len(plan.completion_jobs(completion(prompt=["x"] * 4, n=2), "r")) == 8
    with pytest.raises(ValueError, match="more than 8 answers"):
        plan.completion_jobs(completion(prompt=["x"] * 3, n=3), "r")
    with pytest.raises(ValueError, match="more than 8 answers"):
        plan.chat_jobs(chat(n=9), "r")


def test_a_model_without_a_template_has_no_chat():
    with pytest.raises(ValueError, match="no chat template"):
        planner(template=None).chat_jobs(chat(), "r")

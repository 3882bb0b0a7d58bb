"""Prompts on one document share exactly its beginning, and each asks something else."""

import pytest

from engine.builtin import BUILTIN_MODEL_DIR
from engine.tokenizer import Tokenizer
from experiments.recall_documents import ASSISTANT, END
from experiments.recall_workload import questioned_document


@pytest.mark.parametrize(("prefix", "suffix"), [(64, 64), (1000, 64), (4096, 200)])
def test_prompts_share_exactly_the_document_and_end_where_the_answer_begins(prefix, suffix):
    tokenizer = Tokenizer.from_directory(BUILTIN_MODEL_DIR)
    sizes = {"prefix": prefix, "suffix": suffix, "questions": 9}
    prompts = questioned_document(tokenizer, 1, **sizes)
    assert {len(prompt) for prompt in prompts} == {prefix + suffix}
    assert len({tuple(prompt[:prefix]) for prompt in prompts}) == 1
    assert len({tuple(prompt[prefix : prefix + 64]) for prompt in prompts}) == 9
    assert all(tokenizer.decode(prompt).endswith(END + ASSISTANT) for prompt in prompts)
    assert prompts == questioned_document(tokenizer, 1, **sizes)
    assert prompts[0][:prefix] != questioned_document(tokenizer, 2, **sizes)[0][:prefix]

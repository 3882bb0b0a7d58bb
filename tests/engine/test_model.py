"""The model's own edges; what it computes is tested by the exactness tests and by transformers."""

import torch
from torch.overrides import TorchFunctionMode

from tests.engine.real_model import GREEDY, make_engine, tokens


def test_logits_of_no_row_lie_on_the_device_of_the_model():
    """The ids that pick rows of them lie there, and a GPU's ids can't pick from the host."""
    llm = make_engine(max_num_batched_tokens=64, enable_prefix_caching=False)
    devices = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.empty and args == (0, llm.model_config.vocab_size):
                devices.append((kwargs or {}).get("device"))
            return func(*args, **(kwargs or {}))

    with Watch():
        llm.generate([list(tokens(0, 150))], GREEDY)
    assert devices == [torch.device("cpu")] * 2

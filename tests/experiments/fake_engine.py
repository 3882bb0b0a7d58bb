"""For the tests of how requests are handed in: made-up outputs, and an engine without a model."""

from dataclasses import fields

from engine import RequestOutput


def request_output(prompt=(1,), token_ids=(7,), **more):
    """A finished request; fields that are not named here or by the caller are None."""
    values = dict.fromkeys(field.name for field in fields(RequestOutput))
    values |= {"request_id": "r", "text": "", "finish_reason": "length", "boundary": 0}
    values |= {"num_cached_tokens": 0, "ttft_ms": 1.0, "logits": []}
    return RequestOutput(
        **values | {"prompt_token_ids": list(prompt), "token_ids": list(token_ids)} | more
    )


class OneAtATime:
    """Ends one request at each step, the oldest or the newest, and notes which it held."""

    def __init__(self, *, newest=False):
        self.end = -1 if newest else 0
        self.queue, self.held = [], []

    def add_request(self, prompt, params):
        self.queue.append(prompt)
        return str(prompt)

    def has_unfinished(self):
        return bool(self.queue)

    def step(self):
        self.held.append([prompt[0] for prompt in self.queue])
        done = self.queue.pop(self.end)
        return [request_output(done, request_id=str(done))]

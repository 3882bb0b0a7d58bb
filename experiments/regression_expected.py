"""Where must a request resume? What DESIGN.md says about placement, from the prompts alone.

Nothing of the engine is used: a prompt is cut into strides, each known by the hash of all tokens
up to its end.
"""

from collections.abc import Sequence
from hashlib import blake2b

STRIDE = 64  # tokens: `chunk_stride` and `block_size` of the server
CHECKPOINT_EVERY = 8192  # tokens
MARGIN = 64  # tokens at a prompt's end that the next turn may replace


class Placement:
    """What a server with room for everything has saved after some exact requests, one by one."""

    def __init__(self, *, stride: int = STRIDE, checkpoint_every: int = CHECKPOINT_EVERY) -> None:
        self.stride = stride
        self.checkpoint_every = checkpoint_every
        self._rows: set[bytes] = set()  # strides whose K/V is there
        self._states: set[bytes] = set()

    def serve(self, prompt: Sequence[int], *, point: int = 0) -> int:
        """The boundary this prompt resumes from; afterwards it is saved itself.

        point: how many of its first tokens the next turn's prompt is known to begin with.
        """
        keys = self._keys(prompt)
        reach = next((i for i, key in enumerate(keys) if key not in self._rows), len(keys))
        last = (len(prompt) - 1) // self.stride  # strides below the final token
        margin = MARGIN // self.stride
        usable = min(reach, last)
        resumed = max((i for i in range(1, usable + 1) if keys[i - 1] in self._states), default=0)
        every = self.checkpoint_every // self.stride
        above = (len(prompt) - 1 - MARGIN) // self.stride
        saved = {last, above, point // self.stride}  # near its end, next turn
        if usable - resumed > margin:
            saved.add(usable)  # where it branches off
        for i in range(resumed + 1, len(keys) + 1):
            if i in saved or i % every == 0:
                self._states.add(keys[i - 1])
        self._rows.update(keys)
        return resumed * self.stride

    def _keys(self, prompt: Sequence[int]) -> list[bytes]:
        """One for each whole stride, which says all tokens up to its end."""
        keys, chain = [], blake2b(digest_size=16)
        for end in range(self.stride, len(prompt) + 1, self.stride):
            chain.update(b"".join(i.to_bytes(4, "little") for i in prompt[end - self.stride : end]))
            keys.append(chain.digest())
        return keys

"""The learnt value of a state, by the memory that its eviction frees: its page, and the K/V that no
other state needs."""

from cache.eviction import Flops, Kind, prefill_flops
from cache.shared_memory import SharedMemory
from cache.value_index import ValueIndex


class SizedValueIndex(ValueIndex):
    """`ValueIndex` for slots that share their memory with K/V: value a page.

    A state that others lie deeper than frees one page; the deepest of its path also the K/V down
    from the next shallower state or fork. What it frees grows when those others go.
    """

    def __init__(
        self, memory: SharedMemory, tokens_per_page: float, flops: Flops = prefill_flops
    ) -> None:
        """tokens_per_page: K/V of so many tokens fills a page."""
        super().__init__(flops)
        self._memory = memory
        self._tokens_per_page = tokens_per_page
        memory.on_growth = self._grown

    def worth(self, boundary: int, above: int, kind: Kind) -> float:
        """A prompt's end is the deepest state of its path, for now."""
        deepest = kind in (Kind.TIP, Kind.END)
        kv_pages = (boundary - above) / self._tokens_per_page if deepest else 0.0
        return super().worth(boundary, above, kind) / (1.0 + kv_pages)

    def _work(self, id_: int) -> float:
        return super()._work(id_) / self._memory.pages_freed_by(id_)

    def _grown(self, id_: int) -> None:
        if id_ in self._evictable:
            self._enqueue(self._live[id_])

"""What is remembered of the requests that ended last."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from engine.output import RequestOutput


@dataclass(frozen=True)
class RequestRecord:
    """The facts of one ended request; no text and no token.

    time: when it arrived, seconds since 1970.
    boundary, miss_reason, limit_reason, exact, ttft_ms: as in `RequestOutput`.
    outcome: its finish reason ("stop", "length", "abort", "error"), or "fault" if its step raised.
    """

    request_id: str
    time: float
    prompt_tokens: int
    cached_tokens: int
    boundary: int
    miss_reason: str | None
    limit_reason: str | None
    output_tokens: int
    ttft_ms: float | None
    outcome: str
    exact: bool

    @classmethod
    def of(cls, output: RequestOutput, *, time: float, outcome: str) -> "RequestRecord":
        return cls(
            request_id=output.request_id,
            time=time,
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens,
            boundary=output.boundary,
            miss_reason=output.miss_reason,
            limit_reason=output.limit_reason,
            output_tokens=len(output.token_ids),
            ttft_ms=output.ttft_ms,
            outcome=outcome,
            exact=output.exact,
        )


class RequestLog:
    """The last `limit` records, the newest first. Any thread may call it."""

    def __init__(self, limit: int) -> None:
        """ValueError for a negative limit; 0 remembers nothing."""
        if limit < 0:
            raise ValueError(f"recent_requests={limit}: must be at least 0")
        self._limit = limit
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, record: RequestRecord) -> None:
        """Remember a record and forget the oldest beyond the limit."""
        with self._lock:
            self._records[record.request_id] = record
            while len(self._records) > self._limit:
                self._records.popitem(last=False)

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of one request, or None if it is not among the last ones."""
        with self._lock:
            return self._records.get(request_id)

    def newest_first(self) -> list[RequestRecord]:
        """All records now."""
        with self._lock:
            return list(reversed(self._records.values()))

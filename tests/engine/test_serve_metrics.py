"""/metrics against /stats, and what counts as whose."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.server_fixture import FACTS, RunningServer

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with RunningServer(recent_requests=3) as running:
        fields = {"prompt": FACTS, "max_tokens": 5, "ignore_eos": True}
        for _ in range(2):
            assert running.post(COMPLETE, **fields)[0] == 200
        assert running.post(COMPLETE, prompt="x", max_tokens=1)[0] == 200
        assert running.post(COMPLETE, prompt="x", max_tokens=30_000)[0] == 400
        assert running.post(COMPLETE, prompt=[99999])[0] == 400
        ask = [{"role": "user", "content": FACTS}]
        assert running.post(CHAT, messages=ask, max_tokens=1, ignore_eos=True)[0] == 200
        running.assert_idle()
        yield running


@pytest.fixture(scope="module")
def metrics(server):
    """{(name, label value or None): value}"""
    status, headers, text = server.request("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    return {
        (sample.name, next(iter(sample.labels.values()), None)): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def test_every_statistic_is_exported_with_its_value(server, metrics):
    stats = server.stats()["engine"]
    counters = "queries hits tokens_reused tokens_prefilled tokens_prefilled_idle cold_starts"
    counters += " preemptions tokens_drafted tokens_accepted decodes_replayed decodes_eager"
    for name in counters.split():
        assert metrics[f"warmstate_{name}_total", None] == stats[name]
    assert stats["decodes_eager"] > 0
    for noun, states in (("slots", "live checkpoint free"), ("blocks", "in_use cached free")):
        for state in states.split():
            assert metrics[f"warmstate_{noun}", state] == stats[f"{noun}_{state}"]
    for state in ("waiting", "running", "background"):
        assert metrics["warmstate_requests", state] == stats[f"requests_{state}"]
    assert stats["misses"]
    for reason, count in stats["misses"].items():
        assert metrics["warmstate_misses_total", reason] == count
    for reason, count in stats["saves_skipped"].items():
        assert metrics["warmstate_saves_skipped_total", reason] == count


def test_the_numbers_add_up(server, metrics):
    stats = server.stats()
    assert stats["engine"]["queries"] == 4 and stats["engine"]["hits"] == 1
    assert stats["hit_rate"] == 0.25
    assert stats["engine"]["tokens_prefilled_idle"] > 0
    assert metrics["warmstate_engine_faults_total", None] == 0


def test_requests_are_counted_by_outcome_and_measured_without_background_ones(metrics):
    ended = {label: v for (name, label), v in metrics.items() if name == "warmstate_requests_total"}
    assert ended.pop("refused") == 2  # by the engine, and before it
    assert sum(ended.values()) == 4 and ended.keys() <= {"stop", "length"}
    assert metrics["warmstate_ttft_seconds_count", None] == 4
    assert metrics["warmstate_inter_token_seconds_count", None] == 8
    assert metrics["warmstate_ttft_seconds_sum", None] > 0
    assert metrics["warmstate_restore_seconds_count", None] >= 1


def test_only_the_last_requests_are_remembered_the_newest_first(server):
    recent = server.stats()["recent"]
    assert len(recent) == 3
    assert [record["time"] for record in recent] == sorted(
        (record["time"] for record in recent), reverse=True
    )
    assert recent[0]["request_id"].startswith("chatcmpl-")


def test_two_servers_share_no_numbers(server):
    with RunningServer() as other:
        assert other.stats()["engine"]["queries"] == 0
        assert b"warmstate_queries_total 0.0" in other.request("GET", "/metrics")[2]

"""The page in a real browser."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.engine.server_fixture import FACTS, RunningServer

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 10_000


@pytest.fixture
def page():
    if not Path(CHROMIUM).exists():
        reason = f"no browser at {CHROMIUM}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.complaints = []
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("console", lambda message: page.complaints.append(message.text))
        yield page
        browser.close()


def test_the_page_shows_requests_as_they_end_and_a_lost_connection(page):
    with RunningServer() as server:
        page.goto(server.url)
        page.get_by_text("None yet.").wait_for()
        page.get_by_text("connected", exact=True).wait_for()
        for _ in range(2):
            server.post("/v1/completions", prompt=FACTS, max_tokens=3, ignore_eos=True)
        rows = page.locator("#recent tr")
        rows.nth(1).wait_for()
        server.assert_idle()
        page.wait_for_timeout(1200)
        newest, oldest = (
            [cell.strip() for cell in row.locator("td").all_text_contents()]
            for row in (rows.nth(0), rows.nth(1))
        )
        recent = server.stats()["recent"]
        for cells, record in ((newest, recent[0]), (oldest, recent[1])):
            assert cells[1:4] == [
                str(record[name]) for name in ("prompt_tokens", "cached_tokens", "boundary")
            ]
            assert cells[8] == record["outcome"]
            assert cells[5] == (record["limit_reason"] or "\N{EN DASH}")
        assert recent[1]["miss_reason"] is not None
        assert oldest[4] == recent[1]["miss_reason"] and newest[4] == "hit"
        assert "50.0 %" in page.locator("#numbers").inner_text()
        slots = server.stats()["engine"]["slots_checkpoint"]
        assert f"checkpoints {slots}" in page.locator("#slots").inner_text()
        assert page.complaints == []
        assert not page.get_by_text("connection lost").is_visible()
    page.get_by_text("connection lost").wait_for()


def test_the_page_loads_nothing_from_elsewhere_and_inserts_text_as_text():
    text = (Path(__file__).parents[2] / "engine" / "page.html").read_text()
    for forbidden in ("http:", "https:", "innerHTML", "outerHTML", "insertAdjacent", "eval("):
        assert forbidden not in text

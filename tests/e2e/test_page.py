"""The page at `/`, in a real browser: chat, stop, status; and what is so without one."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fastserve.frontend.page import page
from tests.e2e.harness import DEADLINE_S, Server, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver.chrome.webdriver import WebDriver
    from selenium.webdriver.remote.webelement import WebElement

KEY = "a-key-of-the-page"
# Where screenshots are kept.
ARTEFACTS = Path(os.environ.get("FASTSERVE_TEST_ARTEFACTS", "build/test-artefacts"))

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="chromium and chromedriver are not installed",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    browser.set_page_load_timeout(DEADLINE_S)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def slow_sim() -> Iterator[Server]:
    """An engine that one can be faster than."""
    with Server(
        "--frontends", "2", "--engine", "sim", "--sim-step-ms", "20", "--api-key", KEY,
        "--lane-heartbeat-interval-s", "0.1",
    ) as server:  # fmt: skip
        yield server


def element(browser: WebDriver, selector: str) -> WebElement:
    from selenium.webdriver.common.by import By

    return browser.find_element(By.CSS_SELECTOR, selector)


def texts(browser: WebDriver, selector: str) -> list[str]:
    from selenium.webdriver.common.by import By

    return [one.text for one in browser.find_elements(By.CSS_SELECTOR, selector)]


def opened(browser: WebDriver, server: Server, *, key: str = "") -> None:
    browser.get(server.url + "/")
    browser.execute_script("sessionStorage.setItem('key', arguments[0])", key)
    browser.refresh()


def complaints(browser: WebDriver) -> list[str]:
    """What the console has had to say since it was last asked."""
    entries: list[dict[str, str]] = browser.get_log("browser")  # type: ignore[no-untyped-call]  # theirs
    return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


def say(browser: WebDriver, text: str) -> None:
    element(browser, "#input").send_keys(text)
    element(browser, "#send").click()


def metric(server: Server, name: str, key: str) -> float:
    request = urllib.request.Request(
        server.url + "/metrics", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        rows = answer.read().decode().splitlines()
    return sum(float(row.rpartition(" ")[2]) for row in rows if row.startswith(name))


@needs_chromium
def test_a_message_is_answered_token_by_token_with_its_figures(
    browser: WebDriver, slow_sim: Server
) -> None:
    opened(browser, slow_sim, key=KEY)
    wait_until(lambda: texts(browser, "#model option"))
    element(browser, "#max_tokens").send_keys("40")
    say(browser, "Hello there")
    seen = set()

    def finished() -> bool:
        seen.add(len(texts(browser, ".message.assistant")[0]))
        return bool(texts(browser, ".message.assistant .figures"))

    wait_until(finished)
    assert len(seen) > 3, "it came piece by piece"
    assert texts(browser, ".message.user") == ["Hello there"]
    [figures] = texts(browser, ".message.assistant .figures")
    assert re.fullmatch(r"TTFT \d+ ms · 40 tokens · [\d.]+ tokens/s · length", figures)
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(ARTEFACTS / "page-chat.png"))
    assert (ARTEFACTS / "page-chat.png").stat().st_size > 5_000


@needs_chromium
def test_stop_ends_the_answer_in_the_engine_too(browser: WebDriver, slow_sim: Server) -> None:
    opened(browser, slow_sim, key=KEY)
    wait_until(lambda: texts(browser, "#model option"))
    gone = 'fastserve_requests_aborted_total{reason="client_gone"}'
    before = metric(slow_sim, gone, KEY)
    say(browser, "Tell me everything")
    wait_until(lambda: any(texts(browser, ".message.assistant")))
    element(browser, "#stop").click()
    wait_until(lambda: texts(browser, ".message.assistant .figures"))
    assert "stopped" in texts(browser, ".message.assistant .figures")[0]
    wait_until(lambda: metric(slow_sim, gone, KEY) == before + 1)
    wait_until(lambda: slow_sim.num_in_engine() == 0)
    assert element(browser, "#send").is_enabled(), "and one can go on"


@needs_chromium
def test_without_the_key_it_asks_for_one_and_then_works(
    browser: WebDriver, slow_sim: Server
) -> None:
    opened(browser, slow_sim)
    wait_until(lambda: element(browser, "#key").is_displayed())
    say(browser, "Hello?")
    wait_until(lambda: texts(browser, ".message.error"))
    element(browser, "#key").send_keys(KEY, "\t")
    wait_until(lambda: texts(browser, "#model option"))
    element(browser, "#max_tokens").send_keys("2")
    say(browser, "Hello!")
    wait_until(lambda: "length" in " ".join(texts(browser, ".message.assistant .figures")))


@needs_chromium
def test_the_status_tab_draws_what_happens(browser: WebDriver, slow_sim: Server) -> None:
    opened(browser, slow_sim, key=KEY)
    element(browser, "#tab-status").click()
    wait_until(lambda: len(texts(browser, "#acceptors tr")) == 2)
    element(browser, "#tab-chat").click()
    say(browser, "Go on and on")
    element(browser, "#tab-status").click()

    def running() -> bool:
        shown = (text.partition("\n") for text in texts(browser, "figcaption"))
        return ("Running", "1") in {(title, value) for title, _, value in shown}

    wait_until(running)
    assert element(browser, "polyline").get_attribute("points")
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    assert browser.save_screenshot(str(ARTEFACTS / "page-status.png"))
    element(browser, "#tab-chat").click()
    element(browser, "#stop").click()


@needs_chromium
def test_the_browser_has_nothing_to_complain_of(browser: WebDriver, slow_sim: Server) -> None:
    complaints(browser)  # forget what others caused
    opened(browser, slow_sim, key=KEY)
    element(browser, "#tab-status").click()
    wait_until(lambda: texts(browser, "#acceptors tr"))
    assert complaints(browser) == []


def test_every_metric_of_the_page_is_exported(slow_sim: Server) -> None:
    named = set(re.findall(r"\bfastserve_[a-z_]+\b", page().body.decode()))
    request = urllib.request.Request(
        slow_sim.url + "/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        exported = set(re.findall(r"^fastserve_[a-z_0-9]+", answer.read().decode(), re.MULTILINE))
    histograms = {name.removesuffix("_count") for name in exported if name.endswith("_count")}
    assert len(named) > 8
    assert named <= exported | histograms


def test_nothing_is_asked_of_anybody_else() -> None:
    body = page().body.decode()
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", body)
    # The name of a namespace; nothing is fetched from there.
    assert set(re.findall(r"https?://[^\s\"']+", body)) == {"http://www.w3.org/2000/svg"}


def test_its_policy_names_its_own_script_and_style_alone() -> None:
    answer = page()
    policy = dict(answer.headers)[b"Content-Security-Policy"].decode()
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        [inner] = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), answer.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inner).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_it_can_be_turned_off() -> None:
    with (
        Server("--frontends", "1", "--engine", "sim", "--no-page") as server,
        pytest.raises(urllib.error.HTTPError, match="404"),
    ):
        urllib.request.urlopen(server.url + "/", timeout=DEADLINE_S)

"""The live page in a real browser, while requests run. Needs a Chromium: Debian's chromium-headless-shell will do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from serving import MODEL, Served, served

from jaxkv import LLM
from jaxkv.compression import CompressionConfig

playwright = pytest.importorskip("playwright.sync_api", reason="the page's test needs playwright")

_NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = os.environ.get("JAXKV_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed; set JAXKV_CHROMIUM to one")

KEY = "a-key"
READ_CELLS = "canvas => canvas.width * canvas.height > 0 ? canvas.toDataURL() : ''"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tiny_folder.make(tmp_path_factory.mktemp("tiny"), max_position_embeddings=20_000)
    config = CompressionConfig(method="knorm", budget=256, interval=64, window=16)
    llm = LLM(str(folder), rows=4, pool_blocks=400, block_size=4, prefill_chunk=32, compression=config)
    with served(llm, api_key=KEY) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


def until(page: Any, condition: str) -> None:
    """Wait for a condition. playwright's own way evaluates text in the page, which the page's policy forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"{condition} did not come true")


def is_complaint(said: Any) -> bool:
    # A browser notes every 401 as an error, and the first look has no key.
    return said.type in ("error", "warning") and "401" not in said.text


def test_cells_change_while_requests_run_and_nothing_is_wrong(server: Served, browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 900, "height": 800})
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if is_complaint(said) else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url + "/")
    page.wait_for_selector("#login:not([hidden])")
    assert "API key" in page.inner_text("#state")
    page.fill("#key", KEY)
    page.click("button")
    until(page, "document.querySelector('#legend').children.length === 4")
    assert page.inner_text("h1") == MODEL
    assert page.is_hidden("#login")
    canvas = page.locator("#pool")
    idle = canvas.evaluate(READ_CELLS)
    assert idle and "400 blocks: 400 free" in canvas.get_attribute("aria-label")

    extra = {"ignore_eos": True}
    options = {"model": MODEL, "prompt": "the cat's hat, the dog's log", "max_tokens": 15_000, "n": 2}
    stream = server.client(KEY).completions.create(**options, stream=True, extra_body=extra)
    until(page, "document.querySelectorAll('#requests tr').length === 2")
    until(page, "Number(document.querySelector('#requests tr').children[4].textContent) > 0")
    row = page.locator("#requests tr").first.locator("td").all_inner_texts()
    assert row[1] == "decoding" and 0 < int(row[3]) <= 80 and int(row[4]) > 0
    assert canvas.evaluate(READ_CELLS) != idle
    label = canvas.get_attribute("aria-label")
    assert "400 blocks" in label and " 0 private" not in label
    assert "tokens/s" in page.inner_text("#numbers")
    _screenshot(page, tmp_path)

    stream.close()
    until(page, "document.querySelectorAll('#requests tr').length === 0")
    until(page, "document.querySelector('#pool').getAttribute('aria-label').includes(' 0 private')")
    assert not complaints
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_the_dark(server: Served, browser: Any, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme=scheme)
    context.add_init_script(f"sessionStorage.setItem('jaxkv-key', '{KEY}')")
    page = context.new_page()
    page.goto(server.url + "/")
    until(page, "document.querySelector('#legend').children.length === 4")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(int(part) for part in color[4:-1].split(",")) / 3
    assert (lightness > 128) == (scheme == "light")
    context.close()


def _screenshot(page: Any, folder: Path) -> None:
    """Take the picture of the docs where its name is given, else one that is looked at by nobody."""
    path = Path(os.environ.get("JAXKV_SCREENSHOT", folder / "page.png"))
    page.screenshot(path=path)
    assert path.stat().st_size > 1000

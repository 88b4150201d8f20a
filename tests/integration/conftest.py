"""Headrace as a program, running on a free loopback port with the starter model; and schemas to hold it to."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from attrs import define, frozen

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0


@define
class RunningServer:
    """A server process and where it listens."""

    process: subprocess.Popen[str]
    url: str
    errors: IO[str]
    lines: queue.Queue[str | None]

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def engine_pid(self) -> int:
        """The one child of the server, as the operating system tells it."""
        (pid,) = children_of(self.process.pid)
        return pid

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def wait_until_ready(self) -> None:
        """Ask /ready until it says 200."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.get("/ready").status_code != 200:
            if time.monotonic() > deadline:
                raise AssertionError(f"not ready: {self.get('/ready').text}\n{self.read_errors()}")
            time.sleep(0.02)

    def read_errors(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def read_line(self, pattern: str, *, timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """Read standard output up to a line that matches."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"no line matches {pattern!r}; standard error: {self.read_errors()}"
            found = re.search(pattern, line)
            if found:
                return found

    def wait_until_gone(self, pid: int) -> None:
        """Wait until a process of this server has ended."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while is_alive(pid):
            assert time.monotonic() < deadline, f"process {pid} outlived its server"
            time.sleep(0.02)

    def wait(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        return self.process.wait(timeout_s)


def children_of(pid: int) -> list[int]:
    """List the children of a process; linux only."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server under test: no settings from outside, one BLAS thread."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return clean | {"MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | dict(extra or {})


@contextmanager
def running_server(
    arguments: Sequence[str] = (), *, environ: Mapping[str, str] | None = None, wait_ready: bool = True
) -> Iterator[RunningServer]:
    """Start `headrace serve` in a session of its own and stop it at the end, whatever happened."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace_chat_server", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            env=environment(environ),
            start_new_session=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
        server = RunningServer(process=process, url="", errors=errors, lines=lines)
        try:
            server.url = server.read_line(r"listens on (http://\S+)").group(1)
            if wait_ready:
                server.read_line(r"^Headrace serves \S+ on http://")
            yield server
        finally:
            _stop(process)


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A running Headrace, ready, shared by a module's tests; a parameter (indirect) adds flags."""
    with running_server(getattr(request, "param", ())) as running:
        yield running


@pytest.fixture
def start_server() -> Callable[..., AbstractContextManager[RunningServer]]:
    """`running_server`, for tests that need a server of their own."""
    return running_server


@pytest.fixture
def server_environment() -> dict[str, str]:
    """The environment that servers under test get."""
    return environment()


@frozen
class TabledSchema:
    """A schema that structured output has to serve.

    Attributes:
        name: what it is an example of.
        schema: as somebody might send it.
        bounded: with an end to whatever a model may write as long as it likes; every value of it is one of `schema`.
        unbounded: why a value of `bounded` may still be of any length, by what the schema is; None if it may not.
    """

    name: str
    schema: Any
    bounded: Any
    unbounded: str | None


@pytest.fixture(scope="session")
def tabled_schemas() -> list[TabledSchema]:
    """The schemas of the table that structured output is held to."""
    table = json.loads((Path(__file__).parents[1] / "sampling" / "grammar_schemas.json").read_text("utf-8"))
    return [
        TabledSchema(one["name"], one["schema"], bounded(one["schema"]), one.get("unbounded"))
        for one in table["supported"]
    ]


def bounded(schema: Any) -> Any:
    """Bound strings, numbers, arrays and objects that have no bounds."""
    if isinstance(schema, list):
        return [bounded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: value if name in {"enum", "const"} else bounded(value) for name, value in schema.items()}
    if not {"enum", "const"} & set(schema):
        given = schema.get("type")
        for kind in [given] if isinstance(given, str) else given if isinstance(given, list) else []:
            for name, value in _BOUNDS.get(kind, lambda _: {})(schema).items():
                inner.setdefault(name, value)
        # Only a pattern bounds a key, and it would hold for known ones, too.
        if given == "object" and "properties" not in schema and schema.get("additionalProperties", False) is not False:
            inner["patternProperties"] = {"^.{0,12}$": inner["additionalProperties"]} | inner.get(
                "patternProperties", {}
            )
            inner["additionalProperties"] = False
    return inner


def _bounds_of_string(schema: dict[str, Any]) -> dict[str, Any]:
    return {"maxLength": 40 if {"pattern", "format"} & set(schema) else 16}


def _bounds_of_integer(schema: dict[str, Any]) -> dict[str, Any]:
    least = {} if "exclusiveMinimum" in schema else {"minimum": -9_999}
    return least | ({} if "exclusiveMaximum" in schema else {"maximum": 9_999})


def _bounds_of_number(schema: dict[str, Any]) -> dict[str, Any]:
    return {"multipleOf": 0.01} | _bounds_of_integer(schema)


def _bounds_of_array(schema: dict[str, Any]) -> dict[str, Any]:
    return {} if schema.get("items") is False else {"maxItems": 3}


def _bounds_of_object(schema: dict[str, Any]) -> dict[str, Any]:
    known, required = schema.get("properties", {}), schema.get("required", [])
    # Where some properties are optional their number cannot be bounded, and need not be if there are no others.
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    return {"maxProperties": len(required) + 2} if is_open and set(known) <= set(required) else {}


_BOUNDS = {
    "string": _bounds_of_string,
    "integer": _bounds_of_integer,
    "number": _bounds_of_number,
    "array": _bounds_of_array,
    "object": _bounds_of_object,
}

"""The command `headrace batch`: each request of a file through the API's own routes, many at a time, without a port."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from attrs import define, evolve, frozen

from headrace_chat_server.composition import compose
from headrace_chat_server.console import progress, say
from headrace_chat_server.errors import BatchFileError
from headrace_chat_server.models import find_model, require_backend
from headrace_chat_server.prompt_folder import check_prompt_folder
from headrace_chat_server.settings import ServerSettings, Settings
from headrace_chat_server.stop_signals import stop_signals

if TYPE_CHECKING:
    import httpx

    from headrace_models import ModelSource

ROUTES = ("/v1/chat/completions", "/v1/completions")
EXIT_SOME_FAILED = 1
EXIT_INTERRUPTED = 130

_BASE_URL = "http://127.0.0.1"


@frozen
class BatchLine:
    """One request of a batch file.

    Attributes:
        number: of the line, counted from 1.
        custom_id: names the request in the output; `line-N` if the line gives none.
        url: the route.
        body: what is posted; None for a line that is no request.
        problem: why it is none.
    """

    number: int
    custom_id: str
    url: str = ""
    body: Mapping[str, Any] | None = None
    problem: str | None = None


@define(kw_only=True)
class BatchCounts:
    """How many requests were answered, failed, and had been answered before."""

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0


def run_batch(settings: Settings, source: str, target: str) -> int:
    """Answer every request of a JSONL file into another; return the exit code.

    A line is OpenAI's batch format (`custom_id`, `url`, `body`) or a bare body with `messages` or `prompt`. Each answer
    is written as soon as it is there. Requests whose `custom_id` the target answers already are left out, so that an
    interrupted run can be started again.

    Raises:
        ChatServerError: when a file cannot be used or the model cannot be loaded.
    """
    lines = read_lines(Path(source))
    done = answered_ids(Path(target))
    todo = [line for line in lines if line.custom_id not in done]
    require_backend()
    found = find_model(settings.model)
    try:
        with Path(target).open("a", encoding="utf-8") as output:
            if _ends_within_a_line(Path(target)):
                output.write("\n")
            counts = BatchCounts(num_skipped=len(lines) - len(todo))
            is_whole = asyncio.run(_run(settings, found, todo, output, counts))
    except OSError as error:
        raise BatchFileError(f"{target!r} cannot be written: {error.strerror or error}") from error
    say(_summary(counts, target))
    if not is_whole:
        return EXIT_INTERRUPTED
    return EXIT_SOME_FAILED if counts.num_failed else 0


def read_lines(path: Path) -> list[BatchLine]:
    """Read the requests of a file; blank lines are passed over.

    Raises:
        BatchFileError: it cannot be read, or names two requests alike.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BatchFileError(f"{str(path)!r} cannot be read as UTF-8 text: {error}") from error
    lines = [_line(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    seen: dict[str, int] = {}
    for line in lines:
        if line.custom_id in seen:
            raise BatchFileError(
                f"{str(path)!r}: lines {seen[line.custom_id]} and {line.number} have the same custom_id; "
                f"give each request its own"
            )
        seen[line.custom_id] = line.number
    return lines


def answered_ids(path: Path) -> frozenset[str]:
    """Return the ids that an output file answers with success; an unfinished last line counts for nothing."""
    if not path.exists():
        return frozenset()
    return frozenset(
        str(answer["custom_id"]) for answer in _objects(path) if answer.get("error") is None and "custom_id" in answer
    )


def _ends_within_a_line(path: Path) -> bool:
    """Tell whether a run was killed while it wrote."""
    return path.read_bytes()[-1:] not in (b"", b"\n")


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BatchFileError(f"{str(path)!r} cannot be read as UTF-8 text: {error}") from error
    for text in texts:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _line(number: int, text: str) -> BatchLine:
    custom_id = f"line-{number}"
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BatchLine(number, custom_id, problem=f"line {number} is no JSON: {error}")
    if not isinstance(value, dict):
        return BatchLine(number, custom_id, problem=f"line {number} is no JSON object")
    custom_id = str(value.get("custom_id", custom_id))
    body, url = (value.get("body"), value.get("url")) if "body" in value else (value, _route_of(value))
    if not isinstance(body, dict):
        return BatchLine(number, custom_id, problem=f"line {number}: body is no JSON object")
    if url not in ROUTES:
        return BatchLine(
            number, custom_id, problem=f"line {number}: url is {url!r}; it must be one of {', '.join(ROUTES)}"
        )
    if body.get("stream"):
        return BatchLine(number, custom_id, problem=f"line {number}: stream is true; a batch answers whole")
    return BatchLine(number, custom_id, url, {key: each for key, each in body.items() if key != "custom_id"})


def _route_of(body: Mapping[str, Any]) -> str | None:
    if "messages" in body:
        return ROUTES[0]
    return ROUTES[1] if "prompt" in body else None


async def _run(
    settings: Settings, found: "ModelSource", lines: list[BatchLine], output: IO[str], counts: BatchCounts
) -> bool:
    """Answer the lines; False if a signal ended the run before."""
    # Nobody else can reach the routes, so there is nobody to keep out.
    settings = evolve(settings, server=ServerSettings(log_level=settings.server.log_level))
    with stop_signals() as signals:
        async with _client(settings, found) as client:
            limit = settings.engine.max_queue
            running = asyncio.create_task(_answer_all(client, lines, output, counts, limit=limit))
            stopping = asyncio.create_task(signals.first.wait())
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            is_whole = running.done()
            stopping.cancel()
            running.cancel()
            await asyncio.wait({running, stopping})
            if is_whole:
                running.result()
            return is_whole


@asynccontextmanager
async def _client(settings: Settings, found: "ModelSource") -> AsyncGenerator["httpx.AsyncClient"]:
    check_prompt_folder(settings.engine)
    composition = compose(settings, found)
    try:
        await composition.start()
        await composition.wait_ready()
        import httpx

        transport = httpx.ASGITransport(composition.make_app())
        async with httpx.AsyncClient(transport=transport, base_url=_BASE_URL, timeout=None) as client:  # noqa: S113
            yield client
    finally:
        await composition.close()


async def _answer_all(
    client: "httpx.AsyncClient", lines: list[BatchLine], output: IO[str], counts: BatchCounts, *, limit: int
) -> None:
    gate = asyncio.Semaphore(limit)

    async def answer(line: BatchLine) -> dict[str, object]:
        async with gate:
            return await _answer(client, line)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(line)) for line in lines]
        for done in progress(asyncio.as_completed(tasks), total=len(tasks)):
            record = await done
            output.write(json.dumps(record, ensure_ascii=False) + "\n")
            output.flush()
            if record["error"] is None:
                counts.num_answered += 1
            else:
                counts.num_failed += 1


async def _answer(client: "httpx.AsyncClient", line: BatchLine) -> dict[str, object]:
    record: dict[str, object] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    if line.problem is not None:
        return record | {"response": None, "error": {"code": "invalid_line", "message": line.problem}}
    reply = await client.post(line.url, json={"priority": "batch", **(line.body or {})})
    content = reply.json()
    response = {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id"),
        "body": content,
    }
    error = content.get("error") if reply.is_error else None
    return record | {"response": response, "error": error}


def _summary(counts: BatchCounts, target: str) -> str:
    parts = [f"{counts.num_answered} answered", f"{counts.num_failed} failed"]
    if counts.num_skipped:
        parts.append(f"{counts.num_skipped} answered before")
    return f"{', '.join(parts)}; see {target}"

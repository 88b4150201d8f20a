"""The command `headrace-transcribe file`: transcribes files here, without a server, into text or subtitles."""

import asyncio
import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from attrs import frozen

from headrace_http_api.audio.formats import TEXT_FORMATS, transcript_body
from headrace_models import ModelError
from headrace_models.transcription import SpeechWanted, Take, TranscriptionService
from headrace_models.whisper import TranscribeOptions, Transcription
from headrace_transcription_server.composition import make_service
from headrace_transcription_server.errors import FileProblem
from headrace_transcription_server.models import require_backend
from headrace_transcription_server.settings import TranscriptionSettings

__all__ = ["FORMATS", "FileRequest", "run_files"]

FORMATS = ("txt", "srt", "vtt", "json", "verbose_json")
_SUFFIXES: Mapping[str, str] = {"verbose_json": "json"}


@frozen(kw_only=True)
class FileRequest:
    """What is to be done.

    Attributes:
        output: the file of a single transcript, or the folder of several; None is standard output.
        speech: look for speech first.
    """

    paths: tuple[Path, ...]
    format: str
    output: Path | None
    options: TranscribeOptions
    speech: SpeechWanted | None


class _Bar(Protocol):
    def __call__(self, position_s: float, duration_s: float, /) -> None: ...


def run_files(settings: TranscriptionSettings, request: FileRequest) -> int:
    """Transcribe all files, as one batch; return the exit code.

    Raises:
        FileProblem: a file is at fault, after the others were done; or a transcript cannot be written.
        ModelUnavailable: there is no such model.
    """
    _check_output(request)
    require_backend()
    return asyncio.run(_run(settings, request))


async def _run(settings: TranscriptionSettings, request: FileRequest) -> int:
    service = make_service(settings)
    problems: list[str] = []
    try:
        with _bars(request.paths) as bars:
            gate = asyncio.Semaphore(settings.max_rows)
            jobs = [_transcribe(service, request, path, bars[path], gate) for path in request.paths]
            results = await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        await service.close()
    for path, result in zip(request.paths, results, strict=True):
        if isinstance(result, ModelError):
            problems.append(f"{path}: {result}")
        elif isinstance(result, BaseException):
            raise result
        else:
            _write(render(result, request.format, request.options), path, request)
    if problems:
        raise FileProblem("; ".join(problems))
    return 0


async def _transcribe(
    service: TranscriptionService, request: FileRequest, path: Path, bar: _Bar, gate: asyncio.Semaphore
) -> Transcription:
    async with gate:
        take: Take = await service.submit(path, request.options, speech=request.speech)
        async for progress in take:
            bar(progress.position_s, progress.duration_s)
        return take.transcript


def render(transcript: Transcription, format_: str, options: TranscribeOptions) -> str:
    """Write a transcript in one of `FORMATS`."""
    if format_ in {"json", "verbose_json"}:
        body = transcript_body(
            transcript, task=options.task, is_verbose=format_ == "verbose_json", has_words=options.word_timestamps
        )
        return json.dumps(body, ensure_ascii=False, indent=2) + "\n"
    write, _ = TEXT_FORMATS["text" if format_ == "txt" else format_]
    return write(transcript)


def _check_output(request: FileRequest) -> None:
    if len(request.paths) == 1:
        return
    if request.output is None:
        raise FileProblem("several files make several transcripts: pass the folder for them to --output")
    names = [_name(path, request.format) for path in request.paths]
    if len(set(names)) < len(names):
        raise FileProblem("two files have the same name, so that their transcripts would too: transcribe them apart")
    try:
        request.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileProblem(f"cannot make the folder {str(request.output)!r}: {error.strerror}") from error


def _write(text: str, path: Path, request: FileRequest) -> None:
    if request.output is None:
        sys.stdout.write(text)
        return
    target = request.output if len(request.paths) == 1 else request.output / _name(path, request.format)
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileProblem(f"cannot write {str(target)!r}: {error.strerror}") from error


def _name(path: Path, format_: str) -> str:
    return f"{path.stem}.{_SUFFIXES.get(format_, format_)}"


@contextmanager
def _bars(paths: Sequence[Path]) -> Generator[Mapping[Path, _Bar]]:
    """Show a bar for each file on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield {path: lambda _position_s, _duration_s: None for path in paths}
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def bar_of(task: TaskID) -> _Bar:
            return lambda position_s, duration_s: progress.update(task, completed=position_s, total=duration_s)

        yield {path: bar_of(progress.add_task(path.name, total=None)) for path in paths}

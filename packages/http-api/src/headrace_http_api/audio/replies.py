"""The answers to one take: whole, in any format, or as events while it runs."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from attrs import frozen
from starlette.responses import JSONResponse, Response

from headrace_http_api.audio.fields import Task, TranscriptionFields
from headrace_http_api.audio.formats import TEXT_FORMATS, transcript_body, word_body
from headrace_http_api.audio_ports import Pcm, Progress, Take, TakeTimings, Transcriber, Transcript
from headrace_http_api.error_table import reply_to
from headrace_http_api.sse import frame

__all__ = ["RunningTake", "open_take", "timing_header", "vocabulary_body"]


@frozen(kw_only=True)
class RunningTake:
    """A take that the model has accepted, and what its answer needs."""

    take: Take
    progress: AsyncIterator[Progress]
    first: Progress | None
    model: str
    task: Task
    fields: TranscriptionFields

    async def collect(self) -> Transcript:
        """Wait for the whole transcript."""
        async for _ in self.progress:
            pass
        return self.take.transcript

    def response(self, transcript: Transcript, headers: Mapping[str, str]) -> Response:
        """Build the whole answer in the format that was asked for."""
        headers = {**headers, "x-headrace-language": transcript.language} | timing_header(self.take.timings)
        as_text = TEXT_FORMATS.get(self.fields.response_format)
        if as_text is not None:
            write, media_type = as_text
            return Response(write(transcript), headers={**headers, "content-type": media_type})
        return JSONResponse(self._body(transcript), headers=headers)

    async def frames(self, request_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; a fault on the way is the last one."""
        num_chars = 0
        try:
            if self.first is not None:
                parts, num_chars = self._deltas(self.first, num_chars)
                yield parts
            async for progress in self.progress:
                parts, num_chars = self._deltas(progress, num_chars)
                yield parts
            transcript = self.take.transcript
        except asyncio.CancelledError:
            raise
        except Exception as exc:  # noqa: BLE001 - the response has started, so the table's answer travels as an event
            yield frame({"type": "error", **reply_to(exc, request_id).body})
            return
        yield frame({"type": "transcript.text.done", **self._body(transcript)})

    def _deltas(self, progress: Progress, num_chars: int) -> tuple[bytes, int]:
        parts: list[bytes] = []
        for segment in progress.segments:
            text = segment.text if num_chars else segment.text.lstrip()
            num_chars += len(text)
            event: dict[str, object] = {
                "type": "transcript.text.delta",
                "delta": text,
                "start": round(segment.start_s, 3),
                "end": round(segment.end_s, 3),
            }
            if self.fields.wants_words:
                event["words"] = [word_body(word) for word in segment.words]
            parts.append(frame(event))
        position = {"position": round(progress.position_s, 3), "duration": round(progress.duration_s, 3)}
        parts.append(frame({"type": "transcript.progress", **position}))
        return b"".join(parts), num_chars

    def _body(self, transcript: Transcript) -> dict[str, object]:
        is_verbose = self.fields.response_format == "verbose_json"
        body = transcript_body(transcript, task=self.task, is_verbose=is_verbose, has_words=self.fields.wants_words)
        spans = self.take.speech_spans
        return body | {
            "headrace": {
                "model": self.model,
                "language": transcript.language,
                "duration": round(transcript.duration_s, 3),
                "timings": _timings_body(self.take.timings),
                "vocabulary": vocabulary_body(transcript),
                "vad": None if spans is None else {"speech": [[round(a, 3), round(b, 3)] for a, b in spans]},
            }
        }


async def open_take(
    transcriber: Transcriber,
    audio: bytes | Path | Pcm,
    fields: TranscriptionFields,
    task: Task,
    resources: AsyncExitStack,
) -> RunningTake:
    """Submit audio and wait until the model has accepted it.

    Args:
        resources: cancels the take when it is closed.

    Raises:
        Whatever the service refuses: the audio, the options, or everything for now.
    """
    take = await transcriber.submit(audio, fields.options(task))
    resources.push_async_callback(take.aclose)
    progress = aiter(take)
    first = await anext(progress, None)
    return RunningTake(take=take, progress=progress, first=first, model=transcriber.model_id, task=task, fields=fields)


def vocabulary_body(transcript: Transcript) -> dict[str, object] | None:
    """Tell which terms found room in the prompt (W-16); None without a vocabulary."""
    use = transcript.vocabulary
    if use is None:
        return None
    return {
        "included": list(use.included),
        "omitted": list(use.omitted),
        "token_count": use.token_count,
        "token_budget": use.token_budget,
    }


def timing_header(timings: TakeTimings) -> dict[str, str]:
    """Build the standard header that tells where the time went, in milliseconds."""
    parts = [f"{name};dur={seconds * 1000:.0f}" for name, seconds in _timings_body(timings).items()]
    return {"server-timing": ", ".join(parts)}


def _timings_body(timings: TakeTimings) -> dict[str, float]:
    seconds = {
        "load": timings.load_s,
        "queue": timings.queue_s,
        "vad": timings.vad_s,
        "transcribe": timings.transcribe_s,
        "total": timings.total_s,
    }
    return {name: round(value, 4) for name, value in seconds.items()}

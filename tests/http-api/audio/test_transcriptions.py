"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

import asyncio
import base64
import json

import pytest
from attrs import frozen

from headrace_http_api.assembly import assemble
from headrace_http_api.audio import fields as audio_fields
from headrace_http_api.audio import routes
from headrace_http_api.audio_ports import SpeechFilter

JSON_BODY = {"file": base64.b64encode(b"RIFF" + b"\0\0\0\x3f" * 32_000).decode()}
PATH = "/v1/audio/transcriptions"


def events(response):
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]


@pytest.mark.parametrize(
    ("name", "media_type", "wanted"),
    [
        ("text", "text/plain", "Hello there. Bye.\n"),
        ("srt", "application/x-subrip", "1\n00:00:00,000 --> 00:00:01,000\nHello there.\n\n2\n"),
        ("vtt", "text/vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello there.\n\n"),
    ],
)
async def test_formats_that_are_text(post, name, media_type, wanted):
    """The body is the format itself, with its media type."""
    response = await post(fields={"response_format": name})

    assert response.status_code == 200
    assert response.headers["content-type"].startswith(media_type)
    assert response.text.startswith(wanted)


async def test_json_carries_text_usage_and_details(post, transcriber):
    """OpenAI's shape, with one block of our own; language and times are in headers too."""
    response = await post()

    body = response.json()
    details = body.pop("headrace")
    assert body == {"text": "Hello there. Bye.", "usage": {"type": "duration", "seconds": 2}}
    assert (details["model"], details["language"], details["duration"]) == ("whisper-fake", "en", 2.0)
    assert details["timings"] == {"load": 0.5, "queue": 0.0, "vad": 0.0, "transcribe": 1.25, "total": 1.75}
    assert response.headers["x-headrace-language"] == "en"
    assert "transcribe;dur=1250" in response.headers["server-timing"]
    assert transcriber.takes[0].is_closed


async def test_verbose_json_carries_segments_and_words(post, transcriber, make_segment):
    """Segments are always there, words if they were asked for, under OpenAI's names."""
    transcriber.script = [make_segment(" Hello there.", 0.5, 1.5, has_words=True)]
    pairs = [("response_format", "verbose_json"), ("timestamp_granularities[]", "word")]

    body = (await post(fields=pairs)).json()

    assert body["task"] == "transcribe"
    assert body["duration"] == 2.0
    assert body["segments"][0]["start"] == 0.5
    assert body["segments"][0]["seek"] == 50
    assert [(word["word"], word["start"]) for word in body["words"]] == [("Hello", 0.5), ("there.", 1.0)]
    assert transcriber.submitted[0][1].word_timestamps


async def test_translation_asks_for_english(post, transcriber):
    """The other path is the same but for the task."""
    body = (await post("/v1/audio/translations", fields={"response_format": "verbose_json"})).json()

    assert body["task"] == "translate"
    assert transcriber.submitted[0][1].task == "translate"


async def test_every_field_reaches_the_service(post, transcriber):
    """Each field of a form becomes the option of its meaning."""
    await post(
        fields={
            "model": "whisper-1",
            "language": "de",
            "prompt": "Namen",
            "temperature": "0",
            "beam_size": "5",
            "condition_on_previous_text": "false",
            "no_speech_threshold": "0.4",
            "without_timestamps": "TRUE",
            "vocabulary": "Headrace, Mühle",
            "vad": "1",
            "vad_threshold": "0.3",
            "vad_min_speech_ms": "500",
            "vad_trim": "true",
            "faithful": "true",
            "audio_ctx": "512",
        }
    )

    _, options = transcriber.submitted[0]
    assert (options.language, options.prompt, options.beam_size) == ("de", "Namen", 5)
    assert (options.condition_on_previous_text, options.without_timestamps) == (False, True)
    assert (options.no_speech_threshold, options.audio_context) == (0.4, 512)
    assert options.vocabulary == ("Headrace", "Mühle")
    assert options.repetition_guard is False
    assert options.speech == SpeechFilter(threshold=0.3, min_speech_s=0.5, is_trimming=True)


@pytest.mark.parametrize(
    ("lowest", "tried"), [("0", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)), ("0.5", (0.5, 0.7, 0.9)), ("1", (1.0,))]
)
async def test_temperature_is_where_the_fallback_begins(post, transcriber, lowest, tried):
    """As in OpenAI's command line: steps of 0.2 from the given one on."""
    await post(fields={"temperature": lowest})

    assert transcriber.submitted[0][1].temperature == tried


WRONG = [
    ({"response_format": "mp3"}, "response_format"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": "nan"}, "temperature"),
    ({"temperature": "1.5"}, "temperature"),
    ({"beam_size": "17"}, "beam_size"),
    ({"beam_size": "1.5"}, "beam_size"),
    ({"beam_size": "2", "temperature": "0.2"}, "beam_size"),
    ({"stream": "maybe"}, "stream"),
    ({"stream": "true", "response_format": "srt"}, "response_format"),
    ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
    ({"timestamp_granularities[]": "letter"}, "timestamp_granularities[0]"),
    (
        {"timestamp_granularities[]": "word", "response_format": "verbose_json", "without_timestamps": "true"},
        "without_timestamps",
    ),
    ({"vad_threshold": "0.5"}, "vad_threshold"),
    ({"vad": "true", "vad_threshold": "1"}, "vad_threshold"),
    ({"vad": "true", "vad_min_speech_ms": "-1"}, "vad_min_speech_ms"),
    ({"vad_trim": "true"}, "vad_trim"),
    ({"audio_ctx": "63"}, "audio_ctx"),
    ({"vocabulary": "x" * 16_385}, "vocabulary"),
    ([("vocabulary[]", "a"), ("vocabulary[]", "  ")], "vocabulary[1]"),
    ([("vocabulary[]", "x" * 16_384)] * 65, "vocabulary"),
    ({"prompt": "x" * 100_001}, "prompt"),
    ([("language", "de"), ("language", "en")], "language"),
    ({"include[]": "logprobs"}, "include"),
    ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_wrong_field_is_named_before_work_starts(post, transcriber, fields, param):
    """A 400 tells which field; nothing is submitted."""
    response = await post(fields=fields)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["message"].startswith(param)
    assert transcriber.submitted == []


async def test_empty_texts_count_as_absent_and_unknown_fields_are_listed(post):
    """Forms of many clients carry empty fields; what nobody knows is named in a header."""
    response = await post(fields={"language": "", "temperature": "", "speed": "9", "chunking_strategy": "auto"})

    assert response.status_code == 200
    assert response.headers["x-headrace-ignored"] == "speed"


@pytest.mark.parametrize(
    ("content", "kind", "status", "param"),
    [
        (b"--b--\r\n", "multipart/form-data; boundary=b", 400, "file"),
        (b"nonsense", "multipart/form-data; boundary=b", 400, None),
        (b"x", "multipart/form-data", 400, None),
        (b"", "audio/wav", 415, None),
        (b"{}", "application/json", 400, "file"),
        (b'{"file": 5}', "application/json", 400, "file"),
        (b'{"file": "***"}', "application/json", 400, "file"),
        (b'{"file": "data:audio/wav,abc"}', "application/json", 400, "file"),
        (b'{"file": ""}', "application/json", 400, "file"),
        (b'{"file": "UklGRg==", "audio": "UklGRg=="}', "application/json", 400, "audio"),
        (b'{"input_audio": 5}', "application/json", 400, "input_audio"),
        (b'{"input_audio": {}}', "application/json", 400, "input_audio.data"),
        (b'{"audio": "UklGRg==", "beam_size": "5"}', "application/json", 400, "beam_size"),
        (b'{"audio": "UklGRg==", "vocabulary": 5}', "application/json", 400, "vocabulary"),
    ],
)
async def test_body_that_cannot_be_read(audio_client, transcriber, content, kind, status, param):
    """What is no form and no JSON, or has no audio, is told as such."""
    response = await audio_client.post(PATH, content=content, headers={"content-type": kind})

    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert transcriber.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        JSON_BODY,
        {"audio": "data:audio/wav;base64," + JSON_BODY["file"]},
        {"input_audio": {"data": JSON_BODY["file"], "format": "wav"}, "vocabulary": ["a", "b, c"]},
    ],
)
async def test_audio_in_json(audio_client, transcriber, body):
    """Base64 or a data URL, in any of three places."""
    response = await audio_client.post(PATH, json=body)

    assert response.json()["text"] == "Hello there. Bye."
    assert transcriber.submitted[0][0].duration_s == 2.0
    assert transcriber.submitted[0][1].vocabulary == tuple(body.get("vocabulary", ()))


async def test_long_audio_in_json_goes_to_a_file(audio_client, transcriber, spoken, count_temporary):
    """As one in a form does: it is not held in memory while it waits, and the file is gone at the end."""
    before = count_temporary()
    audio = base64.b64encode(b"RIFF" + spoken(20)).decode()

    response = await audio_client.post(PATH, json={"file": audio})

    assert response.status_code == 200
    assert len(transcriber.paths) == 1
    assert transcriber.submitted[0][0].duration_s == 20.0
    assert count_temporary() == before


async def test_empty_file_and_audio_that_is_none(post):
    """An empty file never reaches the service; what the service cannot read is its 400."""
    empty = await post(content=b"")
    wrong = await post(content=b"no audio at all")

    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "file")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "file")
    assert wrong.json()["error"]["code"] == "invalid_audio"


async def test_large_file_goes_to_disk_and_leaves_it(post, transcriber):
    """More than a mebibyte is handed over as a path, which is gone afterwards."""
    response = await post(content=b"RIFF" + b"\0\0\0\x3f" * 400_000)

    assert response.status_code == 200
    (path,) = transcriber.paths
    assert not path.exists()
    assert transcriber.submitted[0][0].duration_s == 25.0


async def test_body_above_the_limit_is_refused(make_audio_client, transcriber, count_temporary):
    """By its declared length at once, and by its real one while it is read; nothing is left on disk."""
    before = count_temporary()

    async def endless():
        yield FILE_PART
        while True:
            yield b"x" * 65_536

    async with make_audio_client(max_audio_bytes=300_000, max_body_bytes=10) as client:
        declared = await client.post(PATH, files={"file": ("a", b"x" * 400_000)})
        real = await client.post(PATH, content=endless(), headers={"content-type": "multipart/form-data; boundary=b"})
        small = await client.post(PATH, files={"file": ("a", b"RIFF" + bytes(100_000))})

    assert (declared.status_code, real.status_code, small.status_code) == (413, 413, 200)
    assert count_temporary() == before
    assert len(transcriber.submitted) == 1


async def test_fields_of_a_form_are_bounded(post, monkeypatch):
    """Texts stay in memory, so all of them together have a limit."""
    monkeypatch.setattr("headrace_http_api.audio.upload.MAX_FIELD_BYTES", 1000)

    response = await post(fields=[("vocabulary[]", "x" * 300)] * 4)

    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_form")


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("TranscriptionQueueFull", 429, "queue_full"),
        ("TranscriptionUnavailable", 503, "model_unavailable"),
        ("TranscriberClosed", 503, "server_draining"),
        ("TranscriptionFailed", 500, "transcription_failed"),
        ("AudioTooLarge", 413, "payload_too_large"),
        ("UnknownLanguage", 400, "invalid_value"),
        ("VoiceDetectorMissing", 400, "vad_unavailable"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
async def test_errors_of_the_service_have_their_own_status(post, transcriber, make_error, name, status, code, is_late):
    """Also those that only the loaded model raises, and also when a stream was asked for."""
    error = make_error(name, "it cannot be done")
    transcriber.script, transcriber.refusal = ([error], None) if is_late else ([], error)

    response = await post(fields={"stream": "true"})

    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert all(take.is_closed for take in transcriber.takes)


# ---- streams -------------------------------------------------------------------------------------------------


async def test_stream_tells_each_segment_and_then_the_whole(post, transcriber):
    """Deltas put together are the text; each is followed by how far the take has come."""
    response = await post(fields={"stream": "true"})

    assert response.headers["content-type"].startswith("text/event-stream")
    seen = events(response)
    assert [one["type"] for one in seen] == [
        "transcript.progress",
        "transcript.text.delta",
        "transcript.progress",
        "transcript.text.delta",
        "transcript.progress",
        "transcript.text.done",
    ]
    text = "".join(one["delta"] for one in seen if one["type"] == "transcript.text.delta")
    assert text == seen[-1]["text"] == "Hello there. Bye."
    assert seen[-1]["usage"] == {"type": "duration", "seconds": 2}
    assert seen[4]["position"] == 2.0
    assert transcriber.takes[0].is_closed


async def test_stream_with_words(post, transcriber, make_segment):
    """Words need no verbose_json in a stream; each delta carries its own."""
    transcriber.script = [make_segment(" Hello there.", 0.0, 1.0, has_words=True)]

    response = await post(fields=[("stream", "true"), ("timestamp_granularities[]", "word")])

    delta = next(one for one in events(response) if one["type"] == "transcript.text.delta")
    assert [word["word"] for word in delta["words"]] == ["Hello", "there."]


async def test_fault_in_a_stream_is_its_last_event(post, transcriber, make_error, make_segment):
    """The status was sent already; the error travels as an event, and the take is closed."""
    transcriber.script = [make_segment(" One.", 0.0, 1.0), make_error("TranscriptionFailed", "it died")]

    seen = events(await post(fields={"stream": "true"}))

    assert seen[-1]["type"] == "error"
    assert seen[-1]["error"]["code"] == "transcription_failed"
    assert transcriber.takes[0].is_closed


async def call(app, body, *, more_body=False, leaves=None):
    """Call an application as a server does whose client leaves; returns what it sent."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "headers": [(b"content-type", b"multipart/form-data; boundary=b")],
        "query_string": b"",
        "scheme": "http",
    }
    waiting, sent = [{"type": "http.request", "body": body, "more_body": more_body}], []

    async def receive():
        if waiting:
            return waiting.pop()
        if leaves is not None:
            await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent


FILE_PART = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'


@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_that_leaves_cancels_its_take(audio_services, transcriber, make_segment, is_stream):
    """Whether it waits for the whole or for events."""
    transcriber.script = [make_segment(" One.", 0.0, 1.0), asyncio.Event()]
    stream_part = b'--b\r\ncontent-disposition: form-data; name="stream"\r\n\r\n%s\r\n' % str(is_stream).encode()
    body = stream_part + FILE_PART + b"RIFF" + bytes(64_000) + b"\r\n--b--\r\n"

    sent = await call(assemble(routes(audio_services)), body, leaves=transcriber.waiting)

    assert transcriber.takes[0].is_closed
    assert sent[0]["status"] == (200 if is_stream else 499)


async def test_client_gone_in_the_middle_of_its_body_leaves_nothing(audio_services, transcriber, count_temporary):
    """The upload ends, nothing is submitted, no file stays."""
    before = count_temporary()

    sent = await call(assemble(routes(audio_services)), FILE_PART + bytes(2_000_000), more_body=True)

    assert sent[0]["status"] == 499
    assert transcriber.submitted == []
    assert count_temporary() == before


@pytest.mark.parametrize("can_unload", [True, False])
async def test_unload_tells_whether_it_did(audio_client, transcriber, can_unload):
    """Nothing loaded, or something running: no error, but false."""
    transcriber.can_unload = can_unload

    response = await audio_client.post("/admin/transcription/unload")

    assert response.json() == {"unloaded": can_unload}


async def test_vocabulary_and_speech_are_told(post, transcriber):
    """Which terms fitted, and where somebody speaks."""

    @frozen(kw_only=True)
    class Use:
        included: tuple = ("a",)
        omitted: tuple = ("b",)
        token_count: int = 3
        token_budget: int = 223

    transcriber.vocabulary, transcriber.speech_spans = Use(), ((0.25, 1.5),)

    details = (await post(fields={"vad": "true", "vocabulary": "a,b"})).json()["headrace"]

    assert details["vocabulary"] == {"included": ["a"], "omitted": ["b"], "token_count": 3, "token_budget": 223}
    assert details["vad"] == {"speech": [[0.25, 1.5]]}


def test_fields_are_those_of_the_reference():
    """W-21, and the model's name."""
    assert set(audio_fields._KINDS) == {
        "audio_ctx",
        "beam_size",
        "condition_on_previous_text",
        "faithful",
        "language",
        "model",
        "no_speech_threshold",
        "prompt",
        "response_format",
        "stream",
        "temperature",
        "timestamp_granularities",
        "vad",
        "vad_min_speech_ms",
        "vad_threshold",
        "vad_trim",
        "vocabulary",
        "without_timestamps",
    }

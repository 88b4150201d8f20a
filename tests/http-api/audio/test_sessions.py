"""A dictation in pieces: windows, what is final, silence; sessions over HTTP."""

import asyncio
import math

import httpx
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from headrace_http_api.audio import SessionRegistry, create_audio_app
from headrace_http_api.audio import session as session_module
from headrace_http_api.audio.session import Dictation, new_tracker
from headrace_http_api.audio.session_endpoints import session_routes
from headrace_http_api.audio.speech import SpeechTracker
from headrace_http_api.audio.transcripts import settle
from headrace_http_api.audio_ports import SAMPLE_RATE, Pcm, SpeechFilter, TranscriptionOptions
from headrace_http_api.errors import ClientDisconnected

PATH = "/v1/audio/sessions"


def one_per_second(make_segment):
    """Answer with a segment for each second that begins in the audio; it ends a fifth before the next one."""

    def answer(pcm, _options):
        return [
            make_segment(f" {second}.", second, min(second + 0.8, pcm.duration_s))
            for second in range(math.ceil(pcm.duration_s))
        ]

    return answer


# ---- what is final -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "num_final", "next_s"),
    [
        ([], 0, 30.0),
        ([(0.0, 10.0)], 1, 29.0),
        ([(0.0, 29.3)], 1, 29.3),
        ([(0.0, 10.0), (20.0, 30.0)], 1, 20.0),
        ([(0.0, 10.0), (20.0, 29.6)], 1, 20.0),
        ([(0.0, 30.0)], 1, 30.0),
        ([(0.0, 2.0), (14.0, 30.0)], 2, 30.0),
    ],
)
def test_segment_at_the_edge_waits(make_segment, make_transcript, times, num_final, next_s):
    """What may be cut off is heard again with what follows, unless that would go on for ever."""
    segments = [make_segment(" a", start, end) for start, end in times]

    final, following = settle(make_transcript(segments), 30.0)

    assert (len(final), following) == (num_final, next_s)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 30)).map(sorted), max_size=4).map(sorted))
def test_windows_go_on_and_keep_what_was_final(make_segment, make_transcript, times):
    """The next window begins at least half a window later, and behind nothing that is not final."""
    segments = [make_segment(" a", start, end) for start, end in times]

    final, following = settle(make_transcript(segments), 30.0)

    assert 15.0 <= following <= 30.0
    assert list(final) == segments[: len(final)]
    assert all(one.start_s >= following for one in segments[len(final) :])


@pytest.mark.parametrize("pieces_s", [[70.0], [10.0] * 7, [0.25] * 280])
async def test_dictation_says_each_second_once(transcriber, make_segment, pieces_s):
    """However the audio is cut into pieces, windows are the same and nothing is said twice or left out."""
    transcriber.answer = one_per_second(make_segment)
    dictation = Dictation(transcriber, TranscriptionOptions(), None)
    fresh = []
    for seconds in pieces_s:
        fresh += await dictation.feed(Pcm(bytes(round(seconds * SAMPLE_RATE) * 4)))
    before = len(fresh)
    transcript = await dictation.finish()

    starts = [round(one.start_s, 3) for one in transcript.segments]
    assert starts == sorted(set(starts))
    assert list(transcript.segments[:before]) == fresh
    assert transcript.duration_s == 70.0
    assert [pcm.duration_s for pcm, _ in transcriber.submitted[:-1]] == [30.0, 30.0]
    assert all(take.is_closed for take in transcriber.takes)


async def test_windows_are_conditioned_on_what_was_said(transcriber, make_segment):
    """The prompt of the second window ends with the text of the first, and its language is that of the first."""
    transcriber.answer = one_per_second(make_segment)
    dictation = Dictation(transcriber, TranscriptionOptions(prompt="Names."), None)

    await dictation.feed(Pcm(bytes(SAMPLE_RATE * 4 * 65)))

    first, second = (options for _, options in transcriber.submitted)
    assert (first.prompt, first.language) == ("Names.", None)
    assert second.prompt.startswith("Names. 0. 1. 2.")
    assert second.language == "en"


@pytest.mark.parametrize("change", [{"temperature": 0.8}, {"conditioned": False}])
async def test_context_is_dropped(transcriber, make_segment, change):
    """After a window that took a high temperature, and where the request does not want any."""
    segment = evolve(make_segment(" Odd.", 0.0, 29.0), temperature=change.get("temperature", 0.0))
    transcriber.answer = lambda _pcm, _options: [segment]
    options = TranscriptionOptions(condition_on_previous_text=change.get("conditioned", True))
    dictation = Dictation(transcriber, options, None)

    await dictation.feed(Pcm(bytes(SAMPLE_RATE * 4 * 65)))

    assert [options.prompt for _, options in transcriber.submitted] == [None, None]


# ---- speech --------------------------------------------------------------------------------------------------

FRAME_S = 512 / SAMPLE_RATE


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.3, 0.4, 0.9]), max_size=120), st.integers(1, 40))
def test_speech_is_the_same_in_any_pieces(probabilities, size):
    """Spans do not depend on how frames come; they are in order, apart, and long enough."""
    whole, pieces = (SpeechTracker(None, SpeechFilter(min_speech_s=0.1)) for _ in range(2))
    whole.take(probabilities)
    for at in range(0, len(probabilities), size):
        pieces.take(probabilities[at : at + size])

    assert whole.spans == pieces.spans
    assert all(end - start >= 0.1 - 1e-9 for start, end in whole.spans)
    assert all(a[1] <= b[0] for a, b in zip(whole.spans, whole.spans[1:], strict=False))
    assert whole.position_s == pytest.approx(len(probabilities) * FRAME_S)


async def test_silence_only_advances_time(transcriber, silent, spoken):
    """Nothing is transcribed until somebody speaks; then from half a second before."""
    options = TranscriptionOptions(speech=SpeechFilter())
    dictation = Dictation(transcriber, options, new_tracker(transcriber, options))

    await dictation.feed(Pcm(silent(100)))
    assert (transcriber.submitted, dictation.hears_speech, dictation.duration_s) == ([], False, 100.0)

    await dictation.feed(Pcm(spoken(2)))
    assert dictation.hears_speech
    transcript = await dictation.finish()

    (pcm, used), *_ = transcriber.submitted
    assert 2.4 <= pcm.duration_s <= 2.6
    assert used.speech is None
    assert 99.4 <= transcript.segments[0].start_s <= 99.6


async def test_silence_alone_is_an_empty_transcript(transcriber, silent):
    """The model is never asked."""
    options = TranscriptionOptions(speech=SpeechFilter(), language="en")
    dictation = Dictation(transcriber, options, new_tracker(transcriber, options))
    await dictation.feed(Pcm(silent(40)))

    transcript = await dictation.finish()

    assert (transcript.text, transcript.segments, transcript.duration_s) == ("", (), 40.0)
    assert transcriber.submitted == []


# ---- over HTTP -----------------------------------------------------------------------------------------------


async def opened(client, **body):
    response = await client.post(PATH, json=body)
    assert response.status_code == 201
    return f"{PATH}/{response.json()['id']}"


async def test_session_answers_in_the_format_that_was_stored(audio_client, transcriber, make_segment, spoken):
    """Also at finish; segments come with their piece, and again in the whole."""
    transcriber.answer = lambda _pcm, _options: [make_segment(" Hi there.", 0.5, 1.5, has_words=True)]
    session = await opened(audio_client, response_format="verbose_json", timestamp_granularities=["word"])

    piece = (await audio_client.post(f"{session}/audio", content=spoken(31))).json()
    whole = (await audio_client.post(f"{session}/finish")).json()

    assert (piece["samples"], piece["duration"], piece["speech"]) == (31 * SAMPLE_RATE, 31.0, True)
    assert [word["word"] for word in piece["segments"][0]["words"]] == ["Hi", "there."]
    assert whole["segments"][0]["start"] == 0.5
    assert whole["segments"][1]["start"] == 29.5
    assert len(whole["words"]) == 4
    assert whole["duration"] == 31.0
    assert transcriber.num_held == 0


async def test_plain_session_answers_plainly(audio_client, spoken):
    """Without a format the whole is the text alone."""
    session = await opened(audio_client, model="whisper-1", vocabulary="a, b")
    await audio_client.post(f"{session}/audio", content=spoken(2))

    whole = (await audio_client.post(f"{session}/finish")).json()

    assert whole["text"] == "Hello there. Bye."
    assert "segments" not in whole


@pytest.mark.parametrize(
    ("content", "headers", "status", "param"),
    [
        (b"123", {}, 400, None),
        (b"1234", {"content-type": "audio/pcm;rate=8000"}, 400, "rate"),
        (b"1234", {"content-type": "text/plain"}, 415, None),
        (b"", {"content-type": "audio/wav"}, 400, None),
        (b"junk", {"content-type": "audio/wav"}, 400, "file"),
    ],
)
async def test_piece_that_cannot_be_taken(audio_client, spoken, content, headers, status, param):
    """It is refused, and the session goes on without it."""
    session = await opened(audio_client)

    response = await audio_client.post(f"{session}/audio", content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)

    later = await audio_client.post(f"{session}/audio?sample_rate=16000", content=spoken(1))
    assert later.json()["duration"] == 1.0


@pytest.mark.parametrize("seconds", [2, 30])
async def test_pieces_may_be_files(audio_client, spoken, seconds):
    """Small ones and such as go to disk; as a body or as a form."""
    session = await opened(audio_client)

    raw = await audio_client.post(
        f"{session}/audio", content=b"RIFF" + spoken(seconds), headers={"content-type": "audio/wav"}
    )
    form = await audio_client.post(f"{session}/audio", files={"file": ("a.wav", b"RIFF" + spoken(1))})

    assert raw.json()["samples"] == seconds * SAMPLE_RATE
    assert form.json()["duration"] == seconds + 1.0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "srt"}, "response_format"),
        ({"stream": True}, "stream"),
        ({"temperature": 2}, "temperature"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
    ],
)
async def test_session_that_cannot_be_opened(audio_client, transcriber, body, param):
    """The field is named, and nothing is held."""
    response = await audio_client.post(PATH, json=body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert transcriber.num_held == 0


async def test_sessions_end_once(audio_client, transcriber, make_error):
    """Unknown is 404; what was deleted or finished is 409; what looks for speech without a detector never opens."""
    session = await opened(audio_client)
    held = transcriber.num_held

    assert (await audio_client.delete(session)).status_code == 204
    again = await audio_client.post(f"{session}/finish")
    unknown = await audio_client.delete(f"{PATH}/nothing")
    transcriber.detector_refusal = make_error("VoiceDetectorMissing", "install it")
    without = await audio_client.post(PATH, json={"vad": True})

    assert (held, transcriber.num_held) == (1, 0)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "session_closed")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")
    assert (without.status_code, without.json()["error"]["param"]) == (400, "vad")


async def test_number_of_sessions_is_bounded(audio_client, audio_services):
    """One more than may be open is a 429; one that ends makes room."""
    audio_services.sessions.max_open = 2
    first = await opened(audio_client)
    await opened(audio_client)

    refused = await audio_client.post(PATH)
    await audio_client.delete(first)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")
    assert (await audio_client.post(PATH)).status_code == 201


async def test_failure_of_a_piece_comes_back_and_closes_at_finish(audio_client, transcriber, make_error, spoken):
    """A transcript with a hole would be a lie: later calls fail too, and finish closes."""
    transcriber.refusal = make_error("TranscriptionFailed", "it died")
    session = await opened(audio_client)

    statuses = [
        (await audio_client.post(f"{session}/audio", content=spoken(31))).status_code,
        (await audio_client.post(f"{session}/audio", content=spoken(1))).status_code,
        (await audio_client.post(f"{session}/finish")).status_code,
        (await audio_client.post(f"{session}/finish")).status_code,
    ]

    assert statuses == [500, 500, 500, 409]
    assert transcriber.num_held == 0


async def test_full_queue_is_waited_for(audio_client, transcriber, make_error, spoken, monkeypatch):
    """The piece was taken in: it is transcribed when there is room, once, and the session goes on."""
    monkeypatch.setattr(session_module, "QUEUE_RETRY_S", 0.001)
    transcriber.refusals = [make_error("TranscriptionQueueFull", "send it again later") for _ in range(2)]
    session = await opened(audio_client)

    piece = await audio_client.post(f"{session}/audio", content=spoken(31))
    whole = await audio_client.post(f"{session}/finish")

    assert (piece.status_code, piece.json()["duration"], transcriber.refusals) == (200, 31.0, [])
    assert whole.status_code == 200
    assert transcriber.submitted[0][0].duration_s == 30.0


async def test_language_is_checked_before_a_session_opens(audio_client, transcriber, make_error):
    """What the model cannot do is told when the session is asked for, and nothing is held."""
    transcriber.options_refusal = make_error("UnknownLanguage", "language is 'xx'")

    response = await audio_client.post(PATH, json={"language": "xx"})

    assert (response.status_code, response.json()["error"]["param"]) == (400, "language")
    assert transcriber.num_held == 0


async def test_client_that_leaves_while_it_opens_a_session_is_no_fault_of_the_server(audio_services, transcriber):
    """The body never came whole: nothing is logged as a failure, and nothing is held."""
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive():
        return next(messages)

    (create, *_) = session_routes(audio_services)
    with pytest.raises(ClientDisconnected):
        await create.endpoint(Request({"type": "http", "method": "POST", "headers": [], "path": PATH}, receive))
    assert transcriber.num_held == 0


async def test_session_deleted_while_it_transcribes(audio_client, transcriber, spoken):
    """The piece under way ends with 409, its take is cancelled, the model is free."""
    transcriber.script = [asyncio.Event()]
    session = await opened(audio_client)

    piece = asyncio.create_task(audio_client.post(f"{session}/audio", content=spoken(31)))
    await transcriber.waiting.wait()
    deleted = await audio_client.delete(session)

    assert deleted.status_code == 204
    assert (await piece).status_code == 409
    assert transcriber.takes[0].is_closed
    assert transcriber.num_held == 0


async def test_pieces_of_one_session_follow_each_other(audio_client, transcriber, make_segment, spoken):
    """The second waits for the first, and comes after it."""
    gate = asyncio.Event()
    transcriber.script = [gate, make_segment(" One.", 0.0, 1.0)]
    session = await opened(audio_client)

    first = asyncio.create_task(audio_client.post(f"{session}/audio", content=spoken(31)))
    await transcriber.waiting.wait()
    second = asyncio.create_task(audio_client.post(f"{session}/audio", content=spoken(2)))
    await asyncio.sleep(0)
    gate.set()

    assert ((await first).json()["duration"], (await second).json()["duration"]) == (31.0, 33.0)


async def test_forgotten_session_closes_itself(audio_services, transcriber):
    """Nothing comes for long: the model is let go, and the id is known to be over."""
    services = evolve(audio_services, sessions=SessionRegistry(idle_s=0.01))
    app = create_audio_app(services)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        session = await opened(client)
        await transcriber.released.wait()
        response = await client.post(f"{session}/audio", content=bytes(4))

    assert response.status_code == 409

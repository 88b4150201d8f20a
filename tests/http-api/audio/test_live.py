"""A voice that is followed while it speaks, and the WebSocket that does it."""

import asyncio
import itertools
import json
import struct
from contextlib import asynccontextmanager

import pytest
import websockets
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from headrace_http_api import ApiConfig
from headrace_http_api.audio import SessionRegistry, create_audio_app
from headrace_http_api.audio.live import Final, LiveOptions, LiveTranscription, Partial
from headrace_http_api.audio.live_endpoint import live_routes
from headrace_http_api.audio.speech import SpeechTracker
from headrace_http_api.audio_ports import SAMPLE_RATE, Pcm, SpeechFilter, TranscriptionOptions
from headrace_http_api.outlet import ABORT_KEY

HALF_SECOND = SAMPLE_RATE // 2
ONE_BY_ONE = itertools.repeat(1)


def numbered(number):
    """Half a second of audio that says a number: its samples are that number."""
    return struct.pack("<f", number) * HALF_SECOND


@pytest.fixture(scope="session")
def make_reading(make_transcriber, make_word, make_timed_segment):
    """Make a service that reads such audio: each half second of it is a word, silence is none."""

    def answer(pcm, _options):
        words = []
        for place in range(round(len(pcm.data) / 4 / HALF_SECOND)):
            at = 4 * (place * HALF_SECOND + HALF_SECOND // 2)
            (number,) = struct.unpack("<f", pcm.data[at : at + 4])
            if number:
                words.append(make_word(f" {round(number, 3):g}", place / 2, place / 2 + 0.4))
        return [make_timed_segment(words)] if words else []

    return lambda: make_transcriber(answer=answer)


@pytest.fixture
def reading(make_reading):
    return make_reading()


def told(events):
    """Return every text that the events promise to keep: finals, then what is stable."""
    finals, kept = "", []
    for event in events:
        if isinstance(event, Final):
            finals += event.text
            kept.append(finals)
        else:
            assert event.text.startswith(event.stable)
            kept.append(finals + event.stable)
    return kept


async def spoken_to(session, audio, *, at_once=ONE_BY_ONE):
    """Let a session hear pieces, so many before it transcribes what it can, and so on."""
    events, pieces = [], iter(audio)
    for count in at_once:
        heard = list(itertools.islice(pieces, count))
        for piece in heard:
            await session.hear(Pcm(piece))
        while session.is_due:
            events += await session.advance()
        if not heard:
            return events
    return events


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), max_size=150), st.lists(st.integers(1, 100), max_size=5))
@pytest.mark.parametrize("has_detector", [True, False])
def test_stable_text_only_grows_and_everything_is_said_once(make_reading, has_detector, pattern, at_once):
    """Any speech and silence, however much comes while one pass runs: promises are kept, utterances are counted, each
    word is said once and in order, and no pass hears more than a window."""

    async def run():
        reading = make_reading()
        tracker = SpeechTracker(reading.new_speech_detector(), SpeechFilter()) if has_detector else None
        session = LiveTranscription(reading, TranscriptionOptions(), tracker)
        numbers = [place + 1 if is_spoken else 0 for place, is_spoken in enumerate(pattern)]
        events = await spoken_to(
            session, [numbered(number) for number in numbers], at_once=itertools.chain(at_once, ONE_BY_ONE)
        )
        events += await session.finish()
        kept = told(events)
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(kept))
        said = "".join(final.text for final in session.finals).split()
        assert said == [str(number) for number in numbers if number]
        assert [final.utterance for final in session.finals] == list(range(len(session.finals)))
        assert all(pcm.duration_s <= 28 for pcm, _ in reading.submitted)
        assert session.duration_s == len(pattern) / 2

    asyncio.run(run())


@pytest.mark.parametrize(("ending", "longest_s"), [("", 20.5), (".", 14.0)])
async def test_speech_without_pauses_is_heard_in_short_pieces(make_transcriber, make_reading, ending, longest_s):
    """It is cut behind a sentence, or after a while behind any word; nothing is lost or said twice."""
    plain = make_reading().answer

    def answer(pcm, options):
        segments = plain(pcm, options)
        return [
            evolve(
                segment,
                words=tuple(
                    evolve(word, text=word.text + (ending if int(word.text) % 4 == 0 else "")) for word in segment.words
                ),
            )
            for segment in segments
        ]

    transcriber = make_transcriber(answer=answer)
    session = LiveTranscription(transcriber, TranscriptionOptions(), None)
    await spoken_to(session, [numbered(number) for number in range(1, 61)])
    await session.finish()
    assert max(pcm.duration_s for pcm, _ in transcriber.submitted) <= longest_s
    said = "".join(final.text for final in session.finals).replace(".", "")
    assert said.split() == [str(number) for number in range(1, 61)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), max_size=6), st.lists(st.integers(1, 60), max_size=6))
def test_where_utterances_end_does_not_depend_on_speed(make_reading, patterns, at_once):
    """Finals are the same whether all is transcribed as it comes or late: a pause ends an utterance where it was."""

    async def finals(at_once):
        reading = make_reading()
        session = LiveTranscription(
            reading, TranscriptionOptions(), SpeechTracker(reading.new_speech_detector(), SpeechFilter())
        )
        spoken = [is_spoken for pattern in patterns for is_spoken in (*pattern, False, False)]
        audio = [numbered(place + 1 if is_spoken else 0) for place, is_spoken in enumerate(spoken)]
        await spoken_to(session, audio, at_once=at_once)
        await session.finish()
        return [final.text for final in session.finals]

    in_time = asyncio.run(finals(ONE_BY_ONE))
    late = asyncio.run(finals(itertools.chain(at_once, ONE_BY_ONE)))
    assert in_time == late


async def test_words_are_stable_once_two_passes_have_them_and_a_second_follows(reading):
    """Of half a second each: told as tentative at once; stable when another pass has it and it is no longer the end."""
    session = LiveTranscription(reading, TranscriptionOptions(), None)

    events = await spoken_to(session, [numbered(number) for number in (1, 2, 3, 4)])

    assert [(event.stable, event.text) for event in events] == [
        ("", " 1"),
        ("", " 1 2"),
        (" 1", " 1 2 3"),
        (" 1 2", " 1 2 3 4"),
    ]


async def test_passes_are_greedy_and_know_what_was_said(reading):
    """One temperature, the tokens of the pass before as a draft, an open end; later utterances have the context."""
    tracker = SpeechTracker(reading.new_speech_detector(), SpeechFilter())
    session = LiveTranscription(reading, TranscriptionOptions(word_timestamps=True), tracker)

    await spoken_to(session, [numbered(number) for number in (1, 2, 0, 0, 0, 7)])
    await session.finish()

    passes = [options for _, options in reading.submitted]
    assert {options.temperature for options in passes} == {(0.0,)}
    assert all(options.open_end for options in passes)
    tokens = reading.takes[0].transcript.segments[0].tokens
    assert [options.draft for options in passes[:2]] == [(), tokens]
    assert [final.text for final in session.finals] == [" 1 2", " 7"]
    assert (passes[-1].draft, passes[-1].prompt, passes[-1].language) == ((), "1 2", "en")


async def test_a_pause_makes_final_what_was_heard_to_its_end(reading):
    """Nothing is transcribed again for it."""
    session = LiveTranscription(
        reading, TranscriptionOptions(), SpeechTracker(reading.new_speech_detector(), SpeechFilter())
    )

    events = await spoken_to(session, [numbered(number) for number in (1, 2, 0, 0)])

    assert [type(event) for event in events] == [Partial, Partial, Partial, Final]
    assert [pcm.duration_s for pcm, _ in reading.submitted] == [0.5, 1.0, 1.5]
    assert not await session.finish()


async def test_silence_is_never_transcribed(reading):
    """With a detector; time passes all the same."""
    tracker = SpeechTracker(reading.new_speech_detector(), SpeechFilter())
    session = LiveTranscription(reading, TranscriptionOptions(), tracker)

    events = await spoken_to(session, [numbered(0)] * 60)

    assert (events, list(await session.finish()), reading.submitted) == ([], [], [])
    assert session.duration_s == 30.0


# ---- the WebSocket -------------------------------------------------------------------------------------------


@pytest.fixture
def connect(serve, audio_services):
    """Open a live session at a real server."""

    @asynccontextmanager
    async def opening(*, services=audio_services, **settings):
        app = create_audio_app(evolve(services, config=ApiConfig(**settings.pop("config", {}))))
        async with (
            serve(app) as url,
            websockets.connect(url.replace("http", "ws") + "/v1/audio/live", **settings) as socket,
        ):
            yield socket

    return opening


async def heard(socket):
    """Receive messages to the end."""
    messages = []
    try:
        while True:
            messages.append(json.loads(await socket.recv()))
    except websockets.ConnectionClosed:
        return messages


@pytest.mark.parametrize("encoding", ["f32le", "s16le"])
async def test_live_session_from_start_to_done(connect, reading, serves, encoding):
    """Ready, partials, finals with words, done; the model is let go."""
    async with connect(services=serves(reading)) as socket:
        await socket.send(json.dumps({"type": "start", "encoding": encoding, "language": "en", "speed": 9}))
        for number in (1, 2, 3):
            value = number / 10 if encoding == "f32le" else round(32768 * number / 10)
            await socket.send(struct.pack("<f" if encoding == "f32le" else "<h", value) * HALF_SECOND)
        await socket.send(json.dumps({"type": "finish"}))
        messages = await heard(socket)

    assert messages[0] == {"type": "ready", "model": "whisper-fake", "vad": True, "ignored": ["speed"]}
    assert messages[-1]["type"] == "done"
    assert messages[-1]["duration"] == 1.5
    assert reading.submitted[0][1].word_timestamps
    assert reading.num_held == 0
    assert all(take.is_closed for take in reading.takes)


@pytest.fixture
def held(make_transcriber, make_reading):
    """A service that reads numbers, whose passes wait for the event that is theirs."""

    def make(*events):
        answer, waiting = make_reading().answer, iter(events)

        def held_answer(pcm, options):
            event = next(waiting, None)
            return [*([event] if event else []), *answer(pcm, options)]

        return make_transcriber(answer=held_answer)

    return make


async def test_finish_gives_up_a_pass_that_leaves_something_out(connect, held, serves):
    """What is under way would be heard again anyhow: it is cancelled, and one pass over all follows."""
    service = held(asyncio.Event())
    async with connect(services=serves(service)) as socket:
        await socket.send('{"type": "start"}')
        await socket.send(numbered(1))
        await service.waiting.wait()
        await socket.send(numbered(2))
        await socket.send('{"type": "finish"}')
        messages = await heard(socket)

    assert messages[-1]["text"] == "1 2"
    assert [pcm.duration_s for pcm, _ in service.submitted] == [0.5, 1.0]
    assert all(take.is_closed for take in service.takes)


async def test_finish_waits_for_a_pass_that_hears_all(connect, held, serves):
    """What is under way is the last one."""
    goes_on = asyncio.Event()
    service = held(goes_on)
    async with connect(services=serves(service)) as socket:
        await socket.send('{"type": "start"}')
        await socket.send(numbered(1))
        await service.waiting.wait()
        await socket.send('{"type": "finish"}')
        receiving = asyncio.ensure_future(heard(socket))
        await asyncio.wait([receiving], timeout=0.05)
        goes_on.set()
        messages = await receiving

    assert messages[-1]["text"] == "1"
    assert len(service.submitted) == 1


async def test_finals_carry_words(connect, reading, serves):
    """And the whole text is that of all finals."""
    async with connect(services=serves(reading)) as socket:
        await socket.send('{"type": "start"}')
        for number in (1, 2, 0, 0, 0, 5):
            await socket.send(numbered(number))
        await socket.send('{"type": "finish"}')
        messages = await heard(socket)

    finals = [message for message in messages if message["type"] == "final"]
    assert messages[-1]["text"] == "".join(final["text"] for final in finals).strip() == "1 2 5"
    assert messages[-1]["language"] == "en"
    assert [word["word"] for final in finals for word in final["words"]] == ["1", "2", "5"]


@pytest.mark.parametrize(
    ("first", "param", "code"),
    [
        (b"1234", "type", 1008),
        ("{", None, 1008),
        ('{"type": "finish"}', "type", 1008),
        ('{"type": "start", "sample_rate": 8000}', "sample_rate", 1008),
        ('{"type": "start", "encoding": "mp3"}', "encoding", 1008),
        ('{"type": "start", "beam_size": 5}', "beam_size", 1008),
        ('{"type": "start", "temperature": "hot"}', "temperature", 1008),
        ('{"type": "start", "interval_ms": 1}', "interval_ms", 1008),
    ],
)
async def test_first_message_that_is_wrong(connect, transcriber, first, param, code):
    """The error names the field; the connection closes as the client's fault."""
    async with connect() as socket:
        await socket.send(first)
        (message,) = await heard(socket)
        assert socket.close_code == code

    assert message["type"] == "error"
    assert message["error"]["param"] == param
    assert transcriber.num_held == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
async def test_samples_that_are_no_numbers_are_refused(connect, transcriber, value):
    """At once, also where nobody speaks: a detector would take them for silence."""
    async with connect() as socket:
        await socket.send('{"type": "start"}')
        await socket.send(numbered(0) + struct.pack("<f", value))
        await socket.send('{"type": "finish"}')
        messages = await heard(socket)
        assert socket.close_code == 1008

    assert [message["type"] for message in messages] == ["ready", "error"]
    assert (messages[-1]["error"]["code"], messages[-1]["error"]["param"]) == ("invalid_audio", None)


async def test_service_that_fails_closes_as_the_servers_fault(connect, transcriber, make_error):
    """The table's error travels as a message."""
    transcriber.refusal = make_error("TranscriptionFailed", "it died")
    async with connect() as socket:
        await socket.send('{"type": "start"}')
        await socket.send(numbered(1))
        messages = await heard(socket)
        assert socket.close_code == 1011

    assert messages[-1]["error"]["code"] == "transcription_failed"
    assert transcriber.num_held == 0


@pytest.mark.parametrize(("vad", "is_refused"), [(None, False), (True, True), (False, False)])
async def test_server_without_a_detector(connect, transcriber, make_error, vad, is_refused):
    """Words alone judge pauses then, unless the client insists."""
    transcriber.detector_refusal = make_error("VoiceDetectorMissing", "install it")
    async with connect() as socket:
        await socket.send(json.dumps({"type": "start", "vad": vad}))
        message = json.loads(await socket.recv())

    if is_refused:
        assert (message["type"], message["error"]["param"]) == ("error", "vad")
    else:
        assert (message["type"], message["vad"]) == ("ready", False)


async def test_client_that_leaves_frees_everything(connect, transcriber):
    """In the middle of a take: it is cancelled, the model is let go."""
    transcriber.script = [asyncio.Event()]
    async with connect() as socket:
        await socket.send('{"type": "start"}')
        await socket.send(numbered(1))
        await transcriber.waiting.wait()
        await socket.close()
        await transcriber.released.wait()

    assert transcriber.takes[0].is_closed
    assert transcriber.num_held == 0


async def test_client_that_leaves_behind_its_finish_frees_everything(connect, transcriber):
    """Nobody would read what the last pass says."""
    transcriber.script = [asyncio.Event()]
    async with connect() as socket:
        await socket.send('{"type": "start"}')
        await socket.send(numbered(1))
        await socket.send('{"type": "finish"}')
        await transcriber.waiting.wait()
        await socket.close()
        async with asyncio.timeout(5):
            await transcriber.released.wait()

    assert transcriber.takes[0].is_closed
    assert transcriber.num_held == 0


async def test_sound_that_may_become_speech_is_no_backlog(connect, reading, serves):
    """Nothing is transcribed before it is speech, so that to wait for that would be to wait for ever."""
    async with connect(services=serves(reading)) as socket:
        await socket.send('{"type": "start", "vad": true, "vad_min_speech_ms": 60000}')
        for _ in range(80):
            await socket.send(numbered(1))
        await socket.send('{"type": "finish"}')
        async with asyncio.timeout(5):
            messages = await heard(socket)

    assert [message["type"] for message in messages] == ["ready", "done"]
    assert messages[-1]["duration"] == 40.0
    assert reading.submitted == []


async def test_client_that_never_reads_is_cut(serves, reading):
    """Sending to it ends after the stall timeout: its connection is aborted, its slot and the model are let go."""
    services = evolve(serves(reading), config=ApiConfig(stall_timeout_s=0.05))
    aborted, sent, received = asyncio.Event(), [], asyncio.Queue()
    for message in (
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": '{"type": "start"}'},
        {"type": "websocket.receive", "bytes": numbered(1)},
    ):
        received.put_nowait(message)

    async def send(message):
        sent.append(message["type"])
        if len(sent) > 2:
            await asyncio.Event().wait()

    scope = {"type": "websocket", "path": "/v1/audio/live", "headers": [], "state": {ABORT_KEY: aborted.set}}
    async with asyncio.timeout(5):
        await Starlette(routes=live_routes(services))(scope, received.get, send)

    assert aborted.is_set()
    assert sent == ["websocket.accept", "websocket.send", "websocket.send"]
    assert (reading.num_held, services.sessions.num_open) == (0, 0)


async def test_silent_client_is_closed(connect, audio_services):
    """Nothing comes for long."""
    services = evolve(audio_services, sessions=SessionRegistry(idle_s=0.05))
    async with connect(services=services) as socket:
        (message,) = await heard(socket)

    assert message["error"]["code"] == "session_closed"


@pytest.mark.parametrize(
    ("config", "settings", "status"),
    [
        ({"api_keys": ("k1",)}, {}, 401),
        ({"api_keys": ("k1",)}, {"subprotocols": ["headrace-live", "openai-insecure-api-key.wrong"]}, 401),
        ({"api_keys": ("k1",)}, {"subprotocols": ["headrace-live", "openai-insecure-api-key.k1"]}, None),
        ({"api_keys": ("k1",)}, {"additional_headers": {"authorization": "Bearer k1"}}, None),
        ({}, {"origin": "https://evil.example"}, 403),
        ({"allowed_origins": ("https://good.example",)}, {"origin": "https://good.example"}, None),
        ({"allowed_hosts": ("example.com",)}, {}, 403),
    ],
)
async def test_access_is_checked_before_the_handshake(connect, transcriber, config, settings, status):
    """Keys, as a header or as OpenAI's subprotocol; origins, to which CORS does not apply; hosts."""
    if status is None:
        async with connect(config=config, **settings) as socket:
            await socket.send('{"type": "start"}')
            assert json.loads(await socket.recv())["type"] == "ready"
            assert socket.subprotocol == ("headrace-live" if "subprotocols" in settings else None)
        return
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with connect(config=config, **settings):
            pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["error"]["code"]


async def test_own_page_may_open_a_live_session(serve, audio_services):
    """A page that this server gave has its origin, with http for ws."""
    async with (
        serve(create_audio_app(audio_services)) as url,
        websockets.connect(url.replace("http", "ws") + "/v1/audio/live", origin=url) as socket,
    ):
        await socket.send('{"type": "start"}')
        assert json.loads(await socket.recv())["type"] == "ready"


async def test_live_sessions_count_as_sessions(connect, audio_services):
    """They share the limit, and pin the model."""
    services = evolve(audio_services, sessions=SessionRegistry(max_open=0))
    async with connect(services=services) as socket:
        await socket.send('{"type": "start"}')
        (message,) = await heard(socket)

    assert message["error"]["code"] == "too_many_sessions"


def test_live_options_are_those_of_the_message():
    """Milliseconds become seconds."""
    from headrace_http_api.audio.live_fields import read_live_fields

    fields = read_live_fields({"type": "start", "interval_ms": 300, "pause_ms": 1000, "task": "translate"})

    assert fields.live == LiveOptions(interval_s=0.3, pause_s=1.0)
    assert fields.options().task == "translate"
    assert fields.options().speech == SpeechFilter()


def test_partial_and_final_hide_what_is_said():
    """Representations end up in logs."""
    partial = Partial(utterance=0, stable="secret", text="secret", start_s=0.0, end_s=1.0)
    final = Final(utterance=0, text="secret", start_s=0.0, end_s=1.0, words=())

    assert "secret" not in repr(partial) + repr(final)

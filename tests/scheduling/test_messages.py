"""Laws of the messages: plain data that crosses a process border."""

import itertools
import pickle
import typing

import attrs
import pytest

from headrace_sampling import SamplingParams
from headrace_scheduling import (
    Cancel,
    Cancelled,
    Drain,
    EngineInfo,
    EngineMessage,
    EngineStatus,
    Exclusive,
    Failed,
    Finished,
    GenerateOptions,
    GenerateStats,
    GenerationRequest,
    OperationResult,
    Prefetch,
    Prepare,
    RowEvents,
    StepEvents,
    Stop,
    Submit,
    TextDelta,
)
from headrace_scheduling.wire import pack, unpack

_STATS = GenerateStats(
    num_prompt_tokens=30, num_cached_tokens=10, num_generated_tokens=5, queue_s=0.1, prefill_s=2.0, decode_s=4.0
)
_REQUEST = GenerationRequest(
    prompt_ids=(1, 2, 3),
    options=GenerateOptions(max_tokens=4, stop=("é",), sampling=SamplingParams(temperature=0.5, seed=2**64 - 1)),
)
_MESSAGES = [
    Submit(request_id=1, request=_REQUEST, max_tokens=4, serial=True),
    Cancel(1),
    Prefetch((1, 2)),
    Exclusive(2, "operation"),
    Prepare(3, ("operation", 1)),
    Drain(),
    Stop(),
]
_EVENTS = [
    StepEvents(
        status=EngineStatus(state="ready", num_running=2, detail="because"),
        rows=(
            RowEvents(request_id=1, admitted=True, delta=TextDelta("é", (1, 2))),
            RowEvents(request_id=2, end=Finished(reason="stop", stats=_STATS, stop_string="x")),
            RowEvents(request_id=3, end=Failed(code="request_failed", message="m")),
            RowEvents(request_id=4, end=Cancelled()),
        ),
        operations=(OperationResult(operation_id=1, value=(1,)), OperationResult(operation_id=2, error="e")),
        info=EngineInfo(
            vocab_size=10,
            max_context=20,
            max_rows=2,
            eos_token_ids=frozenset({1}),
            weights_bytes=5,
            device="cpu",
            representation="float32",
            identity="id",
            pid=1,
        ),
    )
]


@pytest.mark.parametrize("message", _MESSAGES + _EVENTS, ids=lambda message: type(message).__name__)
def test_every_message_survives_pickling_and_is_frozen(message):
    """Law: a message equals itself after a trip through pickle, and cannot be changed."""
    assert pickle.loads(pickle.dumps(message)) == message
    if attrs.fields(type(message)):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(message, attrs.fields(type(message))[0].name, None)


@pytest.mark.parametrize("part", [_EVENTS[0], attrs.evolve(_EVENTS[0], rows=(), operations=(), info=None)])
def test_step_events_survive_the_trip_from_the_engines_process(part):
    """Law: what is unpacked equals what was packed, in every field."""
    assert unpack(pack(part)) == part


def test_every_field_of_what_a_step_repeats_travels():
    """Law: a status, a row and a delta that differ from their defaults in every field arrive as they are."""
    numbers = itertools.count(1)
    status = EngineStatus(**{each.name: next(numbers) for each in attrs.fields(EngineStatus)})
    delta = TextDelta(**{each.name: (next(numbers),) for each in attrs.fields(TextDelta)})
    row = RowEvents(**{each.name: next(numbers) for each in attrs.fields(RowEvents)} | {"delta": delta})
    assert unpack(pack(StepEvents(status=status, rows=(row,)))) == StepEvents(status=status, rows=(row,))


def test_the_list_above_is_complete():
    """Law: every kind of message to the engine is pickled by this test."""
    assert {type(message) for message in _MESSAGES} == set(typing.get_args(EngineMessage))


def test_rates_are_computed_tokens_over_time_and_zero_without_time():
    """Law: prefill counts computed prompt tokens, decode the tokens after the first; no time gives 0."""
    assert (_STATS.prefill_tps, _STATS.decode_tps) == (10.0, 1.0)
    still = attrs.evolve(_STATS, prefill_s=0.0, decode_s=0.0)
    assert (still.prefill_tps, still.decode_tps) == (0.0, 0.0)
    assert attrs.evolve(_STATS, num_generated_tokens=1).decode_tps == 0.0


@pytest.mark.parametrize("max_tokens", [0, -1, True, 1.5, "4"])
def test_a_limit_that_is_no_positive_integer_is_refused(max_tokens):
    """Law: options are checked where they are made."""
    with pytest.raises(ValueError, match="max_tokens"):
        GenerateOptions(max_tokens=max_tokens)


@pytest.mark.parametrize("stop", ["text", ("a", 5), ["a"]])
def test_stop_strings_are_a_tuple_of_strings(stop):
    """Law: one string is not taken for a sequence of characters."""
    with pytest.raises(TypeError):
        GenerateOptions(stop=stop)

"""What an engine's process sends for each step, as bytes.

Pickle alone would name every class and every field in each message, and set the fields one by one: most of the time
that the serving process spends on a step. Here what every step repeats travels as bare values in the order of the
fields, and only what is rare, such as an end, is pickled as it is.
"""

from __future__ import annotations

import pickle
from operator import attrgetter

from attrs import fields

from headrace_scheduling.events import TextDelta
from headrace_scheduling.messages import EngineStatus, RowEvents, StepEvents

_status_values = attrgetter(*(field.name for field in fields(EngineStatus)))
_delta_values = attrgetter(*(field.name for field in fields(TextDelta)))


def pack(events: StepEvents) -> bytes:
    """Write the events of one step.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: the value of an operation cannot be pickled.
    """
    rows = [
        (
            row.request_id,
            row.choice,
            row.admitted,
            None if row.delta is None else _delta_values(row.delta),
            row.end,
            row.prompt_logprobs,
        )
        for row in events.rows
    ]
    parts = (_status_values(events.status), rows, events.operations, events.info)
    return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)


def unpack(payload: bytes) -> StepEvents:
    """Read what `pack` wrote; only for bytes of a process of our own."""
    status, rows, operations, info = pickle.loads(payload)  # noqa: S301 - our own child
    return StepEvents(
        EngineStatus(*status),
        tuple(
            [
                RowEvents(request_id, choice, admitted, delta and TextDelta(*delta), end, prompt_logprobs)
                for request_id, choice, admitted, delta, end, prompt_logprobs in rows
            ]
        ),
        operations,
        info,
    )

"""Laws of rows and caches: a row is the same alone, in company, in chunks, after a rollback, beyond its ring."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_chat_server.verification.checks import Check, Measured
from headrace_chat_server.verification.rows import Rows, deviation
from headrace_kvcache import KVScheme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_chat_server.verification.rows import RowModel

__all__ = ["row_in_batch", "row_laws"]

_LENGTHS = (5, 23, 41)
_NUM_DECODED = 6
_NUM_DRAFTS = 3
# Eight bits keep logits within a few hundredths of the unquantized ones; more than this is a wrong scale.
_LOSS_OF_8_BITS = 0.1


def row_laws(
    model: RowModel,
    *,
    vocab_size: int,
    label: str,
    tolerance: float,
    window: int | None = None,
    with_schemes: bool = True,
) -> list[Check]:
    """Return the laws for one model.

    Args:
        model: computes.
        vocab_size: tokens are drawn below it.
        label: names the representation.
        tolerance: share of the largest logit that representation and device may lose.
        window: positions of its rings; None to leave their law out.
        with_schemes: whether to store keys and values in 8 and 4 bits too; its heads must be multiples of 64.
    """
    draw = random.Random(11)  # noqa: S311 - any tokens will do
    tokens = [[draw.randrange(vocab_size) for _ in range(64)] for _ in _LENGTHS]
    given = {"tokens": tokens, "tolerance": tolerance}
    checks = [
        Check(name=f"{label}: a row in a batch equals the row alone", measure=partial(row_in_batch, model, **given)),
        Check(name=f"{label}: prefill in chunks equals prefill at once", measure=partial(_chunks, model, **given)),
        Check(name=f"{label}: a rolled back row equals the row before", measure=partial(_rollback, model, **given)),
    ]
    if window is not None:
        # Token by token beyond the window, against one chunk that never wraps.
        checks.append(
            Check(name=f"{label}: rings of {window} wrap", measure=partial(_wrap, model, window=window, **given))
        )
    if not with_schemes:
        return checks
    for bits in (8, 4):
        measure = partial(row_in_batch, model, scheme=KVScheme.uniform(bits), **given)
        checks.append(Check(name=f"{label}: {bits}-bit keys and values, a row in a batch", measure=measure))
    return [*checks, Check(name=f"{label}: 8-bit keys and values stay close", measure=partial(_close, model, tokens))]


def row_in_batch(
    model: RowModel, *, tokens: Sequence[Sequence[int]], tolerance: float, scheme: KVScheme | None = None
) -> Measured:
    """Decode rows of several lengths together and each by itself, with the same tokens."""
    together = Rows(model, scheme=scheme, max_rows=len(_LENGTHS))
    slots = [together.join(row[:length])[0] for row, length in zip(tokens, _LENGTHS, strict=True)]
    found = [
        together.append(slots, [[row[length + step]] for row, length in zip(tokens, _LENGTHS, strict=True)])
        for step in range(_NUM_DECODED)
    ]
    worst = 0.0
    for index, (row, length) in enumerate(zip(tokens, _LENGTHS, strict=True)):
        alone = Rows(model, scheme=scheme)
        slot, _ = alone.join(row[:length])
        for step in range(_NUM_DECODED):
            expected = alone.append((slot,), [[row[length + step]]])
            worst = _larger(worst, deviation(found[step][index], expected[0]))
    return Measured(deviation=worst, tolerance=tolerance)


def _chunks(model: RowModel, *, tokens: Sequence[Sequence[int]], tolerance: float) -> Measured:
    row = tokens[0][:48]
    _, whole = Rows(model).join(row)
    worst = 0.0
    for chunks in ((1,), (7, 20), (16, 32)):
        _, found = Rows(model).join(row, chunks=chunks)
        worst = _larger(worst, deviation(found, whole))
    return Measured(deviation=worst, tolerance=tolerance)


def _rollback(model: RowModel, *, tokens: Sequence[Sequence[int]], tolerance: float) -> Measured:
    row, drafts = tokens[0], tokens[1]
    rows = Rows(model)
    slot, _ = rows.join(row[:20])
    rows.append((slot,), [drafts[:_NUM_DRAFTS]])
    rows.roll_back(slot, _NUM_DRAFTS)
    found = rows.append((slot,), [row[20:21]])
    clean = Rows(model)
    slot, _ = clean.join(row[:20])
    return Measured(deviation=deviation(found, clean.append((slot,), [row[20:21]])), tolerance=tolerance)


def _wrap(model: RowModel, *, tokens: Sequence[Sequence[int]], tolerance: float, window: int) -> Measured:
    row = [token for part in tokens for token in part][: 3 * window]
    rows = Rows(model)
    slot, _ = rows.join(row[:4])
    found = mx.concatenate([rows.append((slot,), [[token]]) for token in row[4:]], axis=1)
    whole = Rows(model)
    slot = whole.join(row[:4])[0]
    return Measured(deviation=deviation(found, whole.append((slot,), [row[4:]])), tolerance=tolerance)


def _close(model: RowModel, tokens: Sequence[Sequence[int]]) -> Measured:
    row = tokens[2]
    found = []
    for scheme in (KVScheme.uniform(8), None):
        rows = Rows(model, scheme=scheme)
        slot, _ = rows.join(row[:40])
        found.append(rows.append((slot,), [row[40:41]]))
    return Measured(deviation=deviation(found[0], found[1]), tolerance=_LOSS_OF_8_BITS, detail="against unquantized")


def _larger(worst: float, found: float) -> float:
    """Return the larger one, NaN above all; max() would pass over it."""
    return found if found != found or found > worst else worst

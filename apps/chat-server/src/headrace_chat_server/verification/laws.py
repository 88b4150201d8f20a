"""All laws of `headrace doctor --verify`, with what each representation may lose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from headrace_chat_server.verification.row_laws import row_laws
from headrace_chat_server.verification.sampling_laws import sampling_laws
from headrace_chat_server.verification.served_model import greedy_check
from headrace_chat_server.verification.tiny_models import TINY_VOCAB, TINY_WINDOW, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace_chat_server.verification.checks import Check
    from headrace_models import LoadedModel

__all__ = ["laws"]

# Shares of the largest logit. CPUs lose a hundredth of the first; GPUs add up in other orders for other shapes, which
# 16 bits round each time; a wrong mask or position moves logits by tenths.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.06, "float16": 0.02}
_PACKED_FLOAT32 = 1e-3


def laws(loaded: LoadedModel) -> Iterator[Check]:
    """Return the laws of tiny models in three representations, of sampling, and of the loaded model."""
    on_gpu = loaded.device != "cpu"
    packed = mx.bfloat16 if on_gpu else mx.float32
    forms = [
        ("float32", mx.float32, None, _TOLERANCES["float32"]),
        ("bfloat16", mx.bfloat16, None, _TOLERANCES["bfloat16"]),
        ("4-bit", packed, 4, _TOLERANCES["bfloat16"] if on_gpu else _PACKED_FLOAT32),
    ]
    for label, dtype, bits, tolerance in forms:
        tiny = tiny_model(dtype, bits=bits, on_gpu=on_gpu)
        yield from row_laws(tiny, vocab_size=TINY_VOCAB, label=label, tolerance=tolerance, window=TINY_WINDOW)
    yield from sampling_laws()
    tolerance = _served_tolerance(loaded.representation)
    vocab_size = min(loaded.config.vocab_size, loaded.codec.vocab_size)
    yield from row_laws(
        loaded.model, vocab_size=vocab_size, label="served model", tolerance=tolerance, with_schemes=False
    )
    yield greedy_check(loaded)


def _served_tolerance(representation: str) -> float:
    if representation == "float32":
        return _TOLERANCES["float32"]
    return next((_TOLERANCES[name] for name in ("bfloat16", "float16") if name in representation), _PACKED_FLOAT32)

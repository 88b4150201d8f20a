"""The bodies of `POST /signal` and `POST /generate`, which a curve designer sends."""

from typing import Annotated, Any

from attrs import frozen
from cattrs import Converter

from headrace_http_api.sampling_fields import register_sampling_hooks
from headrace_http_api.validation import Between, make_converter
from headrace_sampling import ToneCurve

__all__ = ["CurveRequest", "DrawnCurve", "SignalRequest", "make_curve_converter"]


@frozen
class DrawnCurve:
    """A curve as it is drawn: with fewer than two points there is none yet."""

    tone: ToneCurve | None


@frozen(kw_only=True)
class SignalRequest:
    """A prompt, and by `model` what reads it."""

    prompt: str
    model: str | None = None


@frozen(kw_only=True)
class CurveRequest(SignalRequest):
    """Samples to draw by a curve; `default` draws them by the model's own defaults instead."""

    curve: DrawnCurve | None = None
    default: bool = False
    n: Annotated[int, Between(1, 8)] = 3
    max_tokens: Annotated[int, Between(1, 256)] = 80
    seed: Annotated[int, Between(-(2**63), 2**64 - 1)] | None = None

    @property
    def tone(self) -> ToneCurve | None:
        """The curve to draw by; None draws by the defaults."""
        return None if self.default or self.curve is None else self.curve.tone


def make_curve_converter() -> Converter:
    """Make the strict converter of these requests."""
    converter = make_converter()
    register_sampling_hooks(converter)
    to_tone = converter.get_structure_hook(ToneCurve)

    def to_drawn(value: Any, _kind: type) -> DrawnCurve:
        points = value.get("points") if isinstance(value, dict) else value
        is_begun = isinstance(points, list) and len(points) < 2
        return DrawnCurve(None if is_begun else to_tone(value, ToneCurve))

    converter.register_structure_hook_func(lambda kind: kind is DrawnCurve, to_drawn)
    return converter

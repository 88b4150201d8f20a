"""The fields that say how tokens are picked, and the sampling parameters that they become."""

from typing import Annotated, Any

from attrs import frozen
from cattrs import Converter

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.json_body import field_path, path_step, shown
from headrace_http_api.ports import SamplingDefaults
from headrace_http_api.validation import AtLeast, Between, FieldError
from headrace_sampling import HlgCurve, InvalidSamplingParams, SamplingParams, ToneCurve

__all__ = ["MAX_BIAS", "LogitBias", "SamplingFields", "register_sampling_hooks", "sampling_params"]

MAX_BIAS = 100.0
# A threshold above it excludes nothing: at most one token can be more likely than that.
_MAX_XTC_THRESHOLD = 0.5
_MAX_DRY_WINDOW = 16_384

LogitBias = dict[int, float]
Window = Annotated[int, Between(0, 2**20)]
Penalty = Annotated[float, Between(-2, 2)]

_HLG_FIELDS = ("enabled", "pivot", "pivot_offset", "width", "shoulder", "toe", "gain")


@frozen(kw_only=True)
class SamplingFields:
    """How to pick the tokens of a reply; None is "not given"."""

    temperature: Annotated[float, Between(0, 5)] | None = None
    top_p: Annotated[float, Between(0, 1)] | None = None
    top_k: Annotated[int, AtLeast(-1)] | None = None
    min_p: Annotated[float, Between(0, 1)] | None = None
    typical_p: Annotated[float, Between(0, 1)] | None = None
    top_n_sigma: Annotated[float, Between(-1, 1e6)] | None = None
    xtc_probability: Annotated[float, Between(0, 1)] | None = None
    xtc_threshold: Annotated[float, Between(0, 1)] | None = None
    repetition_penalty: Annotated[float, Between(0, 100)] | None = None
    repetition_context_size: Window | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: Window | None = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: Window | None = None
    dry_multiplier: Annotated[float, Between(0, 100)] | None = None
    dry_base: Annotated[float, Between(1, 1000)] | None = None
    dry_allowed_length: Annotated[int, Between(1, 1024)] | None = None
    dry_penalty_last_n: Annotated[int, Between(-1, _MAX_DRY_WINDOW)] | None = None
    logit_bias: LogitBias | None = None
    min_tokens: Annotated[int, AtLeast(0)] | None = None
    ignore_eos: bool = False
    hlg: HlgCurve | None = None
    curve: ToneCurve | None = None
    seed: Annotated[int, Between(-(2**63), 2**64 - 1)] | None = None


def sampling_params(
    fields: SamplingFields, defaults: SamplingDefaults, vocab_size: int, *, logprobs: int | None = None
) -> SamplingParams:
    """Build the sampling parameters of a request.

    Args:
        defaults: for what the request leaves open.
        vocab_size: of the model.
        logprobs: best candidates to capture per token; None captures nothing.

    Raises:
        InvalidRequest: a bias names a token outside the vocabulary.
    """
    _check_bias(fields.logit_bias or {}, vocab_size)
    given: dict[str, Any] = {
        "temperature": _first(fields.temperature, defaults.temperature),
        "top_p": _first(fields.top_p, defaults.top_p),
        # -1 is how some clients say "off", and a k above the vocabulary filters nothing.
        "top_k": min(max(_first(fields.top_k, defaults.top_k), 0), vocab_size),
        "min_p": _first(fields.min_p, defaults.min_p),
        "typical_p": fields.typical_p,
        "top_n_sigma": None if fields.top_n_sigma is None else max(fields.top_n_sigma, 0),
        "repetition_penalty": _repetition(fields.repetition_penalty),
        "repetition_window": fields.repetition_context_size,
        "presence_penalty": fields.presence_penalty,
        "presence_window": fields.presence_context_size,
        "frequency_penalty": fields.frequency_penalty,
        "frequency_window": fields.frequency_context_size,
        "logit_bias": fields.logit_bias,
        "min_tokens": fields.min_tokens,
        "ignore_eos": fields.ignore_eos,
        "hlg": fields.hlg,
        "curve": fields.curve,
        "seed": fields.seed,
        "logprobs": logprobs,
        **_xtc(fields),
        **_dry(fields),
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def register_sampling_hooks(converter: Converter) -> None:
    """Teach a converter the sampling fields' own forms."""
    converter.register_structure_hook_func(lambda kind: kind == LogitBias, _to_logit_bias)
    converter.register_structure_hook_func(lambda kind: kind is HlgCurve, _to_hlg)
    converter.register_structure_hook_func(lambda kind: kind is ToneCurve, _to_curve)


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def _repetition(penalty: float | None) -> float | None:
    # So small a divisor has no other meaning than "as far as it goes".
    return penalty if not penalty else max(penalty, 1e-4)


def _xtc(fields: SamplingFields) -> dict[str, Any]:
    threshold = fields.xtc_threshold
    if threshold is not None and threshold > _MAX_XTC_THRESHOLD:
        return {}
    return {"xtc_probability": fields.xtc_probability, "xtc_threshold": threshold}


def _dry(fields: SamplingFields) -> dict[str, Any]:
    window = fields.dry_penalty_last_n
    if window == 0:
        return {}
    return {
        "dry_multiplier": fields.dry_multiplier,
        "dry_base": fields.dry_base,
        "dry_allowed_length": fields.dry_allowed_length,
        "dry_window": None if window is None else _MAX_DRY_WINDOW if window < 0 else max(window, 2),
    }


def _check_bias(bias: LogitBias, vocab_size: int) -> None:
    for token_id in bias:
        if token_id >= vocab_size:
            path = field_path("logit_bias", str(token_id))
            raise InvalidRequest(
                f"{path} is outside the vocabulary; token ids of this model lie between 0 and {vocab_size - 1}",
                param=path,
            )


def _to_logit_bias(value: Any, _kind: type) -> LogitBias:
    if not isinstance(value, dict):
        raise FieldError(f"is {shown(value)}; it must be an object from token ids to numbers")
    bias: LogitBias = {}
    for key, amount in value.items():
        subpath = path_step(key)
        if len(key) > 10 or not key.isascii() or not key.isdecimal() or key != str(int(key)):
            raise FieldError("is no token id; write ids as decimal digits in quotes", subpath=subpath)
        if type(amount) not in (int, float) or not -MAX_BIAS <= amount <= MAX_BIAS:
            raise FieldError(
                f"is {shown(amount)}; it must be a number between -{MAX_BIAS:.0f} and {MAX_BIAS:.0f}", subpath=subpath
            )
        bias[int(key)] = float(amount)
    return bias


def _to_hlg(value: Any, _kind: type) -> HlgCurve | None:
    if not isinstance(value, dict):
        raise FieldError(f"is {shown(value)}; it must be an object such as {{'width': 4}}")
    for name in value:
        if name not in _HLG_FIELDS:
            raise FieldError(f"is no field of a curve; there are {', '.join(_HLG_FIELDS)}", subpath=path_step(name))
    given = {name: amount for name, amount in value.items() if amount is not None}
    enabled = given.pop("enabled", True)
    if type(enabled) is not bool:
        raise FieldError(f"is {shown(enabled)}; it must be true or false", subpath=".enabled")
    try:
        curve = HlgCurve(**given)
    except InvalidSamplingParams as error:
        name = error.field.partition(".")[2]
        raise FieldError(
            f"is {shown(error.value)}; it must be {error.allowed}", subpath=path_step(name) if name else ""
        ) from None
    return curve if enabled else None


def _to_curve(value: Any, _kind: type) -> ToneCurve:
    points = value.get("points") if isinstance(value, dict) else value
    if not isinstance(points, list):
        raise FieldError(f"is {shown(value)}; it must be a list of pairs of percentages [probability, wanted]")
    try:
        return ToneCurve(points=tuple(tuple(one) if isinstance(one, list) else one for one in points))
    except InvalidSamplingParams as error:
        raise FieldError(f"has {shown(error.value)}; it must be {error.allowed}") from None

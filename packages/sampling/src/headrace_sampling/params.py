"""The sampling parameters of one row: validated once, frozen, picklable, free of arrays."""

from collections.abc import Callable, Iterable, Mapping
from typing import cast

from attrs import field, frozen

from headrace_sampling.errors import InvalidSamplingParams

_MAX_TEMPERATURE = 1e6
_MAX_TOKEN_ID = 2**31 - 1
_MAX_BIAS = 1e30
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1

BiasPairs = tuple[tuple[int, float], ...]


def _as_float(name: str, value: object, low: float, high: float, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidSamplingParams(name, value, allowed)
    # The chained comparison also refuses NaN, and is exact for integers too large for a float.
    if not low <= value <= high:
        raise InvalidSamplingParams(name, value, allowed)
    return float(value)


def _number(name: str, low: float, high: float, remedy: str) -> Callable[[float], float]:
    allowed = f"a number from {low:g} to {high:g}{remedy}"

    def convert(value: float) -> float:
        return _as_float(name, value, low, high, allowed)

    return convert


def _top_k(value: int) -> int:
    if type(value) is not int or value < 0:
        raise InvalidSamplingParams("top_k", value, "an integer of at least 0; 0 turns the filter off")
    return value


def _seed(value: int | None) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not _MIN_SEED <= value <= _MAX_SEED:
        raise InvalidSamplingParams("seed", value, "an integer from -2**63 to 2**64 - 1, or None for a fresh seed")
    return value & _MAX_SEED


def _bias_pair(pair: object) -> tuple[int, float]:
    if not isinstance(pair, tuple) or len(cast("tuple[object, ...]", pair)) != 2:
        raise InvalidSamplingParams("logit_bias", pair, "a mapping from token id to a number")
    token_id, bias = cast("tuple[object, object]", pair)
    if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
        raise InvalidSamplingParams(
            "logit_bias", token_id, "keyed by token ids, integers from 0 to the vocabulary's end"
        )
    name = f"logit_bias[{token_id}]"
    return token_id, _as_float(name, bias, -_MAX_BIAS, _MAX_BIAS, f"a number from {-_MAX_BIAS:g} to {_MAX_BIAS:g}")


def _bias_pairs(value: Mapping[int, float] | Iterable[tuple[int, float]]) -> BiasPairs:
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and not isinstance(value, tuple):
        raise InvalidSamplingParams("logit_bias", value, "a mapping from token id to a number")
    pairs = cast("Iterable[object]", cast("Mapping[object, object]", value).items() if is_mapping else value)
    checked = [_bias_pair(pair) for pair in pairs]
    unique = dict(checked)
    if len(unique) != len(checked):
        raise InvalidSamplingParams("logit_bias", value, "given once per token id")
    return tuple(sorted(unique.items()))


@frozen(kw_only=True)
class SamplingParams:
    """How to pick the next token of one row.

    The order is: logit bias, top-p, min-p, top-k, then a draw from the softmax of the kept scores over
    `temperature`. The filters see the distribution before the temperature, as in mlx-lm.

    Attributes:
        temperature: 0 takes the best token after the bias and ignores every filter; otherwise the divisor of
            the log-probabilities, up to 1e6.
        top_p: keep the smallest set of best tokens that holds this share of the probability; 0 and 1 are off.
        top_k: keep the best `top_k` tokens; 0, or at least the vocabulary size, is off.
        min_p: keep tokens at least this likely relative to the best one, 0 to 1; 0 is off.
        logit_bias: added to the logits; given as a mapping from token id to a finite number, kept as pairs
            sorted by id.
        seed: fixes the row's randomness; any integer from -2**63 to 2**64 - 1, kept modulo 2**64. None draws a
            fresh seed for each sampler.

    Raises:
        InvalidSamplingParams: names the field, its value and the allowed range.
    """

    temperature: float = field(default=0.0, converter=_number("temperature", 0, _MAX_TEMPERATURE, "; 0 is greedy"))
    top_p: float = field(default=1.0, converter=_number("top_p", 0, 1, "; 0 and 1 turn the filter off"))
    top_k: int = field(default=0, converter=_top_k)
    min_p: float = field(default=0.0, converter=_number("min_p", 0, 1, "; 0 turns the filter off"))
    logit_bias: BiasPairs = field(default=(), converter=_bias_pairs)
    seed: int | None = field(default=None, converter=_seed)

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the best token and draws nothing."""
        return self.temperature == 0

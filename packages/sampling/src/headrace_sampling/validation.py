"""Converters of parameters: a value of the right type and in its range, or an error that names all three."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar, cast

from headrace_sampling.errors import InvalidSamplingParams

T = TypeVar("T")

MAX_TOKEN_ID = 2**31 - 2
_MAX_BIAS = 1e30
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1

BiasPairs = tuple[tuple[int, float], ...]


def as_number(name: str, value: object, low: float, high: float, allowed: str) -> float:
    """Return a real number within both bounds as a float; refuse booleans, NaN and other types."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidSamplingParams(name, value, allowed)
    # The chained comparison also refuses NaN, and is exact for integers too large for a float.
    if not low <= value <= high:
        raise InvalidSamplingParams(name, value, allowed)
    return float(value)


def number(name: str, low: float, high: float, remedy: str = "") -> Callable[[float], float]:
    """Make a converter of numbers from `low` to `high`."""
    allowed = f"a number from {low:g} to {high:g}{remedy}"

    def convert(value: float) -> float:
        return as_number(name, value, low, high, allowed)

    return convert


def number_or_zero(name: str, low: float, high: float, remedy: str) -> Callable[[float], float]:
    """Make a converter of numbers from `low` to `high`, and of 0."""
    allowed = f"a number from {low:g} to {high:g}, or 0{remedy}"

    def convert(value: float) -> float:
        # False equals 0, and is refused below.
        return 0.0 if value == 0 and type(value) is not bool else as_number(name, value, low, high, allowed)

    return convert


def integer(name: str, low: int, high: int | None = None, remedy: str = "") -> Callable[[int], int]:
    """Make a converter of integers from `low`, up to `high` if there is one."""
    allowed = f"an integer of at least {low}{remedy}" if high is None else f"an integer from {low} to {high}{remedy}"

    def convert(value: int) -> int:
        if type(value) is not int or value < low or (high is not None and value > high):
            raise InvalidSamplingParams(name, value, allowed)
        return value

    return convert


def flag(name: str) -> Callable[[bool], bool]:
    """Make a converter of booleans that takes nothing else for one."""

    def convert(value: bool) -> bool:
        if type(value) is not bool:
            raise InvalidSamplingParams(name, value, "True or False")
        return value

    return convert


def optional(convert: Callable[[T], T]) -> Callable[[T | None], T | None]:
    """Make a converter that lets None through."""

    def convert_some(value: T | None) -> T | None:
        return None if value is None else convert(value)

    return convert_some


def instance_or_none(name: str, kind: type[T]) -> Callable[[T | None], T | None]:
    """Make a converter of instances of one class, and of None."""

    def convert(value: T | None) -> T | None:
        if value is not None and not isinstance(value, kind):
            raise InvalidSamplingParams(name, value, f"a {kind.__name__} or None")
        return value

    return convert


def token_ids(name: str) -> Callable[[Iterable[int]], tuple[int, ...]]:
    """Make a converter of collections of token ids into sorted tuples without repeats."""

    def convert(value: Iterable[int]) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple, AbstractSet, range)):
            raise InvalidSamplingParams(name, value, "a collection of token ids")
        for token_id in cast("Iterable[object]", value):
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
                raise InvalidSamplingParams(name, token_id, "token ids, integers from 0 to the vocabulary's end")
        return tuple(sorted(set(value)))

    return convert


def seed_or_none(value: int | None) -> int | None:
    """Convert a seed to 64 unsigned bits."""
    if value is None:
        return None
    if type(value) is not int or not _MIN_SEED <= value <= _MAX_SEED:
        raise InvalidSamplingParams("seed", value, "an integer from -2**63 to 2**64 - 1, or None for a fresh seed")
    return value & _MAX_SEED


def bias_pairs(value: Mapping[int, float] | Iterable[tuple[int, float]]) -> BiasPairs:
    """Convert a mapping from token id to bias, or pairs, into pairs sorted by id."""
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and not isinstance(value, tuple):
        raise InvalidSamplingParams("logit_bias", value, "a mapping from token id to a number")
    pairs = cast("Iterable[object]", cast("Mapping[object, object]", value).items() if is_mapping else value)
    checked = [_bias_pair(pair) for pair in pairs]
    unique = dict(checked)
    if len(unique) != len(checked):
        raise InvalidSamplingParams("logit_bias", value, "given once per token id")
    return tuple(sorted(unique.items()))


def _bias_pair(pair: object) -> tuple[int, float]:
    if not isinstance(pair, tuple) or len(cast("tuple[object, ...]", pair)) != 2:
        raise InvalidSamplingParams("logit_bias", pair, "a mapping from token id to a number")
    token_id, bias = cast("tuple[object, object]", pair)
    if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
        raise InvalidSamplingParams(
            "logit_bias", token_id, "keyed by token ids, integers from 0 to the vocabulary's end"
        )
    name = f"logit_bias[{token_id}]"
    return token_id, as_number(name, bias, -_MAX_BIAS, _MAX_BIAS, f"a number from {-_MAX_BIAS:g} to {_MAX_BIAS:g}")

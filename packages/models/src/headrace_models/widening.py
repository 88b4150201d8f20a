"""Which filters, methods and globals templates may use, and guards of those that can make much of little."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define
from markupsafe import Markup

from headrace_models.errors import TemplateError
from headrace_models.metered_context import MeteredContext

__all__ = [
    "FILTERS",
    "FILTER_GUARDS",
    "GLOBALS",
    "METHODS",
    "METHOD_GUARDS",
    "SHRINKING",
    "check_format",
    "check_power",
]


@define
class Operation:
    """A filter or method about to run on a value."""

    context: MeteredContext
    value: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def option(self, position: int, name: str, default: object) -> Any:
        return self.args[position] if len(self.args) > position else self.keywords.get(name, default)


# Raises when the operation would do too much; returns the arguments to run it with.
Guard = Callable[[Operation], tuple[Any, ...]]

GLOBALS = ("range", "dict", "cycler", "joiner")

_FILTER_NAMES = (
    "abs attr capitalize center count default d dictsort e escape first float format indent int items last length "
    "list lower map max min reject rejectattr reverse round safe select selectattr sort string sum title "
    "tojson trim truncate unique upper wordcount"
)
FILTERS = frozenset(_FILTER_NAMES.split())
# Filters whose text is at most a few times as long as what they are given.
SHRINKING = frozenset({"capitalize", "count", "first", "int", "last", "length", "lower", "title", "trim", "upper"})

_TEXT_METHOD_NAMES = (
    "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii isdecimal "
    "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith "
    "strip swapcase title upper zfill"
)
_TEXT_METHODS = frozenset(_TEXT_METHOD_NAMES.split())
METHODS: Mapping[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    Markup: _TEXT_METHODS,
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset({"is_integer"}),
    bool: frozenset(),
    bytes: frozenset(),
}

DICT_NAMES = frozenset(dir(dict))
LOOP_NAMES = frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"})

_MAX_BITS = 4_096
_MAX_DIGITS = 20
_MAX_INDENT = 64
_COMPUTED_WIDTH = re.compile(r"%[^a-zA-Z%(]*\*|\{[^{}]*:[^{}]*\{")
_NUMBER = re.compile(r"\d+")


def check_power(base: object, exponent: object) -> None:
    """Refuse a whole number that would have thousands of digits.

    Raises:
        TemplateError: the power is too large.
    """
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise TemplateError(f"the chat template computes with numbers of more than {_MAX_BITS} bits: use another one")


def check_format(context: MeteredContext, text: str, values: Sequence[object]) -> None:
    """Charge for the most that formatting can build: each field with the widest value, each width written out.

    Raises:
        TemplateError: that is over the limit, or a width comes from an argument.
    """
    if _COMPUTED_WIDTH.search(text):
        raise TemplateError(f"the chat template formats with a computed width: {text[:64]!r}; write the width out")
    widths = sum(min(int(number[:12]), 10**9) for number in _NUMBER.findall(text))
    num_fields = text.count("%") + text.count("{")
    heaviest = max((_width(context, value) for value in values), default=0)
    context.meter.check_size(len(text) + widths + num_fields * heaviest)


def _width(context: MeteredContext, value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 2 * context.meter.weigh(value)


def _widen(operation: Operation) -> tuple[Any, ...]:
    for width in (*operation.args, *operation.keywords.values()):
        if isinstance(width, int):
            operation.context.meter.check_size(abs(width))
    return operation.args


def _replace(operation: Operation) -> tuple[Any, ...]:
    text, old, new = operation.value, operation.option(0, "old", ""), operation.option(1, "new", "")
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        operation.context.meter.check_size(len(text) + text.count(old) * (len(new) - len(old)))
    return operation.args


def _format(operation: Operation) -> tuple[Any, ...]:
    check_format(operation.context, str(operation.value), (*operation.args, *operation.keywords.values()))
    return operation.args


def _join(operation: Operation) -> tuple[Any, ...]:
    if len(operation.args) != 1:
        return operation.args
    meter = operation.context.meter
    items: list[object] = list(meter.counted(operation.args[0]))
    meter.check_size(sum(len(item) + len(operation.value) for item in items if isinstance(item, str)))
    return (items,)


def _weigh(operation: Operation) -> tuple[Any, ...]:
    operation.context.meter.weigh(operation.value)
    return operation.args


def _indent(operation: Operation) -> tuple[Any, ...]:
    width = operation.option(0, "width", 4)
    columns = len(width) if isinstance(width, str) else int(width)
    text = operation.context.text_of(operation.value)
    operation.context.meter.check_size(len(text) + (len(text.splitlines()) + 1) * max(0, columns))
    return operation.args


def _tojson(operation: Operation) -> tuple[Any, ...]:
    for option in (*operation.args, *operation.keywords.values()):
        if (len(option) if isinstance(option, str) else option if isinstance(option, int) else 0) > _MAX_INDENT:
            raise TemplateError(f"the filter tojson indents by {option!r:.32}; at most {_MAX_INDENT} is allowed")
    return _weigh(operation)


def _round(operation: Operation) -> tuple[Any, ...]:
    precision = operation.option(0, "precision", 0)
    if isinstance(precision, int) and abs(precision) > _MAX_DIGITS:
        raise TemplateError(
            f"the filter round has a precision of {precision.bit_length()} bits; at most {_MAX_DIGITS} is allowed"
        )
    return operation.args


def _sum(operation: Operation) -> tuple[Any, ...]:
    if not isinstance(operation.option(1, "start", 0), int | float):
        raise TemplateError("the filter sum adds numbers only in chat templates: use join")
    return operation.args


METHOD_GUARDS: Mapping[str, Guard] = {
    "center": _widen,
    "ljust": _widen,
    "rjust": _widen,
    "zfill": _widen,
    "replace": _replace,
    "join": _join,
    "format": _format,
    "format_map": _format,
}

FILTER_GUARDS: Mapping[str, Guard] = {
    "center": _widen,
    "dictsort": _weigh,
    "format": _format,
    "indent": _indent,
    "max": _weigh,
    "min": _weigh,
    "round": _round,
    "sort": _weigh,
    "string": _weigh,
    "sum": _sum,
    "tojson": _tojson,
    "unique": _weigh,
}

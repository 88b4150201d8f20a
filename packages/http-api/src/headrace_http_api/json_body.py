"""Strict JSON (rulings H-31a): what `json.loads` lets through and later code would trip over is a 400 here."""

import json
import math
import re
import reprlib
from collections.abc import Iterator
from typing import Any

from attrs import define, field, frozen

from headrace_http_api.errors import InvalidRequest

__all__ = ["MAX_DEPTH", "field_path", "parse_object", "path_step", "shown"]

MAX_DEPTH = 64

# Each costs Python an object: millions of them would take all threads' time for many seconds.
MAX_CONTAINERS = 100_000

# Every 64-bit integer has at most 20 characters; far longer ones only cost time.
_MAX_INTEGER_CHARS = 64

# A string without its end reaches to the end of the text, so that no quote is tried twice: the scan stays linear.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
_MAY_BE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@frozen
class _Refused:
    """Stands where a refused value was, until its path is known."""

    reason: str


def parse_object(body: bytes, *, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Parse a request body that must be one JSON object.

    Args:
        body: the bytes as received.
        max_depth: most arrays and objects inside each other, the body itself included.

    Raises:
        InvalidRequest: malformed JSON or UTF-8, anything but an object, too deep a nesting, too many arrays and
            objects, a duplicate key, a number that is not finite or has too many digits, or a lone surrogate; `param`
            tells where.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise InvalidRequest(
            f"the body is not valid UTF-8 at byte {exc.start}; send JSON encoded as UTF-8", code="invalid_json"
        ) from None
    _check_containers(text, max_depth)
    parser = _Parser()
    value = parser.parse(text)
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"the body is a JSON {_kind(value)}; it must be a JSON object, such as {{...}}", code="invalid_json"
        )
    if parser.num_refused or _MAY_BE_SURROGATE.search(text):
        _raise_refused(value)
    return value


def field_path(parent: str, key: str | int) -> str:
    """Extend a JSON path by an index or a key: `messages[0].content`, `logit_bias["50256"]`."""
    step = path_step(key)
    return parent + step if parent else step.removeprefix(".")


def path_step(key: str | int) -> str:
    """Write one step of a JSON path, such as `[0]`, `.content` or `["50256"]`."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if _PLAIN_NAME.fullmatch(key) else f"[{json.dumps(key[:64])}]"


def shown(value: object) -> str:
    """Show a JSON value in a message, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 80
    return short.repr(value)


@define
class _Parser:
    """`json.loads` with hooks that put a marker where a value is refused: the hooks do not know the path."""

    num_refused: int = field(default=0, init=False)

    def parse(self, text: str) -> Any:
        try:
            return json.loads(
                text,
                object_pairs_hook=self._object,
                parse_int=self._integer,
                parse_float=self._real,
                parse_constant=self._constant,
            )
        except json.JSONDecodeError as exc:
            where = f"line {exc.lineno}, column {exc.colno}"
            raise InvalidRequest(f"the body is not valid JSON: {exc.msg} at {where}", code="invalid_json") from None

    def _refuse(self, reason: str) -> _Refused:
        self.num_refused += 1
        return _Refused(reason)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) == len(pairs):
            return result
        seen: set[str] = set()
        for key, _value in pairs:
            if key in seen:
                result[key] = self._refuse("is given more than once; give it once")
            seen.add(key)
        return result

    def _integer(self, digits: str) -> int | _Refused:
        if len(digits) > _MAX_INTEGER_CHARS:
            return self._refuse(f"is an integer of {len(digits)} characters; at most {_MAX_INTEGER_CHARS} are read")
        return int(digits)

    def _real(self, digits: str) -> float | _Refused:
        number = float(digits)
        return number if math.isfinite(number) else self._refuse("is too large for a 64-bit float")

    def _constant(self, name: str) -> _Refused:
        return self._refuse(f"is {name}, which is not JSON; give a finite number, or null for the default")


def _check_containers(text: str, max_depth: int) -> None:
    if text.count("[") + text.count("{") <= max_depth:
        return
    depth = num_containers = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        piece = match.group()
        if piece in "[{":
            depth += 1
            num_containers += 1
            if depth > max_depth or num_containers > MAX_CONTAINERS:
                raise InvalidRequest(_too_many(depth, max_depth), code="invalid_json")
        elif piece in "]}":
            depth -= 1


def _too_many(depth: int, max_depth: int) -> str:
    if depth > max_depth:
        return f"the body nests arrays and objects deeper than {max_depth} levels; flatten it"
    return f"the body holds more than {MAX_CONTAINERS} arrays and objects; send less"


def _raise_refused(body: dict[str, Any]) -> None:
    for path, value in _walk(body):
        if isinstance(value, _Refused):
            raise InvalidRequest(f"{path} {value.reason}", param=path)
        if isinstance(value, str) and _SURROGATE.search(value):
            raise InvalidRequest(
                f"{path} holds a lone surrogate (an escape \\ud800 to \\udfff without its pair), which no "
                "text encoding can carry; send the whole character",
                param=path,
            )


def _walk(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every value with its path, parents first, and every key as a value of its own path."""
    waiting: list[tuple[str, Any]] = [("", body)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, dict):
            for key in value:
                yield field_path(path, key), key
            waiting += [(field_path(path, key), inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(field_path(path, index), inner) for index, inner in reversed(list(enumerate(value)))]


def _kind(value: object) -> str:
    names: dict[type, str] = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")

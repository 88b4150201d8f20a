"""Strict validation: JSON to frozen attrs classes through cattrs, with the path of the field at fault.

cattrs converts primitives by calling their type, so "5" and true would become 5 and 1; the hooks here convert
nothing. A limit is part of a field's type: `Annotated[float, Between(0, 1)]`.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, TypeVar, get_args, get_origin

import attrs
from attrs import frozen
from cattrs import (
    AttributeValidationNote,
    BaseValidationError,
    Converter,
    IterableValidationNote,
)

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.json_body import field_path, shown

__all__ = ["AtLeast", "Between", "FieldError", "make_converter", "structure", "unknown_names"]

T = TypeVar("T")


class FieldError(ValueError):
    """A value is wrong; the message continues the sentence that the field's path begins.

    Attributes:
        subpath: from the field that the hook converts to the value at fault.
    """

    def __init__(self, message: str, *, subpath: str = "") -> None:
        super().__init__(message)
        self.subpath = subpath


@frozen
class Between:
    """A number in the closed range [low, high]."""

    low: float
    high: float

    def check(self, value: float) -> None:
        if not self.low <= value <= self.high:
            raise FieldError(f"is {shown(value)}; it must lie between {self.low} and {self.high}, both included")


@frozen
class AtLeast:
    """A number of at least `low`."""

    low: float

    def check(self, value: float) -> None:
        if value < self.low:
            raise FieldError(f"is {shown(value)}; it must be at least {self.low}; leave it out for the default")


def make_converter() -> Converter:
    """Make a converter whose primitives are strict."""
    converter = Converter(detailed_validation=True, prefer_attrib_converters=False)
    for kind, hook in ((bool, _to_bool), (int, _to_int), (float, _to_float), (str, _to_str)):
        converter.register_structure_hook(kind, hook)

    def limited_hook(kind: Any) -> Callable[[Any, Any], Any]:
        return _limited_hook(converter, kind)

    converter.register_structure_hook_factory(_is_limited, limited_hook)
    return converter


def structure(converter: Converter, body: Mapping[str, Any], kind: type[T]) -> T:
    """Build a request from its JSON object; a null field counts as absent.

    Raises:
        InvalidRequest: for the first field at fault; `param` is its path.
    """
    required = {one.name for one in attrs.fields(kind) if one.default is attrs.NOTHING}  # pyright: ignore[reportArgumentType]
    given = {name: value for name, value in body.items() if value is not None}
    for name in sorted(required - given.keys()):
        raise InvalidRequest(f"{name} is missing; it is required", param=name, code="missing_required_parameter")
    try:
        return converter.structure(given, kind)
    except BaseValidationError as exc:
        path, cause = _first_fault(exc)
    if not isinstance(cause, FieldError):
        raise cause
    path += cause.subpath
    raise InvalidRequest(f"{path} {cause}", param=path)


def unknown_names(body: Mapping[str, Any], kind: type, accepted: AbstractSet[str]) -> tuple[str, ...]:
    """Return the names in `body` that are neither fields of `kind` nor accepted without effect."""
    known = {one.name for one in attrs.fields(kind)} | accepted
    return tuple(name for name, value in body.items() if name not in known and value is not None)


def _first_fault(exc: BaseException) -> tuple[str, BaseException]:
    path = ""
    while isinstance(exc, BaseValidationError):
        exc = exc.exceptions[0]
        for note in getattr(exc, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                path = field_path(path, note.name)
            elif isinstance(note, IterableValidationNote):
                path = field_path(path, note.index)
    return path, exc


# ---- strict hooks --------------------------------------------------------------------------------------------


def _to_bool(value: Any, _kind: type) -> bool:
    if type(value) is not bool:
        raise FieldError(f"is {shown(value)}; it must be true or false")
    return value


def _to_int(value: Any, _kind: type) -> int:
    if type(value) is not int:
        raise FieldError(f"is {shown(value)}; it must be an integer, without quotes or a fraction")
    return value


def _to_float(value: Any, _kind: type) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise FieldError(f"is {shown(value)}; it must be a number, without quotes")
    # Integers read from JSON have at most 64 digits, far inside the range of a float.
    return float(value)


def _to_str(value: Any, _kind: type) -> str:
    if type(value) is not str:
        raise FieldError(f"is {shown(value)}; it must be a string")
    return value


def _is_limited(kind: Any) -> bool:
    return get_origin(kind) is Annotated


def _limited_hook(converter: Converter, kind: Any) -> Callable[[Any, type], Any]:
    inner, *limits = get_args(kind)
    hook = converter.get_structure_hook(inner)

    def convert(value: Any, _kind: type) -> Any:
        converted = hook(value, inner)
        for limit in limits:
            limit.check(converted)
        return converted

    return convert

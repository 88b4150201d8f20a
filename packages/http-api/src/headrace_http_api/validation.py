"""Strict validation: JSON to frozen attrs classes through cattrs, with the path of the field at fault.

cattrs converts primitives by calling their type, so "5" and true would become 5 and 1; the hooks here convert
nothing. A limit is part of a field's type: `Annotated[float, Between(0, 1)]`.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, TypeVar, get_args, get_origin

import attrs
from attrs import frozen
from cattrs import AttributeValidationNote, ClassValidationError, Converter
from cattrs.gen import make_dict_structure_fn

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.json_body import path_step, shown

__all__ = ["AtLeast", "Between", "FieldError", "OneOf", "make_converter", "structure", "unknown_names"]

T = TypeVar("T")

Hook = Callable[[Any, Any], Any]


class FieldError(ValueError):
    """A value is wrong; the message continues the sentence that the field's path begins.

    Attributes:
        subpath: from the field that the hook converts to the value at fault.
    """

    def __init__(self, message: str, *, subpath: str = "") -> None:
        super().__init__(message)
        self.subpath = subpath

    def inside(self, key: str | int) -> "FieldError":
        """Return the same fault as seen from the value that holds it under `key`."""
        return FieldError(str(self), subpath=path_step(key) + self.subpath)


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


@frozen
class OneOf:
    """One of the given texts."""

    choices: tuple[str, ...]

    def check(self, value: object) -> None:
        if value not in self.choices:
            raise FieldError(f"is {shown(value)}; it must be one of {', '.join(self.choices)}")


def make_converter() -> Converter:
    """Make a converter that is strict about primitives, lists and attrs classes, and treats null as absent."""
    converter = Converter(detailed_validation=True, prefer_attrib_converters=False)
    for kind, hook in ((bool, _to_bool), (int, _to_int), (float, _to_float), (str, _to_str)):
        converter.register_structure_hook(kind, hook)

    def limited_hook(kind: Any) -> Hook:
        return _limited_hook(converter, kind)

    def list_hook(kind: Any) -> Hook:
        return _list_hook(converter, kind)

    def class_hook(kind: Any) -> Hook:
        return _class_hook(converter, kind)

    converter.register_structure_hook_factory(_is_limited, limited_hook)
    converter.register_structure_hook_factory(_is_list, list_hook)
    converter.register_structure_hook_factory(attrs.has, class_hook)
    return converter


def structure(converter: Converter, body: Mapping[str, Any], kind: type[T]) -> T:
    """Build a request from its JSON object.

    Raises:
        InvalidRequest: for the first field at fault; `param` is its path.
    """
    try:
        return converter.structure(body, kind)
    except FieldError as exc:
        path = exc.subpath.removeprefix(".")
        raise InvalidRequest(f"{path} {exc}", param=path) from None


def unknown_names(body: Mapping[str, Any], kind: type, accepted: AbstractSet[str]) -> tuple[str, ...]:
    """Return the names in `body` that are neither fields of `kind` nor accepted without effect."""
    known = {one.name for one in attrs.fields(kind)} | accepted
    return tuple(name for name, value in body.items() if name not in known and value is not None)


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


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple)


def _list_hook(converter: Converter, kind: Any) -> Hook:
    make, inner = get_origin(kind), get_args(kind)[0]
    hook = converter.get_structure_hook(inner)

    def convert(value: Any, _kind: Any) -> Any:
        if type(value) is not list:
            raise FieldError(f"is {shown(value)}; it must be a list")
        entries: list[Any] = []
        for index, entry in enumerate(value):
            try:
                entries.append(hook(entry, inner))
            except FieldError as exc:
                raise exc.inside(index) from None
        return make(entries)

    return convert


def _class_hook(converter: Converter, kind: Any) -> Hook:
    build = make_dict_structure_fn(kind, converter)
    required = [one.name for one in attrs.fields(kind) if one.default is attrs.NOTHING]

    def convert(value: Any, _kind: Any) -> Any:
        if type(value) is not dict:
            raise FieldError(f"is {shown(value)}; it must be an object")
        given = {name: inner for name, inner in value.items() if inner is not None}
        for name in required:
            if name not in given:
                raise FieldError("is missing; it is required").inside(name)
        try:
            return build(given, kind)
        except ClassValidationError as exc:
            raise _first_fault(exc) from None

    return convert


def _first_fault(exc: ClassValidationError) -> Exception:
    first = exc.exceptions[0]
    if not isinstance(first, FieldError):
        return first
    (name,) = (note.name for note in first.__notes__ if isinstance(note, AttributeValidationNote))
    return first.inside(name)


def _is_limited(kind: Any) -> bool:
    return get_origin(kind) is Annotated


def _limited_hook(converter: Converter, kind: Any) -> Hook:
    inner, *limits = get_args(kind)
    hook = converter.get_structure_hook(inner)

    def convert(value: Any, _kind: type) -> Any:
        converted = hook(value, inner)
        for limit in limits:
            limit.check(converted)
        return converted

    return convert

"""What a JSON schema may not ask for, beyond what llguidance refuses itself."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from typing import TYPE_CHECKING, TypeAlias, cast
from urllib.parse import unquote

from headrace_sampling.errors import InvalidGrammar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Compiling takes time quadratic in the properties of an object: about a second for so many, five for so many in all.
_MAX_PROPERTIES, _MAX_PROPERTIES_IN_ALL = 1000, 5000
_DATA_KEYWORDS = ("const", "default", "enum", "examples")
# JSON writes them as \u and four digits only; the compiler would leave them out.
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def check_schema(schema: Mapping[str, object]) -> None:
    """Refuse what would be compiled to something else than it says.

    Raises:
        InvalidGrammar: a lower bound on properties that repeated keys could meet, a character that is not written, too
            many properties, or a schema that only endless values meet.
    """
    num_properties = 0
    for entry in objects_of(schema):
        num_properties += _count_properties(entry)
        if num_properties > _MAX_PROPERTIES_IN_ALL:
            _refuse("it has too many properties", f"use at most {_MAX_PROPERTIES_IN_ALL} in all")
        _check_key_bound(entry)
        _check_characters(entry)
    _check_ends(schema)


def _count_properties(entry: Mapping[str, object]) -> int:
    groups = (entry.get(name) for name in ("properties", "patternProperties", "required"))
    count = max((len(cast("list[object]", one)) for one in groups if isinstance(one, (dict, list))), default=0)
    if count > _MAX_PROPERTIES:
        _refuse(f"an object has {count} properties", f"use at most {_MAX_PROPERTIES} in an object")
    return count


def _check_key_bound(entry: Mapping[str, object]) -> None:
    # A reader keeps one of two equal keys, and no grammar can tell whether an open key was there before.
    least, required = entry.get("minProperties"), entry.get("required")
    num_required = len(cast("list[object]", required)) if isinstance(required, list) else 0
    is_closed = entry.get("additionalProperties") is False and not entry.get("patternProperties")
    if isinstance(least, int) and least > max(1, num_required) and not is_closed:
        _refuse(
            f"minProperties {least} cannot be enforced where keys may repeat",
            "require the properties by name, or close the object with additionalProperties false",
        )


def _check_characters(entry: Mapping[str, object]) -> None:
    for name in ("const", "enum"):
        if any(isinstance(one, str) and _UNWRITABLE.search(one) for one in leaves_of(entry.get(name))):
            _refuse(f"{name} has a control character that is not written", "leave it out")


def leaves_of(data: object) -> Iterator[object]:
    """Walk the values in data that hold no others."""
    waiting = [data]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, dict):
            waiting.extend(cast("dict[str, object]", entry).values())
        elif isinstance(entry, list):
            waiting.extend(cast("list[object]", entry))
        else:
            yield entry


def objects_of(schema: object) -> Iterator[dict[str, object]]:
    """Walk all objects of a schema but those that are data."""
    waiting = [schema]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, dict):
            fields = cast("dict[str, object]", entry)
            yield fields
            waiting.extend(value for name, value in fields.items() if name not in _DATA_KEYWORDS)
        elif isinstance(entry, list):
            waiting.extend(cast("list[object]", entry))


Parts: TypeAlias = "list[tuple[object, ...]]"
"""Groups of schemas: a value needs one of each group."""


def _check_ends(schema: Mapping[str, object]) -> None:
    """Refuse a schema all of whose values are endless: some value of every needed part must be finite.

    Works back from schemas that need no part, as emptiness of a context-free grammar is decided.
    """
    parts_of: dict[int, Parts] = {}
    needed_by: defaultdict[int, list[int]] = defaultdict(list)
    waiting: list[object] = [schema]
    while waiting:
        entry = waiting.pop()
        if id(entry) in parts_of:
            continue
        parts = parts_of[id(entry)] = _needed_parts(entry, schema)
        for part in (part for group in parts for part in group):
            needed_by[id(part)].append(id(entry))
            waiting.append(part)
    ends: set[int] = set()
    ready = deque(node for node, parts in parts_of.items() if not parts)
    while ready:
        node = ready.popleft()
        if node in ends or not all(any(id(part) in ends for part in group) for group in parts_of[node]):
            continue
        ends.add(node)
        ready.extend(needed_by[node])
    if id(schema) not in ends:
        _refuse("it needs itself for ever, so that no reply could end", "make the recursion optional, or allow null")


def _needed_parts(entry: object, root: Mapping[str, object]) -> Parts:
    if not isinstance(entry, dict):
        return []
    fields = cast("dict[str, object]", entry)
    parts: Parts = []
    if isinstance(reference := fields.get("$ref"), str):
        target = _resolve(reference, root)
        parts += [] if target is None else [(target,)]
    parts += [(one,) for one in _sequence(fields.get("allOf"))]
    parts += [tuple(choices) for name in ("anyOf", "oneOf") if (choices := _sequence(fields.get(name)))]
    kind = fields.get("type")
    if kind == "object" and isinstance(known := fields.get("properties"), dict):
        named = cast("dict[str, object]", known)
        parts += [
            (named[name],) for name in _sequence(fields.get("required")) if isinstance(name, str) and name in named
        ]
    if kind == "array" and isinstance(least := fields.get("minItems"), int) and least > 0:
        first = _sequence(fields.get("prefixItems"))
        parts += [(one,) for one in first[:least]]
        if least > len(first) and "items" in fields:
            parts.append((fields["items"],))
    return parts


def _resolve(reference: str, root: Mapping[str, object]) -> object:
    """Return what a pointer within the schema leads to; None for other references, which the compiler judges."""
    if not reference.startswith("#") or (len(reference) > 1 and reference[1] != "/"):
        return None
    target: object = root
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict) and name in target:
            target = target[name]
        elif isinstance(target, list) and name.isdecimal() and int(name) < len(cast("list[object]", target)):
            target = cast("list[object]", target)[int(name)]
        else:
            return None
    return target


def _sequence(value: object) -> Sequence[object]:
    return cast("list[object]", value) if isinstance(value, list) else ()


def _refuse(reason: str, remedy: str) -> None:
    raise InvalidGrammar("json_schema", reason, remedy)

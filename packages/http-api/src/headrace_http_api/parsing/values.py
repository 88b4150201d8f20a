"""Values in the notations that models write arguments in, read piece by piece and written as JSON."""

import json
import re
from collections.abc import Callable
from typing import TypeAlias

from attrs import frozen

from headrace_http_api.parsing.outbox import Sink, TextSink, quoted
from headrace_http_api.parsing.reader import SPACE, Malformed, Reader, Steps, Truncated, Unparsable, run_whole

__all__ = ["GEMMA", "JSON", "PYTHON", "STRING", "Notation", "Types", "ValueScanner", "as_json", "gemma_notation"]

Types: TypeAlias = frozenset[str] | None
"""Names of JSON types that a value may have; None if nothing is known."""

STRING: Types = frozenset({"string"})

# JSON readers recurse, and Python's refuses integers of more than 4,300 digits.
MAX_DEPTH = 64
MAX_SCALAR_CHARS = 1_000
_MAX_BARE_CHARS = 65_536
MAX_KEY_CHARS = 1_000

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_HEX = re.compile(r"[0-9a-fA-F]*")
_LOW_SURROGATE = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_LOW_SURROGATE_BEGINNING = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
_REPLACEMENT = "\\ufffd"

_JSON_ESCAPES = {character: "\\" + character for character in '"\\/bfnrt'} | {"'": "'"}
_PYTHON_ESCAPES = {character: "\\" + character for character in '"\\bfnrt'} | {
    "'": "'",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\n": "",
}


@frozen
class Notation:
    """How values are written.

    Attributes:
        quotes: what strings are between. In strings between longer quotes nothing is escaped.
        escapes: what may follow a backslash, and its JSON.
        hex_escapes: other escapes, with their number of hexadecimal digits.
        bare: characters of a scalar that is no string.
        bare_key: characters of a key without quotes.
        has_bare_strings: whether a scalar that is neither number nor word is a string.
    """

    quotes: tuple[str, ...]
    escapes: dict[str, str]
    hex_escapes: dict[str, int]
    bare: re.Pattern[str]
    bare_key: re.Pattern[str] | None = None
    has_bare_strings: bool = False

    def plain(self, quote: str) -> re.Pattern[str]:
        """Characters that stand for themselves, in the text and in JSON."""
        return _plain(quote[0])


def _plain(first: str) -> re.Pattern[str]:
    # Compiled patterns are cached by `re`.
    return re.compile(rf'[^"\\\x00-\x1f{re.escape(first)}]+')


_SCALAR = re.compile(r"[\w.+\-]*", re.ASCII)
JSON = Notation(('"',), _JSON_ESCAPES, {"u": 4}, _SCALAR)
PYTHON = Notation(('"', "'"), _PYTHON_ESCAPES, {"u": 4, "x": 2, "U": 8}, _SCALAR)


def gemma_notation(quote: str) -> Notation:
    """Return the notation of Gemma's calls: keys bare, strings between `quote`."""
    bare = re.compile(r"[^,{}\[\]<]*")
    return Notation((quote, '"'), _JSON_ESCAPES, {"u": 4}, bare, re.compile(r"[\w.$\-]*"), has_bare_strings=True)


GEMMA = gemma_notation('<|"|>')


@frozen
class ValueScanner:
    """Reads values from a reader into a sink."""

    reader: Reader
    sink: Sink
    notation: Notation

    def value(self, types: Types = None, depth: int = 0) -> Steps[None]:
        """Read one value; strings are written as they come, numbers and words when they are whole.

        Args:
            types: JSON types that a schema allows here; a bare scalar that must be a string becomes one.
            depth: how many containers it is in.
        """
        character = yield from self.reader.space()
        if character in "{[":
            if depth >= MAX_DEPTH:
                raise Malformed
            yield from (self._object(depth) if character == "{" else self._array(depth))
            return
        for quote in self.notation.quotes:
            if character == quote[0] and (yield from self.reader.accept(quote)):
                self.sink.open('"', '"')
                yield from self._characters(quote, self.sink.write)
                self.sink.close()
                return
        self.sink.write((yield from self._scalar(types)))

    def string(self) -> Steps[str]:
        """Read a quoted string and return its text."""
        character = yield from self.reader.space()
        for quote in self.notation.quotes:
            if character == quote[0] and (yield from self.reader.accept(quote)):
                pieces: list[str] = []
                yield from self._characters(quote, pieces.append)
                return str(json.loads(f'"{"".join(pieces)}"'))
        raise Malformed

    def key(self) -> Steps[str]:
        """Read a key and the colon after it."""
        pattern = self.notation.bare_key
        first = yield from self.reader.space()
        if pattern is not None and pattern.fullmatch(first):
            key = yield from self.reader.take_run(pattern, MAX_KEY_CHARS)
        else:
            key = yield from self.string()
        if (yield from self.reader.space()) != ":":
            raise Malformed
        self.reader.position += 1
        return key

    # ---- containers -------------------------------------------------------------------------------------------

    def _object(self, depth: int) -> Steps[None]:
        self.reader.position += 1
        # The outermost brace waits, because a call counts from its first certain value on.
        self.sink.open("{", "}", is_held=depth == 0)
        is_first = True
        while not (yield from self._at_end("}", is_first=is_first)):
            key = yield from self.key()
            self.sink.hold(("" if is_first else ", ") + quoted(key) + ": ")
            yield from self.value(depth=depth + 1)
            is_first = False
        self.sink.close()

    def _array(self, depth: int) -> Steps[None]:
        self.reader.position += 1
        self.sink.open("[", "]")
        is_first = True
        while not (yield from self._at_end("]", is_first=is_first)):
            if not is_first:
                self.sink.hold(", ")
            yield from self.value(depth=depth + 1)
            is_first = False
        self.sink.close()

    def _at_end(self, end: str, *, is_first: bool) -> Steps[bool]:
        """Take the end, or the comma before the next entry. A comma before the end is forgiven."""
        reader = self.reader
        character = yield from reader.space()
        if character != end and not is_first:
            if character != ",":
                raise Malformed
            reader.position += 1
            character = yield from reader.space()
        if character == end:
            reader.position += 1
        return character == end

    # ---- strings ----------------------------------------------------------------------------------------------

    def _characters(self, quote: str, write: Callable[[str], None]) -> Steps[None]:
        """Read a string's characters and its end; `write` gets them as in JSON."""
        reader, plain, has_escapes = self.reader, self.notation.plain(quote), len(quote) == 1
        while True:
            character = yield from reader.peek()
            run = plain.match(reader.text, reader.position)
            if run is not None:
                reader.position = run.end()
                write(run.group())
            elif (yield from reader.accept(quote)):
                return
            elif character == "\\" and has_escapes:
                escaped = yield from self._escape()
                write(escaped)
            else:
                reader.position += 1
                write(quoted(character)[1:-1])

    def _escape(self) -> Steps[str]:
        reader = self.reader
        while len(reader.text) - reader.position < 2:
            if reader.has_ended:
                raise Truncated
            yield
        kind = reader.text[reader.position + 1]
        if kind in self.notation.hex_escapes:
            return (yield from self._code_point(self.notation.hex_escapes[kind]))
        if kind in self.notation.escapes:
            reader.position += 2
            return self.notation.escapes[kind]
        # Models forget to escape backslashes, for example in regular expressions and paths.
        reader.position += 1
        return "\\\\"

    def _code_point(self, num_digits: int) -> Steps[str]:
        reader = self.reader
        while True:
            start = reader.position + 2
            digits = reader.text[start : start + num_digits]
            if not _HEX.fullmatch(digits):
                reader.position += 1
                return "\\\\"
            if len(digits) == num_digits:
                break
            if reader.has_ended:
                raise Truncated
            yield
        code = int(digits, 16)
        if 0xD800 <= code <= 0xDBFF and num_digits == 4:
            return (yield from self._surrogate_pair(digits))
        reader.position += 2 + num_digits
        if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            return _REPLACEMENT
        return f"\\u{digits}" if num_digits == 4 else quoted(chr(code))[1:-1]

    def _surrogate_pair(self, digits: str) -> Steps[str]:
        """Read both halves. Half a pair is no character and breaks what reads the arguments: it is replaced."""
        reader = self.reader
        while True:
            after = reader.text[reader.position + 6 : reader.position + 12]
            if _LOW_SURROGATE.fullmatch(after):
                reader.position += 12
                return f"\\u{digits}{after}"
            if not _LOW_SURROGATE_BEGINNING.fullmatch(after):
                reader.position += 6
                return _REPLACEMENT
            if reader.has_ended:
                raise Truncated
            yield

    # ---- scalars ----------------------------------------------------------------------------------------------

    def _scalar(self, types: Types) -> Steps[str]:
        limit = _MAX_BARE_CHARS if self.notation.has_bare_strings else MAX_SCALAR_CHARS
        text = yield from self.reader.run_of(self.notation.bare, limit)
        scalar = _scalar_as_json(text.strip(SPACE), types, has_bare_strings=self.notation.has_bare_strings)
        if scalar is None:
            raise Malformed
        self.reader.position += len(text)
        return scalar


def _scalar_as_json(text: str, types: Types, *, has_bare_strings: bool) -> str | None:
    word = _WORDS.get(text)
    is_number = len(text) <= MAX_SCALAR_CHARS and _NUMBER.fullmatch(text) is not None
    if word is None and not is_number:
        return quoted(text) if has_bare_strings and text else None
    if types == STRING and word != "null":
        return quoted(text)
    return text if word is None else word


def as_json(text: str, notation: Notation = JSON) -> str | None:
    """Return the JSON of a whole text that holds one value, None if it does not."""
    reader, sink = Reader(text + " ", has_ended=True), TextSink()
    try:
        run_whole(ValueScanner(reader, sink, notation).value())
    except Unparsable:
        return None
    return None if reader.text[reader.position :].strip(SPACE) else sink.text

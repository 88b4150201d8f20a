"""Splits a reply's text into reasoning and the rest."""

from collections.abc import Callable

from attrs import frozen

from headrace_http_api.parsing.reader import SPACE, Markers, Steps, markers, space_before
from headrace_http_api.parsing.stepping import SteppingParser

__all__ = ["REASONING_FORMATS", "ReasoningFormat", "ReasoningSplitter", "find_reasoning_format"]

_MAX_LEADING_SPACE = 64


@frozen(kw_only=True)
class ReasoningFormat:
    """How a family marks its reasoning.

    Attributes:
        name: what an override calls it.
        starts: texts that begin reasoning.
        ends: texts that end it.
        is_anywhere: the markers are tokens of their own and count wherever they are. Else they only count at the
            beginning of a reply, so that an answer can speak of them.
        marks: texts in a chat template of which one tells this format; the starts and ends if empty.
    """

    name: str
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    is_anywhere: bool = False
    marks: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible in what is parsed."""
        # Gemma's start marker is one such token and a word.
        return (*self.starts, *self.ends, *(start.removesuffix("thought") for start in self.starts))


# The first that fits wins, so formats with more particular marks come first.
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        name="gemma4", starts=("<|channel>thought",), ends=("<channel|>",), is_anywhere=True, marks=("<channel|>",)
    ),
    ReasoningFormat(name="command", starts=("<|START_THINKING|>",), ends=("<|END_THINKING|>",), is_anywhere=True),
    ReasoningFormat(name="mistral", starts=("[THINK]",), ends=("[/THINK]",), is_anywhere=True),
    ReasoningFormat(name="kimi", starts=("◁think▷",), ends=("◁/think▷",)),
    ReasoningFormat(name="longcat", starts=("<longcat_think>",), ends=("</longcat_think>",)),
    ReasoningFormat(name="seed", starts=("<seed:think>",), ends=("</seed:think>",)),
    ReasoningFormat(name="think", starts=("<think>",), ends=("</think>",)),
    ReasoningFormat(
        name="granite",
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
        marks=("Here is my thought process:", "Here's my thought process:", "thought process after 'Here"),
    ),
)


def find_reasoning_format(template_source: str, override: str | None = None) -> ReasoningFormat | None:
    """Return how a checkpoint with this template marks reasoning; None if it does not.

    Args:
        override: a format's name, or `none`.

    Raises:
        ValueError: `override` is neither.
    """
    if override == "none":
        return None
    for entry in REASONING_FORMATS:
        marks = entry.marks or (*entry.starts, *entry.ends)
        if entry.name == override or (override is None and any(mark in template_source for mark in marks)):
            return entry
    if override is None:
        return None
    names = ", ".join(entry.name for entry in REASONING_FORMATS)
    raise ValueError(f"reasoning format {override!r} is unknown: use none or one of {names}")


class ReasoningSplitter(SteppingParser):
    """Reasoning becomes `ReasoningDelta`, everything else `ContentDelta`.

    White space next to a marker belongs to it, except between content before and after reasoning. Reasoning that is
    not ended goes on to the end of the reply.

    Attributes:
        is_plain: all further text is content, as it comes.
    """

    def __init__(self, reasoning: ReasoningFormat, *, starts_inside: bool) -> None:
        self._starts, self._ends = markers(*reasoning.starts), markers(*reasoning.ends)
        self._is_anywhere = reasoning.is_anywhere
        self._is_inside = starts_inside
        self._has_content = False
        self.is_plain = False
        super().__init__()

    def _steps(self) -> Steps[None]:
        reader = self._reader
        if self._is_inside:
            yield from self._skip_space()
            # A model may repeat the marker that the template has written already.
            if (yield from self._starts_next()):
                yield from self._skip_space()
        while self._is_inside or (yield from self._opened()):
            if not (yield from self._flow(self._ends, self._outbox.reasoning)):
                return
            self._is_inside = False
            if not self._has_content:
                yield from self._skip_space()
        self.is_plain = True
        while True:
            self._content(reader.text[reader.position :])
            reader.position = len(reader.text)
            yield

    def _content(self, text: str) -> None:
        self._has_content = self._has_content or bool(text)
        self._outbox.content(text)

    def _opened(self) -> Steps[bool]:
        """Take text and the marker that begins reasoning; False if none comes any more."""
        if self._is_anywhere:
            is_opened = yield from self._flow(self._starts, self._content)
        else:
            is_opened = yield from self._starts_next()
        if is_opened:
            yield from self._skip_space()
        return is_opened

    def _flow(self, ends: Markers, deliver: Callable[[str], None]) -> Steps[bool]:
        """Deliver text up to one of `ends` and take that; at the end of the reply deliver all and return False."""
        reader = self._reader
        while True:
            found = ends.find(reader.text, reader.position)
            stop = ends.first_open(reader.text, reader.position) if found is None else found.start()
            is_over = found is None and reader.has_ended
            stop = len(reader.text) if is_over else space_before(reader.text, reader.position, stop)
            deliver(reader.text[reader.position : stop])
            reader.position = stop if found is None else found.end()
            if is_over or found is not None:
                return not is_over
            yield

    def _starts_next(self) -> Steps[bool]:
        """Take white space and a marker that begins reasoning if that is what comes next; else take nothing."""
        reader = self._reader
        while True:
            rest = reader.text[reader.position :].lstrip(SPACE)
            for literal in self._starts.literals:
                if rest.startswith(literal):
                    reader.position = len(reader.text) - len(rest) + len(literal)
                    return True
            is_open = any(literal.startswith(rest) for literal in self._starts.literals)
            if reader.has_ended or not is_open or len(reader.text) - reader.position - len(rest) > _MAX_LEADING_SPACE:
                return False
            yield

    def _skip_space(self) -> Steps[None]:
        reader = self._reader
        while True:
            rest = reader.text[reader.position :].lstrip(SPACE)
            reader.position = len(reader.text) - len(rest)
            if rest or reader.has_ended:
                return
            yield

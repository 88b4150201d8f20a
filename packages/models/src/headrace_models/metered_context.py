"""jinja2's context of one rendering: the operations that compiled templates run under the meter."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

from jinja2.runtime import Context

from headrace_models.meter import NESTED, SHORT, SIZED, Meter

__all__ = ["MeteredContext"]


class MeteredContext(Context):
    """What a template's variables are looked up in, with the meter of this rendering.

    Attributes:
        meter: set before the rendering starts.
        tick: the meter's; the compiled code calls it in every loop turn.
    """

    meter: Meter
    tick: Callable[[], None]

    def use(self, meter: Meter) -> None:
        self.meter = meter
        self.tick = meter.tick

    def charge(self, units: int) -> None:
        self.meter.charge(units)

    def sized(self, value: object) -> object:
        """Charge for a value that is kept."""
        if type(value) is str and len(value) <= SHORT:
            self.tick()
            return value
        return self.meter.sized(value)

    def shown(self, value: object) -> str:
        """Turn an expression whose text goes into a buffer into text."""
        if type(value) is str and len(value) <= SHORT:
            self.tick()
            return value
        text = self.text_of(value)
        self.meter.check_size(len(text))
        return text

    def text_of(self, value: object) -> str:
        """Turn a value into text, its whole weight charged first."""
        if isinstance(value, str):
            return value
        if isinstance(value, (*NESTED, dict)):
            self.meter.weigh(cast("object", value))
        return str(cast("object", value))

    def output(self, pieces: Iterable[str]) -> str:
        """Join what the template puts out."""
        max_chars = self.meter.limits.max_chars
        texts: list[str] = []
        size = 0
        append = texts.append
        for text in pieces:
            append(text)
            size += len(text)
            if size > max_chars:
                break
        self.meter.check_size(size)
        return "".join(texts)

    def joined(self, values: Iterable[object], separator: str = "") -> str:
        """Join values as text."""
        max_chars = self.meter.limits.max_chars
        texts: list[str] = []
        size = 0
        for value in values:
            text = self.text_of(value)
            texts.append(text)
            size += len(text) + len(separator)
            if size > max_chars:
                break
        self.meter.check_size(size)
        return separator.join(texts)

    def built(self, value: object) -> object:
        """Charge for a literal list, tuple or object with all that it holds: such values can double at each level."""
        self.meter.weigh(value)
        return value

    def counted(self, items: Iterable[object]) -> Iterator[object]:
        """Hand a loop's items on to its condition, spending a step for each."""
        return self.meter.counted(items)

    def contains(self, item: object, container: object) -> bool:
        """Evaluate `item in container`."""
        if isinstance(container, SIZED) and len(container) > SHORT:
            self.meter.charge(len(container))
        return item in cast("Sequence[object] | Mapping[object, object]", container)

    def derived(self, locals: dict[str, object] | None = None) -> "MeteredContext":  # noqa: A002  jinja2's name
        context = cast("MeteredContext", super().derived(locals))
        context.use(self.meter)
        return context

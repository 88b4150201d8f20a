"""How a family writes a call, as plain data, so that a grammar can make a model write one."""

import json
from collections.abc import Iterable

from attrs import frozen

__all__ = ["ToolFormat"]


@frozen(kw_only=True)
class ToolFormat:
    """The text around a call's name and its JSON arguments.

    One call is `begin(name)`, a JSON object that the tool's schema describes, and `end`. In a structural tag
    `trigger` is what leads into a call.

    Attributes:
        opening: text before the first call.
        before_name: text before each call's name.
        after_name: text between a call's name and its arguments.
        after_arguments: text after each call's arguments.
        between: text between two calls.
        closing: text after the last call.
        is_json: the name is inside a JSON string.
    """

    before_name: str
    after_name: str
    after_arguments: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    is_json: bool = True

    @property
    def trigger(self) -> str:
        """All text before a call's name."""
        return self.opening + self.before_name

    @property
    def end(self) -> str:
        """All text after the arguments of an only call."""
        return self.after_arguments + self.closing

    def begin(self, name: str) -> str:
        """Return all text before the arguments of an only call."""
        return self.trigger + self._written(name) + self.after_name

    def render(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return the text of calls, each a name and its arguments as JSON."""
        texts = [
            f"{self.before_name}{self._written(name)}{self.after_name}{arguments}{self.after_arguments}"
            for name, arguments in calls
        ]
        return self.opening + self.between.join(texts) + self.closing

    def _written(self, name: str) -> str:
        return json.dumps(name, ensure_ascii=False)[1:-1] if self.is_json else name

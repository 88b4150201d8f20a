"""How many of a prompt's leading tokens the next turn of its conversation will have too."""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import cast

from attrs import define, field

__all__ = ["MAX_PRIMER", "BoundaryProbe"]

# A longer difference comes from the conversation, not from the template's opening of a reply.
MAX_PRIMER = 64
_MAX_MODES = 64
_MAX_MODE_CHARS = 64

_LOG = logging.getLogger(__name__)

Encode = Callable[[Sequence[Mapping[str, object]]], Sequence[int]]
Mode = tuple[object, ...]


@define
class BoundaryProbe:
    """Measures the primer: the tokens that open a reply and that the next turn's prompt does not repeat.

    Templates write `<think>` openings and the like only before the reply at hand. A cache that cannot be trimmed is
    useful to the next turn only if it was saved before them. The length is measured once for each way of rendering.
    """

    _primers: dict[Mode, int] = field(init=False, factory=dict[Mode, int])

    def stable_length(
        self,
        *,
        num_ids: int,
        canonical: Sequence[int],
        messages: Sequence[Mapping[str, object]],
        template_kwargs: Mapping[str, object],
        encode: Encode,
    ) -> int:
        """Return the boundary in the real prompt, between 0 and its length; its length where it cannot be measured.

        Args:
            num_ids: length of the real prompt, whose replies may be segmented as they were generated.
            canonical: the prompt as the tokenizer segments it.
            messages: the conversation.
            template_kwargs: the template's variables; those that can change the primer tell the modes apart.
            encode: renders and encodes a conversation with the same variables, as the prompt was.
        """
        mode = _mode(template_kwargs)
        primer = self._primers.get(mode)
        if primer is None:
            try:
                primer = _measure(canonical, messages, template_kwargs.get("tools"), encode)
            except Exception as error:  # noqa: BLE001  a template can fail in any way on turns that nobody sent
                _LOG.debug("the stable boundary is not known: the probe failed with %s", type(error).__name__)
                return num_ids
            if 0 <= primer <= MAX_PRIMER:
                self._remember(mode, primer)
        return max(0, num_ids - primer)

    def _remember(self, mode: Mode, primer: int) -> None:
        if len(self._primers) >= _MAX_MODES:
            self._primers.clear()
        self._primers[mode] = primer


def _measure(canonical: Sequence[int], messages: Sequence[Mapping[str, object]], tools: object, encode: Encode) -> int:
    # Some templates keep an empty opening before texts and drop it before tool calls; the boundary must suit both.
    # The user's turn behind makes templates that rewrite the last reply do as they will in the next request.
    follow_up = {"role": "user", "content": "x"}
    common = min(_num_common(canonical, encode([*messages, reply, follow_up])) for reply in _replies(tools))
    return len(canonical) - common


def _replies(tools: object) -> list[Mapping[str, object]]:
    replies: list[Mapping[str, object]] = [{"role": "assistant", "content": "x"}]
    if tools:
        first = cast("Sequence[Mapping[str, Mapping[str, object]]]", tools)[0]
        function = {"name": first["function"]["name"], "arguments": {}}
        call = {"id": "cache-boundary-probe", "type": "function", "function": function}
        replies.append({"role": "assistant", "content": None, "tool_calls": [call]})
    return replies


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _mode(template_kwargs: Mapping[str, object]) -> Mode:
    # Every switch counts, enable_thinking, reasoning_effort and preserve_thinking among them; texts that differ in
    # each request do not.
    switches = [
        (name, value)
        for name, value in sorted(template_kwargs.items())
        if isinstance(value, bool | int | None) or (isinstance(value, str) and len(value) <= _MAX_MODE_CHARS)
    ]
    return (bool(template_kwargs.get("tools")), *switches)

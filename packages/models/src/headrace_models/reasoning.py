"""Whether and how hard a model thinks, in the variables that its own template reads."""

import re
from collections.abc import Mapping

__all__ = ["reasoning_kwargs"]

# The efforts that interfaces know, from least to most.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
# Names that templates know the switch by; Granite and DeepSeek use the second.
_SWITCHES = ("enable_thinking", "thinking")


def reasoning_kwargs(
    source: str, *, reasoning_effort: str | None, template_kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Add to a request's template variables what follows from its reasoning effort.

    The first of these decides whether the model thinks: a boolean `enable_thinking` (or `thinking`) among the
    variables, the effort (`none` means no), and the template's own default. A template that knows one of the two
    names gets it under that name. An effort that the template does not mention becomes the nearest one it does.

    Args:
        source: the template's text.
        reasoning_effort: none, minimal, low, medium, high or xhigh; others reach the template unchanged.
        template_kwargs: the request's own variables; they win.
    """
    result = dict(template_kwargs)
    switches = [result[name] for name in _SWITCHES if isinstance(result.get(name), bool)]
    by_effort = [] if reasoning_effort is None else [reasoning_effort != "none"]
    thinks = next(iter([*switches, *by_effort]), None)
    if thinks is not None:
        names = [name for name in _SWITCHES if re.search(rf"\b{name}\b", source)]
        for name in names or ["enable_thinking"]:
            result.setdefault(name, thinks)
    if reasoning_effort is not None:
        result.setdefault("reasoning_effort", _nearest(reasoning_effort, source))
    return result


def _nearest(effort: str, source: str) -> str:
    known = [name for name in _EFFORTS if re.search(rf"""["']{name}["']""", source)]
    if effort not in _EFFORTS or not known:
        return effort
    wanted = _EFFORTS.index(effort)
    return min(known, key=lambda name: abs(_EFFORTS.index(name) - wanted))

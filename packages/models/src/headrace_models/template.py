"""Chat templates: messages to prompt text, in jinja2's sandbox, with the helpers that templates expect."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn, cast

from attrs import define, field

from headrace_models.errors import TemplateError, UnsupportedFormat
from headrace_models.meter import RenderLimits

if TYPE_CHECKING:
    from jinja2 import Template

    from headrace_models.sandbox import Sandbox

__all__ = ["ChatTemplate", "normalize_messages"]


@define
class ChatTemplate:
    """A model's chat template, compiled on first use.

    Attributes:
        sources: Jinja text by name; `default` is used, and `tool_use`, where there is one, when tools are given.
        special_tokens: names like `bos_token` and their text, visible to the template.
        limits: what one rendering may spend; templates come with models and nobody has vetted them.
    """

    sources: Mapping[str, str] = field()
    special_tokens: Mapping[str, str] = field(factory=dict[str, str])
    limits: RenderLimits = field(factory=RenderLimits, kw_only=True)
    _compiled: "dict[str, Template]" = field(init=False, factory=dict[str, "Template"], repr=False, eq=False)

    @sources.validator  # pyright: ignore[reportAttributeAccessIssue, reportUntypedFunctionDecorator]
    def _check_sources(self, _attribute: object, sources: Mapping[str, str]) -> None:
        if not sources:
            raise TemplateError("a chat template needs at least one source")

    def render(
        self, messages: Sequence[Mapping[str, object]], *, template_kwargs: Mapping[str, object] | None = None
    ) -> str:
        """Render a conversation, ready for the model's reply.

        Args:
            messages: as the API takes them; they are normalised first and not changed.
            template_kwargs: further variables of the template: tools, enable_thinking, add_generation_prompt.

        Raises:
            TemplateError: the template refuses the messages, or fails on them.
            UnsupportedFormat: jinja2 is not installed.
        """
        given = dict(template_kwargs or {})
        if "messages" in given:
            raise TemplateError("'messages' cannot be a template variable of a request: it is the conversation itself")
        variables = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self.special_tokens,
            **given,
            "messages": normalize_messages(messages),
        }
        environment = self._environment
        try:
            source = self._pick(with_tools=bool(variables["tools"]))
            return environment.render_metered(source, self._compile(source), variables)
        except TemplateError:
            raise
        except Exception as error:
            # A template is a program by the model's authors: it can fail with any exception.
            raise TemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error!s:.500}; "
                f"check the roles and contents that this model's template accepts"
            ) from error

    def _pick(self, *, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        # A list of templates may lack a default; then its first one is what the authors show first.
        return self.sources.get(name) or next(iter(self.sources.values()))

    def _compile(self, source: str) -> "Template":
        compiled = self._compiled.get(source)
        if compiled is None:
            if len(source) > self.limits.max_source_chars:
                raise TemplateError(
                    f"the chat template has {len(source)} characters; at most {self.limits.max_source_chars} are "
                    f"allowed (max_source_chars)"
                )
            compiled = self._compiled[source] = self._environment.from_string(source)
        return compiled

    @cached_property
    def _environment(self) -> "Sandbox":
        return _sandbox(self.limits)


def normalize_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Bring messages into the form that templates are written for.

    Role developer becomes system, an array of text parts one string, an absent content the empty string, and a
    tool call's argument string the object it holds. Arrays with other parts than text stay as they are.
    """
    return [_normalize(message) for message in messages]


def _normalize(message: Mapping[str, object]) -> dict[str, object]:
    result = dict(message)
    if result.get("role") == "developer":
        result["role"] = "system"
    result["content"] = _joined(result.get("content"))
    calls = result.get("tool_calls")
    if isinstance(calls, list):
        result["tool_calls"] = [_parsed_call(call) for call in cast("list[object]", calls)]
    return result


def _joined(content: object) -> object:
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return content
    texts: list[str] = []
    for part in cast("Sequence[object]", content):
        text = cast("Mapping[str, object]", part).get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            return cast("object", content)
        texts.append(text)
    return "".join(texts)


def _parsed_call(call: object) -> object:
    if not isinstance(call, Mapping):
        return call
    function = cast("Mapping[str, object]", call).get("function")
    if not isinstance(function, Mapping):
        return cast("object", call)
    arguments = cast("Mapping[str, object]", function).get("arguments")
    if not isinstance(arguments, str):
        return cast("object", call)
    try:
        parsed: object = json.loads(arguments)
    except (ValueError, RecursionError):
        # Some models are trained on calls whose arguments are no JSON; the template then sees the text.
        return cast("object", call)
    return {
        **cast("Mapping[str, object]", call),
        "function": {**cast("Mapping[str, object]", function), "arguments": parsed},
    }


def _sandbox(limits: RenderLimits) -> "Sandbox":
    if find_spec("jinja2") is None:
        raise UnsupportedFormat("chat templates need jinja2, which is not installed: install headrace-models[text]")
    from headrace_models.sandbox import Sandbox

    helpers = {"raise_exception": _refuse, "strftime_now": _now}
    return Sandbox(limits=limits, helpers=helpers, filters={"tojson": _to_json})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(f"the model's chat template refuses these messages: {message!s:.500}")


def _now(pattern: str) -> str:
    # Templates mean the reader's day, as transformers gives it to them.
    return datetime.now().strftime(pattern)  # noqa: DTZ005


# Jinja's own filter escapes HTML characters, which would change what the model reads.
def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

"""Chat templates: messages to prompt text, in jinja2's sandbox, with the helpers that templates expect."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from attrs import define, field

from headrace_models.errors import TemplateError, UnsupportedFormat
from headrace_models.messages import normalize_messages, normalize_tools
from headrace_models.meter import RenderLimits

if TYPE_CHECKING:
    from jinja2 import Template

    from headrace_models.sandbox import Sandbox

__all__ = ["ChatTemplate"]


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
            template_kwargs: further variables of the template: tools (normalised too), enable_thinking,
                add_generation_prompt.

        Raises:
            TemplateError: the template refuses the messages, or fails on them.
            UnsupportedFormat: jinja2 is not installed.
        """
        given = dict(template_kwargs or {})
        if "messages" in given:
            raise TemplateError("'messages' cannot be a template variable of a request: it is the conversation itself")
        variables = {
            "documents": None,
            "add_generation_prompt": True,
            **self.special_tokens,
            **given,
            "tools": normalize_tools(given.get("tools")),
            "messages": normalize_messages(messages),
        }
        environment = self._environment
        try:
            source = self.source_for(with_tools=bool(variables["tools"]))
            return environment.render_metered(source, self._compile(source), variables)
        except TemplateError:
            raise
        except Exception as error:
            # A template is a program by the model's authors: it can fail with any exception.
            raise TemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error!s:.500}; "
                f"check the roles and contents that this model's template accepts"
            ) from error

    def source_for(self, *, with_tools: bool) -> str:
        """Return the Jinja text that renders conversations with or without tools."""
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

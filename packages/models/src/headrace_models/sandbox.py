"""jinja2's immutable sandbox for templates that nobody vetted: it cannot run for long, build much or reach objects."""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import BuiltinMethodType, GeneratorType
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from headrace_models.meter import SHORT, SIZED, STEP_COST, Meter, RenderLimits
from headrace_models.metered_code import MeteredGenerator
from headrace_models.metered_context import MeteredContext
from headrace_models.widening import (
    DICT_NAMES,
    FILTER_GUARDS,
    FILTERS,
    GLOBALS,
    LOOP_NAMES,
    METHOD_GUARDS,
    METHODS,
    SHRINKING,
    Operation,
    check_format,
    check_power,
)

__all__ = ["Sandbox"]


class Generation(Extension):
    """Accepts `{% generation %}`, which marks the reply for training, and renders what is inside."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PlainNamespace(Namespace):
    """A namespace whose text does not show what it holds: namespaces in namespaces would double at each level."""

    def __repr__(self) -> str:
        return "<Namespace>"


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates."""

    code_generator_class = MeteredGenerator
    context_class = MeteredContext
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(
        self,
        *,
        limits: RenderLimits,
        helpers: Mapping[str, Callable[..., object]],
        filters: Mapping[str, Callable[..., object]],
    ) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        self.limits = limits
        known = {name: self.filters[name] for name in FILTERS} | dict(filters)
        self.filters = {name: _metered_filter(name, function) for name, function in known.items()}
        self.filters |= {"join": _join, "replace": _replace}
        cast("dict[str, object]", self.tests)["in"] = _contains
        found = cast("dict[str, object]", self.globals)
        self.globals = {name: found[name] for name in GLOBALS} | {"namespace": PlainNamespace} | dict(helpers)

    def render_metered(self, source: str, template: Any, variables: Mapping[str, object]) -> str:
        """Render a compiled template within the limits.

        Raises:
            TemplateError: a limit is reached; the message names it.
            Exception: whatever the template's own code raises.
        """
        context = cast("MeteredContext", template.new_context(variables))
        context.use(Meter(self.limits))
        context.charge(len(source))
        return context.output(template.root_render_func(context))

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The usual cases first, in fewer steps than jinja2's; objects of JSON rarely have an attribute of a key's name.
        kind = type(obj)
        if kind is dict and attribute in obj and attribute not in DICT_NAMES:
            return obj[attribute]
        if kind is LoopContext and attribute in LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # jinja2 refuses what is known to be dangerous; of Python's own types only what is known to be harmless is left.
        methods = METHODS.get(type(obj))
        return attr in methods if methods is not None else super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        meter = cast("MeteredContext", context).meter
        if operator == "%" and isinstance(left, str):
            check_format(context, left, right if isinstance(right, tuple) else (right,))
        elif operator == "**":
            check_power(left, right)
        elif operator == "*":
            _check_product(meter, left, right)
        return meter.sized(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063  jinja2's
        context = cast("MeteredContext", __context)
        context.tick()
        # Scopes that jinja2 hands to functions which take a context; none that templates can reach does.
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if _is_light(__obj):
            return __obj(*args, **kwargs)
        if not __self.is_safe_callable(__obj):
            raise SecurityError(f"{__obj!r} is not safely callable")
        return context.sized(context.call(__obj, *_checked(context, __obj, args, kwargs), **kwargs))

    def call_test(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        # Filters like select run a test for every element, out of sight of the compiled code.
        for context in (*args[2:3], kwargs.get("context")):
            if isinstance(context, MeteredContext):
                context.charge(STEP_COST + (len(value) if isinstance(value, str) else 0))
        return super().call_test(name, value, *args, **kwargs)


def _is_light(function: Any) -> bool:
    """Tell the usual call: a method of a short text that cannot make it much longer."""
    if type(function) is not BuiltinMethodType:
        return False
    text: object = function.__self__
    return type(text) is str and len(text) <= SHORT and function.__name__ not in METHOD_GUARDS


def _checked(
    context: MeteredContext, function: object, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, ...]:
    if isinstance(function, Macro):
        if function.catch_varargs or function.catch_kwargs:
            context.meter.weigh((args, keywords))
        for value in (*args, *keywords.values()):
            context.sized(value)
        return args
    # Of methods only those of texts can make much of little; a formatting one comes wrapped by the sandbox.
    method: Any = getattr(function, "__wrapped__", function)
    text = getattr(method, "__self__", None)
    if isinstance(text, str):
        context.charge(len(text))
        guard = METHOD_GUARDS.get(method.__name__)
        return args if guard is None else guard(Operation(context, text, args, keywords))
    if function is dict or function is PlainNamespace:
        context.meter.weigh((args, keywords))
    return args


def _check_product(meter: Meter, left: object, right: object) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and isinstance(count, int):
            weight = len(value) if isinstance(value, str | bytes) else meter.weigh(cast("object", value))
            meter.check_size(weight * max(0, count))
            return
    if isinstance(left, int) and isinstance(right, int):
        check_power(left, 1)
        check_power(right, 1)


@pass_context
def _contains(context: MeteredContext, value: object, container: object) -> bool:
    return context.contains(value, container)


@pass_context
def _replace(context: MeteredContext, s: object, old: object, new: object, count: int | None = None) -> str:
    text, before, after = context.text_of(s), context.text_of(old), context.text_of(new)
    growth = len(after) - len(before)
    size = len(text) + (text.count(before) * growth if growth > 0 else 0)
    if size > SHORT:
        context.meter.check_size(size)
    else:
        context.tick()
    return text.replace(before, after, -1 if count is None else count)


@pass_context
def _join(context: MeteredContext, value: Any, d: object = "", attribute: str | int | None = None) -> str:
    context.charge(STEP_COST)
    items = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return context.joined(items, str(d))


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., object]:
    guard = FILTER_GUARDS.get(name)
    wanted = getattr(function, "jinja_pass_arg", None)
    is_plain = name in SHRINKING and wanted is None

    @wraps(function)
    def metered(context: MeteredContext, value: Any, /, *args: Any, **keywords: Any) -> object:
        if is_plain and type(value) is str and len(value) <= SHORT:
            context.tick()
            return function(value, *args, **keywords)
        context.charge(STEP_COST + (len(value) if isinstance(value, SIZED) else 0))
        if guard is not None:
            args = guard(Operation(context, value, args, keywords))
        if wanted is None:
            result = function(value, *args, **keywords)
        else:
            result = function(_PASSED[wanted.name](context), value, *args, **keywords)
        if isinstance(result, GeneratorType):
            return context.counted(cast("Iterator[object]", result))
        return context.sized(result)

    return pass_context(metered)


_PASSED: Mapping[str, Callable[[MeteredContext], object]] = {
    "context": lambda context: context,
    "eval_context": lambda context: context.eval_ctx,
    "environment": lambda context: context.environment,
}

"""Hostile templates: whatever a template does, it ends soon, with a limited text, and reaches no object of the host."""

import contextlib
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.errors import TemplateError
from headrace_models.meter import Meter, RenderLimits
from headrace_models.template import ChatTemplate

# The rest is for a machine that does other things too.
LIMITS = RenderLimits(max_seconds=0.3)
MAX_SECONDS = LIMITS.max_seconds + 2.0

DOUBLE = "{% set ns = namespace(x='0123456789abcdef') %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}"
NEST = "{% set ns = namespace(x=[], y=[]) %}{% for i in range(99) %}{% set ns.x = XSTEP %}{% set ns.y = YSTEP %}"
LONG_LOOPS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "conditions": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loop length": "{% for a in range(99999) %}{% for b in range(99999) %}{{ loop.length }}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "blocks": "{% block a %}{% for i in [1, 2] %}{{ self.a() }}{% endfor %}{% endblock %}",
    "recursive loop": "{% for a in [[]] * 9 recursive %}{{ loop([[]] * 9) }}{% endfor %}",
    "call blocks": (
        "{% macro m(n) %}{% if n %}{% for i in [1, 2] %}{% call m(n - 1) %}{% endcall %}"
        "{{ caller is defined }}{% endfor %}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "select": "{% for a in range(99999) %}{{ range(99999) | select('gt', 99999) | list }}{% endfor %}",
    "map": "{% for a in range(99999) %}{{ range(99999) | map('upper') | list | length }}{% endfor %}",
    "sort": "{% set r = range(99999) | list %}{% for a in range(99999) %}{{ (r | sort)[0] }}{% endfor %}",
    "search": "{% set t = 'ab' * 999999 %}{% for a in range(99999) %}{% if 'aa' in t %}{% endif %}{% endfor %}",
    "strings": "{% set t = 'ab' * 999999 %}{% for a in range(99999) %}{% set u = t.split('a') %}{% endfor %}",
    "lower": "{% set t = 'ab' * 999999 %}{% for a in range(99999) %}{% set u = t | lower %}{% endfor %}",
}
GIANTS = {
    "loop": "{% set t = 'x' * 999999 %}{% for a in range(99999) %}{{ t }}{% endfor %}",
    "static text": "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "static text in a buffer": "{% set t %}{% for a in range(99999) %}"
    + "x" * 9999
    + "{% endfor %}{% endset %}{{ t }}",
    "times": "{{ 'x' * 10 ** 10 }}",
    "times list": "{{ [1] * 10 ** 10 }}",
    "times folded": "{% set t = 'x' * 9999999999 %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "products": "{% set ns = namespace(n=9) %}{% for a in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "plus": DOUBLE.replace("STEP", "ns.x + ns.x"),
    "tilde": DOUBLE.replace("STEP", "ns.x ~ ns.x"),
    "block set": DOUBLE.replace(
        "{% set ns.x = STEP %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "replace": DOUBLE.replace("STEP", "ns.x.replace('', ns.x)"),
    "replace filter": DOUBLE.replace("STEP", "ns.x | replace('a', ns.x)"),
    "join": DOUBLE.replace("STEP", "ns.x.join(['a', ns.x, 'b'])"),
    "join filter": DOUBLE.replace("STEP", "[ns.x, ns.x] | join"),
    "join of text": DOUBLE.replace("STEP", "ns.x | join(ns.x)"),
    "format": DOUBLE.replace("STEP", "'{0}{0}'.format(ns.x)"),
    "format filter": DOUBLE.replace("STEP", "'%s%s' | format(ns.x, ns.x)"),
    "percent": DOUBLE.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "escape": DOUBLE.replace("0123", "&&&&").replace("STEP", "(ns.x | e | string) * 2"),
    "format width": "{{ '{:>9999999999}'.format('x') }}",
    "format inner width": "{{ '{:>{}}'.format('x', 9999999999) }}",
    "percent width": "{{ '%9999999999s' % 'x' }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "zfill": "{{ 'x'.zfill(9999999999) }}",
    "indent": "{{ 'x\n\n' | indent(9999999999) }}",
    "json indent": "{{ [1] | tojson(indent=999999999) }}",
    "round": "{{ 1.5 | round(999999999, 'ceil') }}",
    "list of texts": (
        "{% set t = 'x' * 999999 %}{% set ns = namespace(l=[]) %}{% for a in range(999) %}"
        "{% set ns.l = ns.l + [t] %}{% endfor %}{{ ns.l SHOW }}"
    ),
    "nested lists": NEST.replace("XSTEP", "[ns.x, ns.x]").replace("YSTEP", "1") + "{% endfor %}{{ ns.x }}",
    "nested lists compared": (
        NEST.replace("XSTEP", "[ns.x, ns.x]").replace("YSTEP", "[ns.y, ns.y]") + "{% endfor %}{{ ns.x == ns.y }}"
    ),
    "nested objects": NEST.replace("XSTEP", "{'a': ns.x, 'b': ns.x}").replace("YSTEP", "1") + "{% endfor %}{{ ns.x }}",
    "nested dict()": NEST.replace("XSTEP", "dict(a=ns.x, b=ns.x)").replace("YSTEP", "1") + "{% endfor %}{{ ns.x }}",
    "varargs": "{% macro m() %}{{ m(varargs, varargs) }}{% endmacro %}{{ m('x') }}",
    "many texts": (
        "{% set ns = namespace(l=[]) %}{% set t = 'x' * 999999 %}{% for a in range(9999) %}"
        "{% set ns.l = ns.l + [t ~ a] %}{% endfor %}"
    ),
}
GIANTS |= {f"list of texts{show}": GIANTS["list of texts"].replace("SHOW", show) for show in ("", "| tojson", "| join")}
del GIANTS["list of texts"]


def render(source, *, limits=None, **variables):
    template = ChatTemplate({"default": source}, limits=limits or LIMITS)
    return template.render([{"role": "user", "content": "hi"}], template_kwargs=variables)


@pytest.mark.parametrize("source", LONG_LOOPS.values(), ids=LONG_LOOPS)
def test_a_template_without_end_is_stopped(source):
    """Loops, recursion and filters over much end in an error that names the limit, soon after its time."""
    started = time.monotonic()
    with pytest.raises(TemplateError, match=r"max_work|max_seconds|max_chars|RecursionError"):
        render(source)
    assert time.monotonic() - started < MAX_SECONDS


@pytest.mark.parametrize("source", GIANTS.values(), ids=GIANTS)
def test_a_giant_text_is_never_built(source):
    """Whatever operation would make much of little is refused before it has the memory."""
    started = time.monotonic()
    with pytest.raises(TemplateError, match=r"max_\w+|bits|at most|computed width|RecursionError"):
        render(source)
    assert time.monotonic() - started < MAX_SECONDS


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{0.__class__.__init__}'.format_map({'0': ''}) }}",
        "{{ messages | map(attribute='__class__') | first }}",
        "{{ self._TemplateReference__context.environment.globals }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range.__init__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].__setitem__('role', 'system') }}",
        "{{ (1).to_bytes(9999999999, 'big') }}",
        "{{ ''.encode() }}",
        "{{ ''.translate({}) }}",
        "{{ 'x\t'.expandtabs(999) }}",
        "{{ lipsum(9999) }}",
        "{% include 'other' %}",
        "{% extends 'other' %}",
        "{% import 'os' as os %}",
        "{% autoescape true %}{{ messages }}{% endautoescape %}",
        "{{ 1 < 2 in [2] }}",
        "{{ 'x' | urlize }}",
    ],
)
def test_tricks_with_attributes_and_tools_of_jinja_are_refused(source):
    """Objects of the host stay out of reach, values cannot be changed, what templates do not need is not there."""
    with contextlib.suppress(TemplateError):
        assert render(source) == ""


def test_other_threads_go_on_while_a_template_is_stopped():
    """A thread that renders without end is stopped after two seconds, and lets another one run all the time."""
    failures = []

    def hostile():
        try:
            render(LONG_LOOPS["nested loops"], limits=RenderLimits())
        except TemplateError as error:
            failures.append(str(error))

    thread = threading.Thread(target=hostile)
    longest, last = 0.0, (started := time.monotonic())
    thread.start()
    while thread.is_alive():
        threading.Event().wait(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    thread.join()
    assert len(failures) == 1
    assert longest < 0.5
    assert time.monotonic() - started < 4.0


def test_each_limit_can_be_set_and_is_named():
    """A source, work, text or time over its own limit ends with that limit's name and value."""
    loop = "{% for a in range(9999) %}{{ a }}{% endfor %}"
    for limits, words in [
        (RenderLimits(max_source_chars=9), "9 are allowed .max_source_chars"),
        (RenderLimits(max_work=99), "99 units .max_work"),
        (RenderLimits(max_chars=9999), "9999 .max_chars"),
        (RenderLimits(max_seconds=0.0), "0 s .max_seconds"),
    ]:
        with pytest.raises(TemplateError, match=words):
            render(loop, limits=limits)
    assert render(loop).startswith("0123")


def test_the_meter_looks_at_the_clock_often():
    """No more than 256 steps pass between the deadline and its error."""
    now = 0.0
    meter = Meter(RenderLimits(), clock=lambda: now)
    for _ in range(1000):
        meter.tick()
    now = 2.5

    def go_on():
        for _ in range(257):
            meter.tick()

    with pytest.raises(TemplateError, match="2 s"):
        go_on()


OPERATORS = ["+", "-", "*", "/", "//", "%", "~", "==", "<", "in", "and", "or"]
FILTERS = ["upper", "trim", "length", "list", "string", "first", "tojson", "e", "d(1)"]
EXPRESSIONS = st.recursive(
    st.sampled_from(["'a'", "''", "x", "n", "3", "0", "l", "m.a", "m['b']", "m.missing", "none", "true", "2.5"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(OPERATORS), inner),
        st.builds("({} not in {})".format, inner, inner),
        st.builds("({} | {})".format, inner, st.sampled_from(FILTERS)),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds(
            "{}.{}".format, inner, st.sampled_from(["upper()", "split('a')", "replace('a', 'bb')", "items()", "a"])
        ),
        st.builds("'{{}}-{{}}'.format({}, {})".format, inner, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(expression=EXPRESSIONS)
def test_metered_templates_render_as_jinjas_own_sandbox_does(expression):
    """For any expression, written out, kept, buffered and looped over: jinja2's text, or an error where it has one."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = (
        f"{{{{ {expression} }}}}|{{% set k = {expression} %}}{{{{ k }}}}{{% macro f(v) %}}{{{{ v }}}}{{% endmacro %}}"
        f"{{{{ f({expression}) }}}}{{% for i in [1, 2] if i > 1 %}}"
        f"{{{{ {expression} }}}}{{{{ loop.index }}}}{{% endfor %}}"
    )
    variables = {"x": "xa <b>", "n": 7, "l": ["a", 1, {"a": None}], "m": {"a": "A&", "b": [2]}}
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    ours = ChatTemplate({"default": source})
    plain.filters["tojson"] = ours._environment.filters["tojson"].__wrapped__
    try:
        expected = plain.from_string(source).render(variables)
    except Exception:
        with pytest.raises(TemplateError):
            ours.render([], template_kwargs=variables)
    else:
        assert ours.render([], template_kwargs=variables) == expected

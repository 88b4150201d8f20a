"""What importing costs."""

import subprocess
import sys

import pytest

import headrace_http_api

LIGHT = ["headrace_http_api"] + [
    f"headrace_http_api.{name}"
    for name in (
        "app",
        "audio",
        "audio_ports",
        "config",
        "disconnect",
        "engine_stats",
        "error_table",
        "errors",
        "json_body",
        "middleware",
        "models",
        "observability",
        "ports",
        "services",
        "sse",
        "validation",
    )
]


def loaded_roots(code):
    code += "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_base_modules_need_no_extra():
    """Everything but the generating routes works without scheduling, sampling and mlx."""
    roots = loaded_roots("import " + ", ".join(LIGHT))

    assert not roots & {"headrace_scheduling", "headrace_sampling", "headrace_models", "headrace_kvcache", "mlx"}


def test_generating_routes_load_no_mlx():
    """The serving process never loads mlx or a model."""
    roots = loaded_roots("import headrace_http_api.chat, headrace_http_api.completions")

    assert "headrace_scheduling" in roots
    assert not roots & {"headrace_models", "headrace_kvcache", "mlx", "numpy"}


def test_root_loads_lazily():
    """Importing the root imports nothing heavy."""
    assert not loaded_roots("import headrace_http_api") & {"starlette", "cattrs", "attrs"}


@pytest.mark.parametrize("name", headrace_http_api.__all__)
def test_public_names_exist(name):
    """Every public name imports from the root."""
    assert getattr(headrace_http_api, name) is not None


def test_public_names_are_sorted_and_closed():
    """`__all__` is sorted, `dir` is `__all__`, and nothing else is found."""
    assert sorted(headrace_http_api.__all__) == headrace_http_api.__all__ == dir(headrace_http_api)
    with pytest.raises(AttributeError):
        headrace_http_api.nothing  # noqa: B018

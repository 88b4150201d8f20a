"""The loader crosses into a child process and loads what its settings name."""

import pickle

import pytest

from headrace_chat_server.engine_loader import EngineLoader
from headrace_chat_server.errors import ModelUnavailable
from headrace_chat_server.models import find_model, require_backend


@pytest.mark.parametrize(("dtype", "representation"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_pickled_loader_loads_the_named_model_in_the_named_form(tiny_llama, dtype, representation):
    """What arrives in the child is the same loader, and --dtype decides the form of the weights."""
    source = find_model(str(tiny_llama))
    loader = EngineLoader(name=source.name, path=source.path, format=source.format, dtype=dtype)
    arrived = pickle.loads(pickle.dumps(loader))
    assert arrived == loader
    loaded = arrived()
    assert loaded.config.vocab_size == 320
    assert loaded.representation == representation


def test_a_missing_backend_is_told_with_the_extras_that_bring_it(monkeypatch):
    """Without MLX nothing can run; the message says what to install instead of a traceback."""
    require_backend()
    monkeypatch.setattr("headrace_chat_server.models.find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"headrace-chat-server\[cpu\]"):
        require_backend()

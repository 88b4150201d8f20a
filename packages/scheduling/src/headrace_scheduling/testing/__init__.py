"""Fakes for tests and benchmarks of this package and of those that use it; all can be built in a child process.

`text` (a byte codec), `steps` (a step runner in plain Python), `loading` (loaders and configurations without a
model), `port` (an engine port driven by hand) need no mlx; `models` has small runtime models and needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_scheduling.testing.engine_run import EngineRun as EngineRun
    from headrace_scheduling.testing.engine_run import make_submit as make_submit
    from headrace_scheduling.testing.loading import FakeLoadedModel as FakeLoadedModel
    from headrace_scheduling.testing.loading import FakeLoader as FakeLoader
    from headrace_scheduling.testing.loading import FakeRunnerFactory as FakeRunnerFactory
    from headrace_scheduling.testing.loading import fake_config as fake_config
    from headrace_scheduling.testing.loading import unpicklable_value as unpicklable_value
    from headrace_scheduling.testing.models import FailingModel as FailingModel
    from headrace_scheduling.testing.models import ModelLoaderFake as ModelLoaderFake
    from headrace_scheduling.testing.models import NullModel as NullModel
    from headrace_scheduling.testing.models import ScriptedModel as ScriptedModel
    from headrace_scheduling.testing.port import FakePort as FakePort
    from headrace_scheduling.testing.steps import FakeStepRunner as FakeStepRunner
    from headrace_scheduling.testing.store import FakePrefixStore as FakePrefixStore
    from headrace_scheduling.testing.text import FakeCodec as FakeCodec
    from headrace_scheduling.testing.text import FakeDecoder as FakeDecoder

__all__ = [
    "EngineRun",
    "FailingModel",
    "FakeCodec",
    "FakeDecoder",
    "FakeLoadedModel",
    "FakeLoader",
    "FakePort",
    "FakePrefixStore",
    "FakeRunnerFactory",
    "FakeStepRunner",
    "ModelLoaderFake",
    "NullModel",
    "ScriptedModel",
    "fake_config",
    "make_submit",
    "unpicklable_value",
]

_MODULES = {
    "EngineRun": "engine_run",
    "FailingModel": "models",
    "FakeCodec": "text",
    "FakeDecoder": "text",
    "FakeLoadedModel": "loading",
    "FakeLoader": "loading",
    "FakePort": "port",
    "FakePrefixStore": "store",
    "FakeRunnerFactory": "loading",
    "FakeStepRunner": "steps",
    "ModelLoaderFake": "models",
    "NullModel": "models",
    "ScriptedModel": "models",
    "fake_config": "loading",
    "make_submit": "engine_run",
    "unpicklable_value": "loading",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)

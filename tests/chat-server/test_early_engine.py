"""The engine's process is there before the engine is needed, and gone when it is not."""

import subprocess
import sys

import pytest

from headrace_chat_server.early_engine import early_engine
from headrace_chat_server.settings import EngineSettings, ServerSettings, Settings


def settings_for(transport):
    return Settings(engine=EngineSettings(transport=transport), server=ServerSettings(log_level="error"))


def test_a_thread_needs_no_process():
    with early_engine(settings_for("thread")) as spawned:
        assert spawned is None


def test_the_process_is_gone_after_a_command_that_never_came_to_an_engine():
    """Law: whatever ends the command, no process stays behind."""
    seen = []

    def fail():
        with early_engine(settings_for("process")) as spawned:
            seen.append(spawned.process)
            assert spawned.process.poll() is None
            raise RuntimeError("no such model")

    with pytest.raises(RuntimeError):
        fail()
    assert seen[0].returncode is not None


def test_warming_up_brings_all_that_a_loaded_model_runs_with():
    """Law: after `warm_up`, loading and the runner import nothing of MLX or Headrace's array code anew."""
    script = (
        "import sys; from headrace_chat_server.engine_loader import warm_up; warm_up();"
        "print(sorted(name for name in sys.modules if name in "
        "('mlx.core', 'headrace_models.building', 'headrace_models.weights', 'headrace_scheduling.runner')))"
    )
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert found.strip() == str(
        ["headrace_models.building", "headrace_models.weights", "headrace_scheduling.runner", "mlx.core"]
    )

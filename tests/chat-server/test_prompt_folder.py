"""The folder of stored prompts is found unusable before a model is loaded."""

import stat

import pytest

from headrace_chat_server.errors import InvalidSetting
from headrace_chat_server.prompt_folder import check_prompt_folder
from headrace_chat_server.settings import build


def engine(**values):
    return build({f"engine.{name}": value for name, value in values.items()}).engine


def test_the_folder_is_made_for_its_owner_alone(tmp_path):
    """A folder that is not there is made, with its parents; one that is there keeps its permissions."""
    folder = tmp_path / "a" / "b"
    check_prompt_folder(engine(prompt_cache_dir=str(folder)))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o750)
    check_prompt_folder(engine(prompt_cache_dir=str(folder)))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750


def test_without_the_flag_nothing_is_made(tmp_path, monkeypatch):
    """No folder is asked for, none is made."""
    monkeypatch.chdir(tmp_path)
    check_prompt_folder(engine())
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_keep_prompts_is_refused_by_name(tmp_path):
    """A file in the way and a cap of nothing are mistakes that name the setting."""
    (tmp_path / "file").write_text("x")
    for values, message in (
        ({"prompt_cache_dir": str(tmp_path / "file")}, "no folder for stored prompts"),
        ({"prompt_cache_dir": str(tmp_path / "file" / "below")}, "no folder for stored prompts"),
        ({"prompt_cache_dir": str(tmp_path), "prompt_cache": 0}, "such as 2G"),
    ):
        with pytest.raises(InvalidSetting, match=message) as caught:
            check_prompt_folder(engine(**values))
        assert caught.value.field == "engine.prompt_cache_dir"

"""The folder that keeps stored prompts from one run to the next."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_chat_server.errors import InvalidSetting

if TYPE_CHECKING:
    from headrace_chat_server.settings import EngineSettings

_KEY = "engine.prompt_cache_dir"


def check_prompt_folder(settings: "EngineSettings") -> None:
    """Make the folder, for its owner alone, and find out whether files can be written there, before a model is loaded.

    Raises:
        InvalidSetting: they cannot, or no prompts are stored at all.
    """
    if settings.prompt_cache_dir is None:
        return
    if not settings.prompt_cache:
        message = f"{_KEY} is {settings.prompt_cache_dir!r}, but engine.prompt_cache is 0: give it bytes, such as 2G"
        raise InvalidSetting(message, origin="settings", field=_KEY)
    folder = Path(settings.prompt_cache_dir).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
        reason = "it may not be written" if not is_usable else None
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if reason is not None:
        message = f"{_KEY} is {settings.prompt_cache_dir!r}, which is no folder for stored prompts: {reason}"
        raise InvalidSetting(message, origin="settings", field=_KEY)

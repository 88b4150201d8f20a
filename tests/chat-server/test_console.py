"""What people read: the same words on a terminal and in a pipe."""

import json
import re
import shlex
import sys

import pytest

from headrace_chat_server.console import announce

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("model", ["smollm2-135m", 'org/it\'s a "model"'])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_hint_is_a_command_that_a_shell_reads_back(capsys, monkeypatch, model, is_terminal):
    """The ready line names model and address; the hint is one shell command with a JSON body, whatever the name."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    announce(model, "http://127.0.0.1:1")
    printed = capsys.readouterr().out
    assert is_terminal or not ANSI.search(printed)
    first, hint, *_ = ANSI.sub("", printed).splitlines()
    assert first == f"Headrace serves {model} on http://127.0.0.1:1/v1"
    words = shlex.split(hint[hint.index("curl") :])
    assert words[:2] == ["curl", "http://127.0.0.1:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == model

"""Conversations that outlive their server: `--prompt-cache-dir` on the starter model."""

import signal

import pytest
from openai import OpenAI

OPENING = [
    {"role": "system", "content": "You answer in a few words. " * 30},
    {"role": "user", "content": "Name a river."},
]


def ask(client, messages):
    """One greedy turn: its text, and its numbers of prompt tokens and of those that came from the cache."""
    answer = client.chat.completions.create(model="default_model", messages=messages, max_tokens=8, temperature=0)
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].message.content, answer.usage.prompt_tokens, details.cached_tokens if details else 0


@pytest.mark.model
def test_a_conversation_goes_on_after_a_restart(start_server, tmp_path):
    """Law: after Ctrl-C and a new start the next turn computes its own tokens alone, and says what one server says.

    A file that was damaged meanwhile is reported and costs no more than its entry.
    """
    flags = ("--prompt-cache-dir", str(tmp_path / "prompts"))
    turn = [*OPENING]
    with start_server(flags) as server, OpenAI(base_url=server.base_url, api_key="x", max_retries=0) as client:
        text, num_opening, cached = ask(client, turn)
        assert cached == 0
        turn += [{"role": "assistant", "content": text}, {"role": "user", "content": "And another?"}]
        expected = ask(client, turn)[0]
        server.process.send_signal(signal.SIGINT)
        server.read_line("stores prompts in")
        assert server.wait() == 0
    with start_server(flags) as server, OpenAI(base_url=server.base_url, api_key="x", max_retries=0) as client:
        again, num_prompt, cached = ask(client, turn)
        assert again == expected
        assert num_prompt > cached > num_opening
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
    files = list((tmp_path / "prompts").rglob("*.safetensors"))
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    with start_server(flags) as server, OpenAI(base_url=server.base_url, api_key="x", max_retries=0) as client:
        assert ask(client, turn)[::2] == (expected, 0)
        assert "a stored prompt is not used" in server.read_errors()
        assert "river" not in server.read_errors()

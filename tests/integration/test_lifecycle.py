"""Starting, failing and stopping: signals, dead processes, and what clients see meanwhile."""

import contextlib
import os
import signal
import time

import httpx
import openai
import pytest
from openai import OpenAI

QUESTION = [{"role": "user", "content": "Count to one hundred."}]


def stream(client, max_tokens):
    """Open a stream of a story that ends by its limit."""
    return client.chat.completions.create(
        model="default_model", messages=QUESTION, max_tokens=max_tokens, temperature=0, stream=True
    )


def make_client(server):
    return OpenAI(base_url=server.base_url, api_key="unused", max_retries=0, timeout=60)


def test_a_killed_engine_costs_its_requests_and_nothing_else(start_server):
    """kill -9 of the engine: its stream ends with an error, the server says that it is not ready, the next one works.
    Then Ctrl-C: the running stream gets its whole answer, no new one is admitted, and the exit code is 0."""
    with start_server() as server, make_client(server) as client:
        engine = server.engine_pid
        running = stream(client, 400)
        next(running)
        os.kill(engine, signal.SIGKILL)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(running)
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 503
        with pytest.raises(openai.APIStatusError) as refused:
            list(stream(client, 2))
        assert refused.value.status_code == 503
        server.wait_until_ready()
        assert server.engine_pid != engine
        assert len(list(stream(client, 2))) >= 2
        assert_drains(server, client)


def assert_drains(server, client):
    engine = server.engine_pid
    running = stream(client, 24)
    first = next(running)
    # As a terminal does it: the whole group gets the signal.
    os.killpg(server.process.pid, signal.SIGINT)
    wait_until_refused(client)
    chunks = [first, *running]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert server.wait() == 0
    server.wait_until_gone(engine)
    assert "Traceback" not in server.read_errors()


def wait_until_refused(client):
    """The signal needs a moment to arrive; from then on nothing is admitted."""
    with contextlib.suppress(openai.APIStatusError, openai.APIConnectionError):
        while True:
            list(stream(client, 1))


def test_a_second_ctrl_c_stops_at_once(start_server):
    """The drain can be cut short; the exit is still clean and leaves no process."""
    with start_server() as server, make_client(server) as client:
        engine = server.engine_pid
        running = stream(client, 4_000)
        next(running)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.HTTPError, openai.APIError):
            while server.get("/ready").status_code != 503:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGINT)
            list(running)
        assert server.wait() == 0
        server.wait_until_gone(engine)


def test_health_answers_while_loading_and_a_killed_server_leaves_no_engine(start_server):
    """The port answers before the model is there; kill -9 of the server while it loads takes the engine along."""
    with start_server(wait_ready=False) as server:
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 503
        engine = server.engine_pid
        server.process.kill()
        server.wait()
        server.wait_until_gone(engine)


def test_ctrl_c_while_loading_is_a_clean_exit(start_server):
    """Nobody has to wait for a model that is not wanted any more."""
    with start_server(wait_ready=False) as server:
        engine = server.engine_pid
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait() == 0
        server.wait_until_gone(engine)
        assert "Traceback" not in server.read_errors()


def test_a_damaged_model_ends_the_program_with_its_reason(start_server, smollm2, tmp_path):
    """What the engine cannot load is exit code 2, and the last line says which file and why; no process stays."""
    damaged = tmp_path / "damaged.gguf"
    with smollm2.path.open("rb") as whole:
        damaged.write_bytes(whole.read(30_000_000))
    with start_server([str(damaged)], wait_ready=False) as server:
        assert server.wait() == 2
        last = server.read_errors().splitlines()[-1]
        assert last.startswith("headrace: the model 'damaged' cannot be served")
        assert "damaged.gguf" in last

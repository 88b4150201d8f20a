"""schemathesis over the OpenAPI document: no 5xx, no answer off its schema, and a neighbour that notices nothing."""

import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

HOOKS = Path(__file__).parents[1] / "clients" / "schemathesis_hooks.py"
MAX_CONTEXT = 256
# What the schemas cannot tell, such as fields that contradict each other, is refused by rule.
EXCLUDED = "positive_data_acceptance"
QUESTION = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "temperature": 0, "ignore_eos": True}

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]


@pytest.fixture
def short_llama(tiny_llama, tmp_path):
    """The random llama with a context so short that no generation is long."""
    folder = tmp_path / "short"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": MAX_CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Neighbour(threading.Thread):
    """Streams the same greedy chat again and again; every stream must be the first one's twin."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.texts, self.stops = url, [], threading.Event()

    def run(self):
        while not self.stops.is_set():
            lines = []
            with httpx.stream(
                "POST", f"{self.url}/v1/chat/completions", json=QUESTION | {"stream": True}, timeout=120
            ) as reply:
                lines += [line for line in reply.iter_lines() if line.startswith("data: ")]
            assert reply.status_code in (200, 429), reply.status_code
            if reply.status_code == 200:
                chunks = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
                text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
                self.texts.append((text, chunks[-1]["choices"][0]["finish_reason"], lines[-1]))


def test_any_request_gets_an_answer_that_is_documented(start_server, short_llama, tmp_path):
    """Thousands of generated cases, valid and not, beside a stream whose text must not change."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    num_examples = os.environ.get("SCHEMATHESIS_EXAMPLES", "200")
    with start_server([str(short_llama)]) as server:
        neighbour = Neighbour(server.url)
        neighbour.start()
        command = [
            "uv", "run", "--no-project", "--with", "schemathesis", "st", "run", f"{server.url}/openapi.json",
            "--phases", "examples,coverage,fuzzing", "--max-examples", num_examples, "--checks", "all",
            "--exclude-checks", EXCLUDED, "--seed", "1", "--workers", "1", "--request-timeout", "120",
            "--max-response-time", "120",
            "--continue-on-failure", "--no-color",
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1700, check=False, cwd=tmp_path,
            env=os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS)},
        )  # fmt: skip
        neighbour.stops.set()
        neighbour.join(60)
        ready = server.get("/ready").status_code
    print(done.stdout[-6000:])
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-2000:]}"
    assert sum(map(int, re.findall(r"(\d+) (?:generated|test cases)", done.stdout))) > 2000
    assert ready == 200
    assert len(neighbour.texts) > 20
    assert len(set(neighbour.texts)) == 1

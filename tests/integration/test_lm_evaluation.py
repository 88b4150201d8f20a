"""lm-evaluation-harness scores a task through the server, and gets the numbers of a computation without one."""

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from headrace_models import load

CLIENTS = Path(__file__).parents[1] / "clients"
QUESTIONS = [json.loads(line) for line in (CLIENTS / "lm_eval_questions.jsonl").read_text().splitlines()]
# Float32 sums over at most six tokens, in batches of other sizes.
TOLERANCE = 2e-3

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(590)]


def logprob(loaded, context, continuation):
    """The obvious reference: one forward over all of it, the log-softmax, the sum over the continuation's tokens."""
    ids = loaded.codec.encode(context + continuation, add_special_tokens=False)
    num_context = len(loaded.codec.encode(context, add_special_tokens=False))
    model = loaded.model
    logits = model.logits_from_hidden(model.forward_hidden(mx.array([ids]), model.make_cache()))[0].astype(mx.float32)
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return sum(scores[place - 1, ids[place]].item() for place in range(num_context, len(ids))), ids, num_context


@pytest.fixture(scope="module")
def expected(smollm2):
    loaded = load(smollm2)
    return [[logprob(loaded, one["question"], f" {choice}") for choice in one["choices"]] for one in QUESTIONS]


def test_harness_gets_the_numbers_of_a_local_computation(server, expected, tmp_path):
    """Each of its log-likelihoods and so its accuracy; and the same by `echo` with `max_tokens` 0, asked directly."""
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed")
    command = ["uv", "run", "--no-project", "--with", "lm-eval[api]", "python", str(CLIENTS / "lm_eval_task.py")]
    done = subprocess.run(
        [*command, server.base_url], capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])

    scores = [[score for score, _, _ in row] for row in expected]
    differences = [
        abs(a - b) for row, own in zip(report["logprobs"], scores, strict=True) for a, b in zip(row, own, strict=True)
    ]
    right = [max(range(4), key=row.__getitem__) == one["answer"] for row, one in zip(scores, QUESTIONS, strict=True)]
    print(f"\nacc {report['acc']}, {len(differences)} log-likelihoods, largest difference {max(differences):.2e}")
    assert max(differences) < TOLERANCE
    assert report["acc"] == pytest.approx(sum(right) / len(right))

    prompts = [(ids, num_context) for row in expected for _, ids, num_context in row]
    body = {"prompt": [ids for ids, _ in prompts], "max_tokens": 0, "echo": True, "logprobs": 0}
    choices = httpx.post(f"{server.base_url}/completions", json=body, timeout=120).json()["choices"]
    direct = [
        sum(choice["logprobs"]["token_logprobs"][num_context:])
        for choice, (_, num_context) in zip(choices, prompts, strict=True)
    ]
    assert direct == pytest.approx([score for row in scores for score in row], abs=TOLERANCE)

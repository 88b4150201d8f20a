"""Log-probabilities: those of the processed logits, delivered with their token, in OpenAI's shapes."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest

from headrace_sampling import (
    BatchSampler,
    InvalidSamplingParams,
    SamplingParams,
    TokenLogprobs,
    chat_logprobs,
    completion_logprobs,
    create_row_sampling,
    make_step_sampler,
    score_tokens,
)


def log_softmax(row):
    row = np.asarray(row, np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def check(entry, row, num_top):
    """The entry holds the reference's numbers within float32."""
    expected = log_softmax(row)
    assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-4)
    assert [token for token, _ in entry.top] == np.argsort(-expected, kind="stable")[:num_top].tolist()
    assert [value for _, value in entry.top] == pytest.approx(sorted(expected)[::-1][:num_top], abs=1e-4)


def test_each_token_is_emitted_with_its_own():
    """In a pipelined batch whose rows change places before emission; filters and temperature do not count."""
    num_top, seen = [0, 20, None, 3], [[], [], [], []]
    rows = [
        create_row_sampling(
            make_step_sampler(SamplingParams(temperature=0.7, top_k=5, seed=i, logprobs=n, logit_bias={1: 2.0})),
            lambda token, entry, i=i: seen[i].append((token, entry)),
        )
        for i, n in enumerate(num_top)
    ]
    batch, random, drawn, waiting = BatchSampler(), np.random.default_rng(0), [[], [], [], []], []
    for members in ([0, 1, 2, 3], [3, 1, 0], [1, 3, 2], [2, 0]):
        logits = random.normal(size=(len(members), 50)).astype(np.float32)
        tokens = batch.sample(mx.array(logits), [rows[member] for member in members]).tokens.tolist()
        for member, row, token in zip(members, logits, tokens, strict=True):
            row[1] += 2.0
            drawn[member].append(row)
            waiting.append((member, token))
        while len(waiting) > 4:
            member, token = waiting.pop(0)
            rows[member].emit(token)
    for member, token in waiting:
        rows[member].emit(token)
    for n, logits, emitted in zip(num_top, drawn, seen, strict=True):
        assert len(emitted) == len(logits)
        for row, (token, entry) in zip(logits, emitted, strict=True):
            if n is None:
                assert entry is None
            else:
                assert entry.token_id == token
                check(entry, row, n)


def test_filled_tokens_have_none():
    """Known tokens are emitted without; the sampled one after them keeps its own. A resumed row starts at its step."""
    seen = []
    sampler = make_step_sampler(SamplingParams(logprobs=1))
    row = create_row_sampling(sampler, lambda token, entry: seen.append(entry), first_step=5)
    row.fill([3, 4])
    token = row.sample(mx.array([[0.0, 1.0]])).item()
    for one in (3, 4, token):
        row.emit(one)
    assert seen[:2] == [None, None]
    assert seen[2].token_id == token


def test_one_row_alone_equals_the_batch():
    """The same numbers, bit for bit, also for half precision logits and more candidates than tokens."""
    params = SamplingParams(logprobs=20)
    logits = mx.array(np.random.default_rng(3).normal(size=(3, 7)).astype(np.float32)).astype(mx.bfloat16)
    rows = [create_row_sampling(make_step_sampler(params)) for _ in range(3)]
    batched = BatchSampler().sample(logits, rows)
    assert len(batched.arrays) == 5
    for row in range(3):
        alone = make_step_sampler(params).sample_step(logits[row : row + 1], 0)
        assert alone.logprobs.row(0) == batched.logprobs.row(row)
        assert len(alone.logprobs.row(0).top) == 7


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_histogram_counts_every_token_once(dtype):
    """Of the rows that ask, in any batch: bins of equal width from `low` to 0, the rest below; masses add up to 1."""
    logits = mx.array(np.random.default_rng(5).normal(scale=6, size=(3, 500)).astype(np.float32)).astype(dtype)
    logits[1, 7] = -mx.inf
    asks = [SamplingParams(logprobs=2), SamplingParams(logprobs=0, logprob_histogram=True), SamplingParams()]
    rows = [create_row_sampling(make_step_sampler(params)) for params in asks]
    captured = BatchSampler().sample(logits, rows).logprobs

    assert captured.row(0).histogram is None
    found = captured.row(1).histogram
    expected = log_softmax(logits[1].astype(mx.float32).tolist())
    edges = np.linspace(found.low, 0, len(found.counts) + 1)
    assert len(found.counts) == len(found.masses) == 80
    assert found.num_below + sum(found.counts) == 500
    assert found.mass_below + sum(found.masses) == pytest.approx(1, abs=1e-5)
    # A value on an edge may fall to either side in float32.
    counts = np.histogram(np.clip(expected, None, 0), bins=edges)[0]
    assert np.abs(np.cumsum(counts) - np.cumsum(found.counts)).max() <= 1
    assert found.masses[-1] == pytest.approx(np.exp(expected[expected >= edges[-2]]).sum(), abs=1e-5)


def test_a_prompt_is_scored_position_by_position():
    """Token i by row i of the logits; wrong counts and ids are typed errors."""
    logits = np.random.default_rng(1).normal(size=(6, 30)).astype(np.float32)
    ids = [4, 0, 29, 7, 7, 1]
    for entry, row, token in zip(score_tokens(mx.array(logits), ids, num_top=4), logits, ids, strict=True):
        assert entry.token_id == token
        check(entry, row, 4)
    assert score_tokens(mx.zeros((0, 5)), []) == []
    for bad in ({"token_ids": ids[:5]}, {"token_ids": [30] * 6}, {"token_ids": ids, "num_top": 21}):
        with pytest.raises(InvalidSamplingParams):
            score_tokens(mx.array(logits), **bad)


def test_chat_shape():
    """Token, bytes, log-probability and candidates, with ids; minus infinity becomes a number that JSON has."""
    pieces = {0: "né".encode(), 1: b"\xc3", 2: b" b"}
    [content] = chat_logprobs([TokenLogprobs(token_id=1, logprob=-math.inf, top=((0, -0.5), (2, -1.0)))], pieces.get)
    assert content == {
        "id": 1,
        "token": "\ufffd",
        "logprob": -9999.0,
        "bytes": [0xC3],
        "top_logprobs": [
            {"id": 0, "token": "né", "logprob": -0.5, "bytes": [110, 195, 169]},
            {"id": 2, "token": " b", "logprob": -1.0, "bytes": [32, 98]},
        ],
    }
    json.dumps(content, allow_nan=False)


def test_completion_shape():
    """Parallel lists; the first echoed token has none; offsets count code points from where the stream is."""
    pieces = {0: "né".encode(), 1: b"x", 2: b"x"}
    entries = [None, TokenLogprobs(token_id=1, logprob=-0.25, top=((1, -0.25), (2, -3.0), (0, -4.0)))]
    assert completion_logprobs(entries, [0, 1], pieces.get, first_offset=10) == {
        "tokens": ["né", "x"],
        "token_logprobs": [None, -0.25],
        "top_logprobs": [None, {"x": -0.25, "né": -4.0}],
        "text_offset": [10, 12],
    }


def test_what_was_captured_unpickles_without_mlx():
    """The process that answers requests gets log-probabilities from the engine's, and never loads MLX for them."""
    import pickle
    import subprocess
    import sys

    sent = pickle.dumps(TokenLogprobs(token_id=5, logprob=-1.0, top=((5, -1.0),)))
    code = f"import pickle, sys; print(pickle.loads({sent!r}).token_id, 'mlx' in sys.modules)"
    shown = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout

    assert shown.split() == ["5", "False"]

"""Penalties against slow and obvious ones, over rows with histories of their own."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import BatchSampler, SamplingParams, create_row_sampling, make_step_sampler

VOCAB = 12
IDS = st.lists(st.integers(0, VOCAB + 3), max_size=14)
PENALISED = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([0.0, 1.0, 1.3, 0.5]),
    repetition_window=st.sampled_from([0, 1, 4, 20]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    presence_window=st.sampled_from([0, 3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    frequency_window=st.sampled_from([0, 2, 30]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_allowed_length=st.sampled_from([1, 2]),
    dry_breakers=st.sampled_from([(), (3,)]),
    dry_window=st.sampled_from([2, 8, 64]),
)


def last(tokens, window):
    return tokens[-window:] if window else tokens


def dry_penalties(params, tokens):
    """For each token, the longest run that it would extend, by looking at every earlier place."""
    tokens, worst = last(tokens, params.dry_window), {}
    for place in range(len(tokens) - 1):
        run = 0
        while run <= place and tokens[place - run] == tokens[len(tokens) - 1 - run]:
            if tokens[place - run] in params.dry_breakers or tokens[place - run] >= VOCAB:
                break
            run += 1
        if run >= params.dry_allowed_length and tokens[place + 1] < VOCAB:
            penalty = params.dry_multiplier * params.dry_base ** min(run - params.dry_allowed_length, 32)
            worst[tokens[place + 1]] = max(penalty, worst.get(tokens[place + 1], 0.0))
    return worst


def penalised(params, logits, prompt, reply):
    """One row, token by token, in float32."""
    result, tokens = np.array(logits, np.float32), prompt + reply
    if params.repetition_penalty not in (0.0, 1.0):
        for token in {one for one in last(tokens, params.repetition_window) if one < VOCAB}:
            result[token] *= params.repetition_penalty if result[token] < 0 else 1 / params.repetition_penalty
    recent = last(tokens, params.presence_window)[-len(reply) :] if reply else []
    for token in set(recent):
        result[token] -= params.presence_penalty
    for token in last(tokens, params.frequency_window)[-len(reply) :] if reply else []:
        result[token] -= params.frequency_penalty
    if params.dry_multiplier:
        for token, penalty in dry_penalties(params, tokens).items():
            result[token] -= penalty
    return result


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(PENALISED, IDS), min_size=1, max_size=5), st.integers(0, 2**31))
def test_penalties_follow_prompt_and_reply(rows, seed):
    """Six greedy steps of mixed rows: each token is the best of the row's own penalised logits."""
    random = np.random.default_rng(seed)
    samplers = [
        create_row_sampling(make_step_sampler(params, vocab_size=VOCAB, initial_history=prompt))
        for params, prompt in rows
    ]
    batch, replies = BatchSampler(), [[] for _ in rows]
    for _ in range(6):
        logits = random.normal(size=(len(rows), VOCAB)).astype(np.float32)
        tokens = batch.sample(mx.array(logits), samplers).tokens.tolist()
        for (params, prompt), row, reply, token in zip(rows, logits, replies, tokens, strict=True):
            expected = penalised(params, row, prompt, reply)
            assert expected[token] >= expected.max() - 1e-5
            reply.append(token)


def test_histories_follow_rows_through_changing_membership():
    """Rows join, leave, swap and run alone between steps; each history is that of the row alone."""
    params = [
        SamplingParams(temperature=1, seed=i, repetition_penalty=1.5, repetition_window=w, frequency_penalty=0.3)
        for i, w in enumerate([0, 5, 20])
    ]
    logits = mx.array(np.random.default_rng(0).normal(size=(1, 40)).astype(np.float32))
    alone = [create_row_sampling(make_step_sampler(p, initial_history=[1, 2, 3])) for p in params]
    expected = [[row.sample(logits).item() for _ in range(8)] for row in alone]
    rows = [create_row_sampling(make_step_sampler(p, initial_history=[1, 2, 3])) for p in params]
    batch, seen = BatchSampler(), [[], [], []]
    for members in ([0], [0, 1], [1, 0, 2], [2], [2, 1], [0, 1, 2], [0, 1, 2], [2, 0]):
        if members == [2]:
            tokens = [rows[2].sample(logits).item()]
        else:
            stacked = mx.concatenate([logits] * len(members))
            tokens = batch.sample(stacked, [rows[member] for member in members]).tokens.tolist()
        for member, token in zip(members, tokens, strict=True):
            seen[member].append(token)
    assert all(tokens == expected[row][: len(tokens)] for row, tokens in enumerate(seen))


def test_known_tokens_count_as_if_sampled():
    """Filled tokens enter the history and advance the step: the row goes on as the one that sampled them."""
    params = SamplingParams(temperature=1, seed=4, frequency_penalty=2.0, repetition_penalty=1.2)
    logits = mx.array(np.random.default_rng(1).normal(size=(1, 30)).astype(np.float32))
    whole = create_row_sampling(make_step_sampler(params, initial_history=[5]))
    tokens = [whole.sample(logits).item() for _ in range(8)]
    filled = create_row_sampling(make_step_sampler(params, initial_history=[5]))
    filled.fill(tokens[:3])
    assert filled.step == 3
    assert [filled.sample(logits).item() for _ in range(5)] == tokens[3:]
    resumed = create_row_sampling(make_step_sampler(params, initial_history=[5]), first_step=3)
    resumed.sampler.record(mx.array(tokens[:3]))
    assert [resumed.sample(logits).item() for _ in range(5)] == tokens[3:]


def test_a_manual_history_holds_only_what_is_recorded():
    """Sampled drafts leave no trace until they are accepted; neighbours record by themselves."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, frequency_window=5)
    logits = mx.array([[3.0, 2.0, 1.0]])
    manual = create_row_sampling(make_step_sampler(params, records_history=False))
    own = create_row_sampling(make_step_sampler(params))
    batch = BatchSampler()
    both = mx.concatenate([logits, logits])
    assert [batch.sample(both, [manual, own]).tokens.tolist() for _ in range(2)] == [[0, 0], [0, 1]]
    manual.sampler.record([0])
    assert batch.sample(both, [manual, own]).tokens.tolist()[0] == 1


def test_no_history_is_kept_unless_a_parameter_needs_it():
    """Neutral penalties keep nothing; windows bound what is kept."""
    assert make_step_sampler(SamplingParams(), initial_history=range(10**6)).setup.history is None
    params = SamplingParams(repetition_penalty=1.1, dry_multiplier=1.0, dry_window=50)
    history = make_step_sampler(params, initial_history=list(range(1000))).setup.history
    assert history is not None
    assert history.ring().shape == (50,)


@pytest.mark.parametrize("ids", [[-1], [1.5], [True], ["a"]])
def test_a_history_holds_token_ids(ids):
    """Anything else is a typed error; ids beyond the vocabulary are no crash."""
    from headrace_sampling import InvalidSamplingParams

    params = SamplingParams(repetition_penalty=1.1)
    with pytest.raises(InvalidSamplingParams, match="initial_history"):
        make_step_sampler(params, initial_history=ids)
    assert make_step_sampler(params, initial_history=[10**9]).sample(mx.zeros((1, 3)), 0).item() == 0


def test_eos_is_closed_below_the_least_number_of_tokens():
    """`min_tokens` counts the row's own steps; from then on EOS may win."""
    params = SamplingParams(min_tokens=2)
    row = create_row_sampling(make_step_sampler(params, eos_token_ids=[1, 99]))
    logits = mx.array([[0.0, 5.0, 1.0]])
    assert [row.sample(logits).item() for _ in range(4)] == [2, 2, 1, 1]


def test_a_mask_closes_what_bias_and_penalties_open():
    """The mask comes after the processors; only its row is masked."""

    class OnlyTwo:
        def apply_mask(self, logits):
            return mx.where(mx.arange(logits.shape[-1]) == 2, logits, -mx.inf)

    params = SamplingParams(logit_bias={0: 100.0}, logprobs=1)
    rows = [
        create_row_sampling(make_step_sampler(params, mask=OnlyTwo())),
        create_row_sampling(make_step_sampler(params)),
    ]
    sampled = BatchSampler().sample(mx.zeros((2, 4)), rows)
    assert sampled.tokens.tolist() == [2, 0]
    assert sampled.logprobs.row(0).logprob == 0.0

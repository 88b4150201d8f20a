"""Acceptance of drafts: what is emitted has the distribution of undrafted sampling, and match its very tokens."""

import math

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import (
    BatchMismatch,
    BatchSampler,
    GrammarSpec,
    GrammarState,
    HlgCurve,
    InvalidDrafts,
    KnownBitmask,
    SamplingParams,
    accept_drafts,
    create_row_sampling,
    make_step_sampler,
)

EOS = 256
V = 24


@frozen
class Draft:
    tokens: list
    logprobs: object = None


def row_of(params, *, step=0, **keywords):
    return create_row_sampling(make_step_sampler(SamplingParams(**params), **keywords), first_step=step)


class Model:
    """A model whose logits depend on the last two tokens."""

    def __init__(self, vocab_size=V, seed=0, scale=2.0):
        self._table = np.random.default_rng(seed).normal(size=(7, 5, vocab_size)).astype(np.float32) * scale

    def logits(self, tokens):
        before, last = ([0, 0, *tokens])[-2:]
        return self._table[last % 7, before % 5]

    def window(self, tokens, draft):
        return np.stack([self.logits([*tokens, *draft[:end]]) for end in range(len(draft) + 1)])


PARAMS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.9, "dry_multiplier": 1.0, "repetition_penalty": 1.2, "repetition_window": 0},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"temperature": 0.8, "hlg": HlgCurve()},
    {"min_tokens": 6, "logit_bias": {3: 2.0}, "presence_penalty": 1.0},
    {"temperature": 1.0, "typical_p": 0.7, "top_n_sigma": 1.5},
]


def undrafted(model, params, length):
    row = row_of({**params, "seed": 11}, initial_history=[1, 2, 3], eos_token_ids=[0])
    tokens = []
    for _ in range(length):
        tokens.append(row.sample(mx.array(model.logits(tokens))[None]).item())
    return tokens


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_match_emits_the_tokens_of_undrafted_sampling(dtype):
    """With drafts right, wrong, long, short or missing, rows of all kinds together emit exactly their own tokens."""
    model, length, random = Model(), 18, np.random.default_rng(4)
    model._table = np.array(mx.array(model._table).astype(dtype).astype(mx.float32))
    expected = [undrafted(model, {**params, "ignore_eos": True}, length + 6) for params in PARAMS]
    rows = [
        row_of({**params, "seed": 11, "ignore_eos": True}, initial_history=[1, 2, 3], eos_token_ids=[0])
        for params in PARAMS
    ]
    emitted = [[] for _ in PARAMS]
    num_kept = 0
    while min(map(len, emitted)) < length:
        drafts = []
        for done, truth in zip(emitted, expected, strict=True):
            size = int(random.integers(0, 5))
            guess = truth[len(done) : len(done) + size]
            if size and random.random() < 0.5:
                guess[int(random.integers(len(guess)))] = int(random.integers(V))
            drafts.append(Draft(guess))
        windows = [model.window(done, draft.tokens) for done, draft in zip(emitted, drafts, strict=True)]
        width = max(map(len, windows)) + 1
        logits = np.full((len(rows), width, V), 7.0, np.float32)
        for place, window in enumerate(windows):
            logits[place, : len(window)] = window
        result = accept_drafts(mx.array(logits).astype(dtype), rows, drafts)
        assert result.tokens.shape == (len(rows), width)
        for done, new, row, kept in zip(emitted, result.settle(), rows, result.num_accepted.tolist(), strict=True):
            assert len(new) == kept + 1
            done.extend(new)
            num_kept += kept
            assert row.step == len(done)
        live = [place for place, done in enumerate(emitted) if len(done) <= length]
        assert live or min(map(len, emitted)) >= length
        # Rows that are far ahead would outgrow what they are compared with.
        if any(len(done) > length for done in emitted):
            for place, done in enumerate(emitted):
                assert done == expected[place][: len(done)]
            rows = [rows[place] for place in live]
            emitted = [emitted[place] for place in live]
            expected = [expected[place] for place in live]
            if not live:
                break
    assert num_kept > 20


def chi_square(counts, probabilities):
    """Pearson's statistic in standard deviations above what is expected (Wilson and Hilferty, 1931)."""
    total = counts.sum()
    assert counts[probabilities == 0].sum() == 0
    # Cells that expect fewer than five are put together.
    is_rare = probabilities * total < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(probabilities[~is_rare], probabilities[is_rare].sum()) * total
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = max(1, len(expected) - 1)
    statistic = ((observed - expected) ** 2 / expected).sum()
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def kept_by(logits, params):
    """The target's distribution in plain numpy: filters before the temperature, in the documented order."""
    logits = logits.astype(np.float64).copy()
    for token_id in params.get("seen", ()):
        penalty = params["repetition_penalty"]
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    logits[[one for one in range(V) if one not in params.get("open", range(V))]] = -np.inf
    probabilities = softmax(logits)
    order = np.argsort(-probabilities)
    keep = probabilities >= params.get("min_p", 0.0) * probabilities.max()
    if "top_p" in params:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        keep[order[before >= params["top_p"]]] = False
    if "top_k" in params:
        keep[order[params["top_k"] :]] = False
    return softmax(np.where(keep, logits, -np.inf) / params.get("temperature", 1.0))


def proposals(target, random):
    """Distributions to draft from that are as unlike the target as can be."""
    order = np.argsort(target)
    reverse = target[order[::-1]][np.argsort(order)]
    lone = np.full(V, 1e-9)
    lone[order[-1]] = 1
    unlikely = np.full(V, 1e-9)
    unlikely[order[V // 2]] = 1
    outside = np.where(target > 0, 0.0, 1.0) if (target == 0).any() else np.ones(V)
    return {
        "the target itself": target,
        "uniform": np.ones(V) / V,
        "reversed": reverse / reverse.sum(),
        "all on the best": lone / lone.sum(),
        "all on an unlikely one": unlikely / unlikely.sum(),
        "only what is closed": outside / outside.sum(),
        "random": softmax(random.normal(size=V) * 4),
    }


DRAWS = 100_000
TARGETS = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": 1.7},
    "top-p": {"temperature": 0.8, "top_p": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "min-p": {"temperature": 1.4, "min_p": 0.15},
    "all filters": {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 9,
        "min_p": 0.04,
        "repetition_penalty": 2.0,
        "seen": (2, 6),
    },
    "penalty": {"temperature": 1.0, "repetition_penalty": 3.0, "seen": (1, 5, 7)},
    "grammar": {"temperature": 1.0, "open": (2, 3, 5, 7, 11)},
    "grammar and filters": {"temperature": 1.2, "open": (2, 3, 5, 7, 11), "top_p": 0.8},
}


class Open(GrammarState):
    """A grammar that opens some tokens, and the same after each of them."""

    is_terminated = False
    only_ends = False

    def __init__(self, open_ids):
        self._open_ids = open_ids

    def mask_words(self):
        return np.array([sum(1 << one for one in self._open_ids)], np.uint32)

    def accept(self, token_id):
        assert token_id in self._open_ids

    def rollback(self, num_tokens):
        """Every state is the same."""

    def forced_tokens(self):
        return []

    def draft_masks(self, draft_ids):
        return [KnownBitmask(self.mask_words(), only_ends=False)] * (len(draft_ids) + 1)


def draw_with_drafts(logits, params, proposal, num_draws, seed):
    """Tokens of many rows that each verify one drafted token, and the share of drafts that were kept."""
    random = np.random.default_rng(seed)
    names = {name: value for name, value in params.items() if name not in ("seen", "open")}
    counts, num_kept, chunk = np.zeros(V), 0, 2500
    drafted = random.choice(V, size=num_draws, p=proposal)
    with np.errstate(divide="ignore"):
        logprobs = mx.array(np.log(proposal)[None].astype(np.float32))
    window = mx.broadcast_to(mx.array(logits)[None, None], (chunk, 2, V))
    for start in range(0, num_draws, chunk):
        rows = [
            row_of(
                {**names, "seed": seed * 10_000_000 + start + place},
                initial_history=params.get("seen", ()),
                mask=Open(params["open"]) if "open" in params else None,
            )
            for place in range(chunk)
        ]
        drafts = [Draft([int(one)], logprobs) for one in drafted[start : start + chunk]]
        result = accept_drafts(window, rows, drafts)
        counts += np.bincount(np.array(result.tokens[:, 0]), minlength=V)
        num_kept += int(mx.sum(result.num_accepted).item())
    return counts, num_kept / num_draws


def check_distribution(name, kinds, num_draws):
    logits = np.random.default_rng(8).normal(size=V).astype(np.float32) * 1.5
    target = kept_by(logits, TARGETS[name])
    for place, (kind, proposal) in enumerate(proposals(target, np.random.default_rng(9)).items()):
        if kinds is not None and kind not in kinds:
            continue
        counts, kept = draw_with_drafts(logits, TARGETS[name], proposal, num_draws, place + 1)
        assert chi_square(counts, target) < 4, (name, kind)
        # The share that is kept is one minus the distance of the two distributions (Leviathan et al., 2023).
        assert kept == pytest.approx(np.minimum(target, proposal).sum(), abs=5 / math.sqrt(num_draws)), (name, kind)


@pytest.mark.parametrize("name", TARGETS)
def test_rejection_keeps_the_targets_distribution(name):
    """A drafted token's place has the target's distribution, and drafts are kept as often as theory says."""
    check_distribution(name, ("random", "only what is closed"), 2_500)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TARGETS)
def test_rejection_keeps_the_targets_distribution_in_many_draws(name):
    """The same with 100,000 draws for every adversarial proposal."""
    check_distribution(name, None, DRAWS)


def test_the_chi_square_sees_a_wrong_distribution():
    """The statistic of the laws above is far out for a draft that is always kept, and not for a fair sample."""
    random = np.random.default_rng(0)
    target = softmax(random.normal(size=V))
    wrong = softmax(np.log(target) * 1.05)

    assert chi_square(random.multinomial(100_000, target), target) < 4
    assert chi_square(random.multinomial(100_000, wrong), target) > 4


class Walk(GrammarState):
    """A grammar of six tokens, of which three may follow, others after each."""

    is_terminated = only_ends = False

    def __init__(self, tokens=()):
        self.tokens = list(tokens)

    @staticmethod
    def open_after(tokens):
        last = tokens[-1] if tokens else 4
        return {(last + 1) % 6, (last + 2) % 6, 5 - last}

    def mask_words(self):
        return np.array([sum(1 << one for one in self.open_after(self.tokens))], np.uint32)

    def accept(self, token_id):
        assert token_id in self.open_after(self.tokens)
        self.tokens.append(token_id)

    def rollback(self, num_tokens):
        del self.tokens[len(self.tokens) - num_tokens :]

    def forced_tokens(self):
        return []

    def draft_masks(self, draft_ids):
        masks = [KnownBitmask(self.mask_words(), only_ends=False)]
        ahead = Walk(self.tokens)
        for token_id in draft_ids:
            if token_id not in self.open_after(ahead.tokens):
                break
            ahead.accept(token_id)
            masks.append(KnownBitmask(ahead.mask_words(), only_ends=False))
        return masks


PENALTY = 1.3


def next_of(model, tokens, *, is_bound):
    """The target's distribution after some tokens of the reply, in plain numpy."""
    logits = model.logits(tokens).astype(np.float64).copy()
    if is_bound:
        logits[sorted(set(tokens))] -= PENALTY
        logits[[one for one in range(6) if one not in Walk.open_after(tokens)]] = -np.inf
    return softmax(logits)


def joint_of(model, *, is_bound):
    """The target's distribution of three tokens."""
    joint = np.zeros((6,) * 3)
    for first, p in enumerate(next_of(model, [], is_bound=is_bound)):
        for second, q in enumerate(next_of(model, [first], is_bound=is_bound) if p else ()):
            if q:
                joint[first, second] = p * q * next_of(model, [first, second], is_bound=is_bound)
    return joint


def draw_windows(target, drafter, seeds, *, is_bound):
    """Replies of three tokens, of which up to two were drafted by another model."""
    drafts, windows, random = [], [], np.random.default_rng(seeds.start)
    for _ in seeds:
        tokens, logprobs = [], []
        for _ in range(2):
            probabilities = softmax(drafter.logits(tokens))
            logprobs.append(np.log(probabilities))
            tokens.append(int(random.choice(6, p=probabilities / probabilities.sum())))
        drafts.append(Draft(tokens, mx.array(np.stack(logprobs).astype(np.float32))))
        windows.append(target.window([], tokens))
    params = {"temperature": 1.0, "presence_penalty": PENALTY if is_bound else 0.0}
    rows = [row_of({**params, "seed": seed}, mask=Walk() if is_bound else None) for seed in seeds]
    emitted = accept_drafts(mx.array(np.stack(windows)), rows, drafts).settle()
    # A row that emitted less goes on undrafted, at its own next step.
    while short := [place for place, tokens in enumerate(emitted) if len(tokens) < 3]:
        logits = mx.array(np.stack([target.logits(emitted[place]) for place in short]))
        sampled = BatchSampler().sample(logits, [rows[place] for place in short]).tokens.tolist()
        for place, token_id in zip(short, sampled, strict=True):
            emitted[place].append(token_id)
            if is_bound:
                rows[place].sampler.setup.mask.accept(token_id)
    return emitted


def check_windows(num_rows, *, is_bound):
    target, drafter, counts = Model(6, 1, 1.0), Model(6, 2, 1.0), np.zeros((6,) * 3)
    for start in range(0, num_rows, 2_500):
        for tokens in draw_windows(target, drafter, range(start, start + 2_500), is_bound=is_bound):
            counts[tuple(tokens[:3])] += 1
    joint = joint_of(target, is_bound=is_bound)
    assert joint.sum() == pytest.approx(1)
    assert chi_square(counts.reshape(-1), joint.reshape(-1)) < 4


@pytest.mark.parametrize("is_bound", [False, True], ids=["plain", "grammar and penalty"])
def test_a_whole_window_keeps_the_targets_distribution(is_bound):
    """Three tokens of which two were drafted by another model are distributed together as the target says.

    The grammar and the penalty of each position depend on the tokens before it, kept, replaced or undrafted.
    """
    check_windows(2_500, is_bound=is_bound)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_bound", [False, True], ids=["plain", "grammar and penalty"])
def test_a_whole_window_keeps_the_targets_distribution_in_many_draws(is_bound):
    """The same with 100,000 windows."""
    check_windows(DRAWS, is_bound=is_bound)


def test_a_point_proposal_is_match():
    """A proposal that holds one token for sure keeps it with the target's probability, as match does."""
    logits = np.random.default_rng(8).normal(size=V).astype(np.float32)
    target = softmax(logits)
    token = int(np.argsort(-target)[1])
    window = mx.broadcast_to(mx.array(logits)[None, None], (10_000, 2, V))
    rows = [row_of({"temperature": 1.0, "seed": seed}) for seed in range(10_000)]
    result = accept_drafts(window, rows, [Draft([token])] * 10_000)

    assert chi_square(np.bincount(np.array(result.tokens[:, 0]), minlength=V), target) < 4
    assert int(mx.sum(result.num_accepted).item()) / 10_000 == pytest.approx(target[token], abs=0.02)


@given(seed=st.integers(0, 10_000), order=st.permutations(range(6)))
@settings(max_examples=25, deadline=None)
def test_rows_do_not_depend_on_each_other(seed, order):
    """Match and rejection rows in any order and company emit what they emit alone, again and again."""
    random = np.random.default_rng(seed)
    kinds = [PARAMS[one] for one in random.integers(0, len(PARAMS), size=6)]
    drafts = []
    for _ in kinds:
        size = int(random.integers(0, 4))
        logprobs = (
            mx.array(random.normal(size=(size, V)).astype(np.float32)) if size and random.random() < 0.6 else None
        )
        drafts.append(Draft([int(one) for one in random.integers(0, V, size=size)], logprobs))
    logits = mx.array(random.normal(size=(6, 4, V)).astype(np.float32) * 3)

    def rows():
        return [row_of({**kind, "seed": place}, step=place, initial_history=[4, 4]) for place, kind in enumerate(kinds)]

    together = accept_drafts(logits, rows(), drafts).settle()
    alone = [
        accept_drafts(logits[place : place + 1], [row], [drafts[place]]).settle()[0] for place, row in enumerate(rows())
    ]
    shuffled = accept_drafts(
        logits[mx.array(order)], [rows()[place] for place in order], [drafts[place] for place in order]
    ).settle()

    assert together == alone
    assert [together[place] for place in order] == shuffled


def test_what_the_target_never_says_is_never_kept():
    """A drafted token without probability is replaced even where the draft's own probability is next to nothing."""
    logits = mx.zeros((1, 2, V))
    proposal = mx.zeros((1, V))
    proposal[0, 1] = -mx.inf
    for draft, mask in ((Draft([9], mx.zeros((1, V))), Open((2, 3))), (Draft([1], proposal), Open((2, 3)))):
        for seed in range(50):
            row = row_of({"temperature": 1.0, "seed": seed}, mask=mask)
            result = accept_drafts(logits, [row], [draft])
            assert result.num_accepted.item() == 0
            assert result.settle()[0][0] in (2, 3)


def test_greedy_rows_ignore_the_proposal():
    """At temperature 0 a draft is kept exactly as long as it is the best token, whatever it was drawn from."""
    logits = mx.zeros((1, 4, V))
    for place, best in enumerate((3, 5, 7, 9)):
        logits[0, place, best] = 2
    proposal = mx.full((3, V), -math.log(V))
    for tokens, expected in (([3, 5, 7], [3, 5, 7, 9]), ([3, 4, 7], [3, 5]), ([0, 5, 7], [3]), ([], [3])):
        draft = Draft(tokens, proposal[: len(tokens)] if tokens else None)
        assert accept_drafts(logits, [row_of({})], [draft]).settle() == [expected]


def test_grammars_go_on_by_what_is_emitted(compiler, facts):
    """The mask follows the draft, a closed draft is rejected, and the grammar stands after the emitted tokens."""
    spec = GrammarSpec.regex("abc+")
    cases = [
        ({}, b"abc", None),
        ({"temperature": 1.0}, b"axc", None),
        ({"temperature": 1.0}, b"ab", mx.full((2, 320), -math.log(320))),
        ({"temperature": 1.0, "logprobs": 2}, b"", None),
        ({"temperature": 1.0}, b"zzz", mx.full((3, 320), -math.log(320))),
    ]
    rows = [row_of({**params, "seed": 2}, mask=compiler.compile(spec), eos_token_ids=[EOS]) for params, _, _ in cases]
    drafts = [Draft(list(text), logprobs) for _, text, logprobs in cases]
    logits = mx.random.normal((5, 4, 320), key=mx.random.key(0)) * 5
    result = accept_drafts(logits, rows, drafts)
    assert [row.sampler.setup.mask.num_accepted for row in rows] == [0] * 5
    emitted = result.settle()

    assert result.settle() is emitted
    assert emitted[0][:3] == list(b"abc")
    assert emitted[1] == list(b"ab")
    assert emitted[2] == list(b"abc")
    assert emitted[3] == list(b"a")
    assert emitted[4] == list(b"a")
    for row, tokens in zip(rows, emitted, strict=True):
        fresh = compiler.compile(spec)
        for token_id in tokens:
            fresh.accept(token_id)
        assert (row.sampler.setup.mask.mask_words() == fresh.mask_words()).all()


def test_grammar_drafts_equal_undrafted_sampling(compiler, facts):
    """With a grammar, penalties and filters, match emits what the row samples undrafted, EOS at its end included."""
    spec = GrammarSpec.json_schema({"type": "array", "items": {"enum": ["ab", "cd", 12]}, "maxItems": 4}, compact=True)
    params = {"temperature": 1.0, "seed": 6, "presence_penalty": 0.4, "top_p": 0.95}
    model = Model(320, 5, 2.0)

    def fresh():
        return row_of(params, mask=compiler.compile(spec), eos_token_ids=[EOS, 257])

    row, expected = fresh(), []
    while not row.sampler.setup.mask.is_terminated:
        expected.append(row.sample(mx.array(model.logits(expected))[None]).item())
        row.sampler.setup.mask.accept(expected[-1])
    row, emitted = fresh(), []
    while not row.sampler.setup.mask.is_terminated:
        draft = expected[len(emitted) : len(emitted) + 3]
        draft = [*draft, 9, 9][:4]
        window = mx.array(model.window(emitted, draft))[None]
        emitted += accept_drafts(window, [row], [Draft(draft)]).settle()[0]

    assert emitted == expected
    assert emitted[-1] in (EOS, 257)


def test_nothing_is_emitted_after_the_end():
    """A kept EOS is the last token, unless the row ignores it."""
    logits = mx.zeros((2, 4, V))
    for place, best in enumerate((3, 0, 7, 9)):
        logits[:, place, best] = 2
    rows = [row_of({}, eos_token_ids=[0]), row_of({"ignore_eos": True}, eos_token_ids=[0])]

    assert accept_drafts(logits, rows, [Draft([3, 0, 7])] * 2).settle() == [[3, 0], [3, 0, 7, 9]]
    assert [row.step for row in rows] == [2, 4]


def test_logprobs_of_emitted_tokens_are_the_targets():
    """Each emitted token comes with the log-probability that undrafted sampling gives, found by its step."""
    model, seen = Model(), []
    row = row_of({"temperature": 1.0, "seed": 3, "logprobs": 2})
    row.on_token = lambda token_id, logprobs: seen.append((token_id, logprobs))
    tokens = []
    while len(tokens) < 9:
        draft = Draft([5, 6], mx.zeros((2, V)))
        new = accept_drafts(mx.array(model.window(tokens, draft.tokens))[None], [row], [draft]).settle()[0]
        for token_id in new:
            row.emit(token_id)
        tokens += new
    for place, (token_id, logprobs) in enumerate(seen):
        expected = np.log(softmax(model.logits(tokens[:place])))
        assert logprobs.token_id == token_id == tokens[place]
        assert logprobs.logprob == pytest.approx(expected[token_id], abs=1e-5)
        assert [one for one, _ in logprobs.top] == np.argsort(-expected)[:2].tolist()
    assert row.num_emitted == row.step == len(tokens)


def test_manual_histories_stay_manual():
    """A row that records nothing by itself has only what its caller records."""
    penalised = {"presence_penalty": 5.0}
    rows = [row_of(penalised), row_of(penalised, records_history=False)]
    logits = mx.zeros((2, 2, V))
    logits[:, :, 4] = 1
    assert accept_drafts(logits, rows, [Draft([4])] * 2).settle() == [[4, 0], [4, 0]]

    assert [row.sample(logits[0, :1]).item() for row in rows] == [1, 4]


@pytest.mark.parametrize(
    ("drafts", "field"),
    [
        ([Draft([1])], "drafts"),
        ([Draft([1, 2, 3]), Draft([])], "tokens"),
        ([Draft([V]), Draft([])], "tokens"),
        ([Draft([-1]), Draft([])], "tokens"),
        ([Draft([1], mx.zeros((2, V))), Draft([])], "logprobs"),
        ([Draft([1], mx.zeros((1, V - 1))), Draft([])], "logprobs"),
    ],
    ids=["too few", "too long", "too large", "negative", "too many rows", "too narrow"],
)
def test_drafts_that_do_not_fit_are_refused(drafts, field):
    """The error names the argument, its value and what it must be."""
    with pytest.raises(InvalidDrafts, match="must be") as caught:
        accept_drafts(mx.zeros((2, 3, V)), [row_of({}), row_of({})], drafts)

    assert caught.value.field == field


def test_rows_that_do_not_fit_are_refused():
    """One row sampling per row of the logits; a mask that cannot be walked ahead takes no draft."""

    class Mask:
        def apply_mask(self, logits):
            return logits

    with pytest.raises(BatchMismatch):
        accept_drafts(mx.zeros((2, 3, V)), [row_of({})], [Draft([])])
    row = row_of({}, mask=Mask())
    assert accept_drafts(mx.zeros((1, 3, V)), [row], [Draft([])]).settle() == [[0]]
    with pytest.raises(InvalidDrafts, match="mask"):
        accept_drafts(mx.zeros((1, 3, V)), [row], [Draft([1])])

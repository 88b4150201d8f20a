"""Which tokens may come next: OpenAI's rules, row by row in plain Python, against those of the device."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.whisper.decoded import Beam, DecodeRequest
from headrace_models.whisper.decoding import decode_windows
from headrace_models.whisper.guard import find_loop
from headrace_models.whisper.rules import RowRules, TokenRules
from headrace_models.whisper.special import SpecialTokens

SPECIAL = SpecialTokens.standard(50_257, 51_865, is_multilingual=True)
SMALL = SpecialTokens(
    eot=20,
    sot=21,
    translate=22,
    transcribe=23,
    sot_lm=24,
    sot_prev=25,
    no_speech=26,
    no_timestamps=27,
    vocab_size=28 + 31,
    is_multilingual=True,
    languages={},
)
RULES = TokenRules(
    special=SMALL,
    suppressed=(3, 21, 22, 23, 24, 25, 26),
    suppressed_first=(5, 20),
    with_timestamps=True,
    max_initial_timestamp=10,
)


def openai_mask(logits, written):
    """The rules of openai/whisper's `ApplyTimestampRules` and its suppression, for one row."""
    logits = logits.copy()
    begin = SMALL.timestamp_begin
    if not written:
        logits[[5, 20]] = -np.inf
    logits[list(RULES.suppressed)] = -np.inf
    logits[SMALL.no_timestamps] = -np.inf
    last = bool(written) and written[-1] >= begin
    before = len(written) < 2 or written[-2] >= begin
    if last:
        if before:
            logits[begin:] = -np.inf
        else:
            logits[: SMALL.eot] = -np.inf
    stamps = [token for token in written if token >= begin]
    if stamps:
        lowest = stamps[-1] if last and not before else stamps[-1] + 1
        logits[begin:lowest] = -np.inf
    if not written:
        logits[:begin] = -np.inf
        logits[begin + RULES.max_initial_timestamp + 1 :] = -np.inf
    with np.errstate(divide="ignore"):
        together = np.log(np.exp(logits[begin:]).sum())
    if together > logits[:begin].max():
        logits[:begin] = -np.inf
    return logits


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 4), lift=st.floats(-4, 4))
def test_rules_are_openais(seed, num_rows, lift):
    """Whatever the logits, each row of a batch is masked as OpenAI's decoder masks it alone."""
    random = np.random.default_rng(seed)
    rules = RowRules.start(RULES, num_rows)
    written = [[] for _ in range(num_rows)]
    for _ in range(14):
        logits = random.standard_normal((num_rows, SMALL.vocab_size)).astype(np.float32) * 3
        logits[:, SMALL.timestamp_begin :] += lift
        found = np.array(rules.apply(mx.array(logits)))
        for row in range(num_rows):
            wanted = openai_mask(logits[row], written[row])
            assert np.array_equal(np.isneginf(found[row]), np.isneginf(wanted)), written[row]
            assert np.array_equal(found[row][~np.isneginf(wanted)], wanted[~np.isneginf(wanted)])
        tokens = found.argmax(axis=-1)
        rules.advance(mx.array(tokens))
        for row, token in enumerate(tokens.tolist()):
            written[row].append(token)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(3)))
def test_rules_follow_rows_that_move(seed, order):
    """Rows that are reordered take their past with them."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((5, 3, SMALL.vocab_size)).astype(np.float32) * 3
    plain, moved = RowRules.start(RULES, 3), RowRules.start(RULES, 3)
    for step in range(4):
        tokens = mx.argmax(plain.apply(mx.array(logits[step])), axis=-1)
        moved.apply(mx.array(logits[step]))
        plain.advance(tokens)
        moved.advance(tokens)
    moved.take(order)
    found, wanted = moved.apply(mx.array(logits[4][list(order)])), plain.apply(mx.array(logits[4]))
    assert np.array_equal(np.array(found), np.array(wanted)[list(order)])


def check_timestamps(tokens, special):
    """Times come in pairs of equal or growing time, start the window, and never fall."""
    begin = special.timestamp_begin
    stamps = [token - begin for token in tokens if token >= begin]
    assert stamps == sorted(stamps)
    assert not tokens or tokens[0] >= begin
    run = 0
    for token in tokens:
        run = run + 1 if token >= begin else 0
        assert run <= 2
    assert not set(tokens) & {special.sot, special.no_timestamps, special.no_speech, special.transcribe}


def window_audio(model, seed):
    random = np.random.default_rng(seed)
    mel = random.standard_normal((1, model.config.window_frames, model.config.num_mels)).astype(np.float32)
    return model.encode(mel)


def request(model, window, *, prompt=(), **settings_):
    special = model.tokenizer.special
    start = special.start(language="de", task="transcribe", with_timestamps=True)
    before = (special.sot_prev, *prompt) if prompt else ()
    rules = TokenRules.make(model.tokenizer, max_initial_timestamp_s=0.4)
    settings_ = {"guard": False, **settings_}
    return DecodeRequest(
        audio=window_audio(model, window), initial=(*before, *start), sot_index=len(before), rules=rules, **settings_
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_windows_in_a_batch_equal_themselves_alone(temperature, tiny_whisper):
    """Tokens, probabilities and draws of a window do not depend on prompts, windows and lengths beside it."""
    requests = [
        request(tiny_whisper, seed, prompt=prompt, temperature=temperature, seed=seed, max_tokens=limit)
        for seed, prompt, limit in ((0, (), 30), (1, (72, 73, 74, 75, 76), 12), (2, (90,), 30), (3, (), 5))
    ]
    together = decode_windows(tiny_whisper, requests)
    for one, found in zip(requests, together, strict=True):
        (alone,) = decode_windows(tiny_whisper, [one])
        assert found.tokens == alone.tokens
        assert abs(found.avg_logprob - alone.avg_logprob) < 1e-4
        assert abs(found.no_speech_prob - alone.no_speech_prob) < 1e-4
        check_timestamps(found.tokens, tiny_whisper.tokenizer.special)
    assert len({found.tokens for found in together}) > 1


def test_seeds_change_what_is_drawn(tiny_whisper):
    """Above temperature 0 another seed draws other tokens, the same seed the same."""
    first, again, other = (
        decode_windows(tiny_whisper, [request(tiny_whisper, 0, temperature=1.0, seed=seed)])[0] for seed in (1, 1, 2)
    )
    assert first.tokens == again.tokens
    assert first.tokens != other.tokens


def test_one_beam_is_greedy(tiny_whisper):
    """A beam of one, without more patience, writes what taking the likeliest token writes."""
    for seed in range(4):
        (greedy,) = decode_windows(tiny_whisper, [request(tiny_whisper, seed, max_tokens=20)])
        (beam,) = decode_windows(tiny_whisper, [request(tiny_whisper, seed, max_tokens=20, beam=Beam(size=1))])
        assert beam.tokens == greedy.tokens
        assert abs(beam.avg_logprob - greedy.avg_logprob) < 1e-4


def openai_beam(model, one):  # noqa: C901
    """OpenAI's beam search for one window, feeding every sequence from its start again."""
    from headrace_models.whisper.caches import DecoderState

    size, eot = one.beam.size, model.tokenizer.special.eot
    live, finished = [((), 0.0)] * size, {}
    for _ in range(one.max_tokens):
        scores = {}
        for sequence, total in dict(live).items():
            state = DecoderState.empty(one.audio)
            hidden = model.decoder.forward(mx.array([[*one.initial, *sequence]]), state)
            rules = RowRules.start(one.rules, 1)
            for token in sequence:
                rules.advance(mx.array([token]))
            masked = np.array(rules.apply(model.decoder.logits(hidden[:, -1])))[0].astype(np.float64)
            logprobs = masked - np.log(np.exp(masked).sum())
            for token in np.argsort(-logprobs)[: size + 1].tolist():
                scores[(*sequence, token)] = total + logprobs[token]
        live, ended = [], {}
        for sequence in sorted(scores, key=scores.get, reverse=True):
            if sequence[-1] == eot:
                ended[sequence[:-1]] = scores[sequence]
                continue
            live.append((sequence, scores[sequence]))
            if len(live) == size:
                break
        for sequence in sorted(ended, key=ended.get, reverse=True):
            if len(finished) < one.beam.num_finished:
                finished[sequence] = ended[sequence]
        if len(finished) >= one.beam.num_finished:
            break
    found = list(finished.items())
    for sequence, score in sorted(live, key=lambda pair: -pair[1]):
        if len(found) < size:
            found.append((sequence, score))
    return max(found, key=lambda pair: pair[1] / max(1, len(pair[0])))


@pytest.mark.parametrize("patience", [1.0, 2.0])
def test_beams_are_openais(patience, tiny_whisper):
    """The search over a batch of windows finds what OpenAI's finds for each alone, without caches."""
    beam = Beam(size=3, patience=patience)
    requests = [request(tiny_whisper, seed, beam=beam, max_tokens=9, prompt=(70,) * seed) for seed in range(3)]
    for one, found in zip(requests, decode_windows(tiny_whisper, requests), strict=True):
        tokens, score = openai_beam(tiny_whisper, one)
        assert found.tokens == tokens
        assert abs(found.avg_logprob * (len(tokens) + 1) - score) < 1e-3
        check_timestamps(found.tokens, tiny_whisper.tokenizer.special)


def test_the_likeliest_of_several_samples_is_taken(tiny_whisper):
    """Of five samples the one with the best mean log-probability is returned, and each is its own draw."""
    (best,) = decode_windows(tiny_whisper, [request(tiny_whisper, 0, temperature=1.0, num_candidates=5, max_tokens=8)])
    (one,) = decode_windows(tiny_whisper, [request(tiny_whisper, 0, temperature=1.0, num_candidates=1, max_tokens=8)])
    assert best.avg_logprob >= one.avg_logprob


def test_requests_of_different_rules_are_no_batch(tiny_whisper):
    """What cannot decode together is refused rather than decoded by the first one's rules."""
    with pytest.raises(ValueError, match="batch keys"):
        decode_windows(tiny_whisper, [request(tiny_whisper, 0), request(tiny_whisper, 1, beam=Beam(size=2))])


@given(head=st.lists(st.integers(0, 19), max_size=20), period=st.lists(st.integers(0, 19), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_loops_are_cut_after_the_first_time(head, period):
    """Whatever came before, a loop is seen, and cutting leaves what it repeats at least once."""
    times = 36 // len(period) + 4
    stamped = [token for _ in range(times) for token in (*period, 30)]
    tokens = [*head, *stamped]
    start = find_loop(tokens, 20)
    assert start is not None
    kept = [token for token in tokens[:start] if token < 20]
    everything = [token for token in tokens if token < 20]
    assert kept == everything[: len(kept)]
    assert len(kept) <= len(head) + 2 * len(period)


@pytest.mark.parametrize("tokens", [[], [5] * 20, list(range(19)) * 3, [1, 2, 3] * 9])
def test_little_repetition_is_no_loop(tokens):
    """A word said twenty times, or a verse said three times, stays."""
    assert find_loop(tokens, 20) is None

"""A draft saves time and changes nothing: tokens and probabilities are those of one token after the other."""

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.whisper import InvalidTranscribeOption, TranscribeOptions, Transcriber, load_whisper, transcribe
from headrace_models.whisper.caches import DecoderState
from headrace_models.whisper.decoded import Beam, DecodeRequest
from headrace_models.whisper.decoder import TextDecoder
from headrace_models.whisper.decoding import decode_windows
from headrace_models.whisper.drafts import Draft
from headrace_models.whisper.rules import RowRules, TokenRules

LENGTHS = (24, 9, 30)


@pytest.fixture(scope="module")
def windows(tiny_whisper):
    """Requests without a draft, of windows whose tokens differ in number, and what they decode to."""
    requests = [request(tiny_whisper, seed, length) for seed, length in enumerate(LENGTHS)]
    return requests, [decode_windows(tiny_whisper, [one])[0] for one in requests]


def request(model, seed, length, **changes):
    special = model.tokenizer.special
    mel = np.random.default_rng(seed).standard_normal((1, model.config.window_frames, model.config.num_mels))
    return DecodeRequest(
        audio=model.encode(mel.astype(np.float32)),
        initial=(
            *([special.sot_prev, 70] * seed),
            *special.start(language="de", task="transcribe", with_timestamps=True),
        ),
        sot_index=2 * seed,
        rules=TokenRules.make(model.tokenizer, max_initial_timestamp_s=0.4),
        max_tokens=length,
        **changes,
    )


@st.composite
def edits(draw):
    """How a draft differs from what is written: places where it says something else, says more, or leaves out."""
    return draw(st.lists(st.tuples(st.sampled_from("=+-"), st.integers(0, 29), st.integers(0, 300)), max_size=4))


def edited(tokens, changes):
    draft = list(tokens)
    for kind, place, token in changes:
        if kind == "+":
            draft.insert(place, token)
        elif draft[place : place + 1]:
            draft[place : place + 1] = [token] if kind == "=" else []
    return tuple(draft)


@settings(max_examples=40, deadline=None)
@given(changes=st.lists(edits(), min_size=3, max_size=3), chosen=st.sets(st.integers(0, 2), min_size=1))
def test_a_draft_changes_nothing(changes, chosen, windows, tiny_whisper):
    """Right, wrong in places, or missing, in a batch of rows of different lengths; also what decides about a retry."""
    requests, wanted = windows
    drafted = [
        evolve(one, draft=edited(plain.tokens, change))
        for one, plain, change in zip(requests, wanted, changes, strict=True)
    ]
    places = sorted(chosen)
    found = decode_windows(tiny_whisper, [drafted[place] for place in places])
    for place, result in zip(places, found, strict=True):
        assert result.tokens == wanted[place].tokens
        assert abs(result.avg_logprob - wanted[place].avg_logprob) < 1e-4
        assert result.compression_ratio == wanted[place].compression_ratio
        assert result.loop_start == wanted[place].loop_start


@settings(max_examples=20, deadline=None)
@given(draft=st.lists(st.integers(0, 300), max_size=80))
def test_any_draft_at_all_changes_nothing(draft, windows, tiny_whisper):
    """Tokens that nobody would write, more of them than the context holds, and the end among them."""
    requests, wanted = windows
    (found,) = decode_windows(tiny_whisper, [evolve(requests[0], draft=tuple(draft))])
    assert found.tokens == wanted[0].tokens
    assert abs(found.avg_logprob - wanted[0].avg_logprob) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_verified_is_the_likeliest(dtype, tiny_whisper_folder):
    """Also where rounding differs between one token and many: each token is the likeliest of one pass over all.

    In bfloat16 within 0.35, as steps are of one pass over the same tokens; in float32 it is the same token.
    """
    model = load_whisper(tiny_whisper_folder, dtype=dtype)
    tolerance = {"float32": 1e-4, "bfloat16": 0.35}[dtype]
    for seed, length in enumerate(LENGTHS):
        one = request(model, seed, length)
        (plain,) = decode_windows(model, [one])
        (found,) = decode_windows(model, [evolve(one, draft=plain.tokens)])
        assert dtype == "bfloat16" or found.tokens == plain.tokens
        hidden = model.decoder.forward(mx.array([[*one.initial, *found.tokens]]), DecoderState.empty(one.audio))
        logits = model.decoder.logits(hidden[0, len(one.initial) - 1 :])
        rules = RowRules.start(one.rules, 1)
        for place, token in enumerate(found.tokens):
            masked = rules.apply(logits[place : place + 1])
            assert float(masked.max() - masked[0, token]) < tolerance
            rules.advance(mx.array([token]))


@pytest.mark.parametrize(("change", "most"), [("none", 3), ("start", 6), ("middle", 7), ("missing", 6)], ids=str)
def test_a_draft_that_is_right_is_verified_in_few_passes(change, most, windows, tiny_whisper, monkeypatch):
    """One for the prompt, one for the draft; where the draft was left, the row finds back after two tokens."""
    requests, wanted = windows
    tokens = wanted[2].tokens
    draft = {
        "none": tokens,
        "start": (tokens[0], 5, 6, 7, *tokens[1:]),
        "middle": (*tokens[:9], 299, *tokens[10:]),
        "missing": (*tokens[:9], *tokens[11:]),
    }[change]
    passes = []
    forward = TextDecoder.forward
    monkeypatch.setattr(
        TextDecoder, "forward", lambda self, *args, **named: (passes.append(1), forward(self, *args, **named))[1]
    )
    decode_windows(tiny_whisper, [evolve(requests[2], draft=draft)])
    assert len(passes) <= most < len(tokens)


@pytest.mark.parametrize("changes", [{"temperature": 0.7}, {"beam": Beam(size=2)}, {"num_candidates": 3}])
def test_other_ways_of_decoding_pass_drafts_over(changes, windows, tiny_whisper):
    """Draws and beams are the same with a draft and without."""
    requests, wanted = windows
    one = evolve(requests[0], **changes)
    (plain,), (found,) = (decode_windows(tiny_whisper, [evolve(one, draft=draft)]) for draft in ((), wanted[0].tokens))
    assert found == plain


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 9))
def test_rules_ahead_are_those_of_one_token_after_the_other(seed, count, tiny_whisper):
    """Each position is masked as a row is that has written the draft up to there."""
    random = np.random.default_rng(seed)
    token_rules = TokenRules.make(tiny_whisper.tokenizer)
    rules, written = RowRules.start(token_rules, 2), []
    size = token_rules.special.vocab_size
    states = []
    for _ in range(count + 2):
        logits = mx.array(random.standard_normal((2, size)).astype(np.float32) * 3)
        tokens = rules.apply(logits).argmax(axis=-1)
        rules.advance(tokens)
        written.append(tokens.tolist())
        states.append(logits)
    plain = RowRules.start(token_rules, 2)
    plain.advance(mx.array(written[0]))
    drafts = np.array(written[1:-1], np.int32).reshape(-1, 2).T
    ahead = plain.ahead(mx.array(drafts)).apply(mx.concatenate(states[1:], axis=1).reshape(2 * (count + 1), size))
    for place in range(count + 1):
        wanted = plain.apply(states[place + 1])
        assert mx.array_equal(ahead.reshape(2, count + 1, size)[:, place], wanted)
        plain.advance(mx.array(written[place + 1]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_a_row_is_told_what_follows_in_its_draft(written, tokens):
    """Proposals stand in the draft behind what the row wrote last, never before where it has been, and fit the room."""
    draft, reached = Draft(tuple(tokens)), 0
    for count in range(1, len(written) + 1):
        proposed = draft.follow(written[:count], 3)
        assert len(proposed) <= 3
        if proposed:
            places = range(reached, len(tokens))
            assert any(
                tokens[place] == written[count - 1] and tuple(tokens[place + 1 :][: len(proposed)]) == proposed
                for place in places
            )
        agrees = bool(proposed) and written[count : count + 1] == list(proposed[:1])
        draft.note(int(agrees))
        reached += int(agrees)


def test_the_draft_of_a_transcript_is_the_transcript_again(tiny_whisper, whisper_noise):
    """Segments, words and statistics are the same when the first transcript's tokens are given."""
    options = TranscribeOptions(language="en", word_timestamps=True, temperature=0.0, max_tokens=20, open_end=True)
    options = evolve(options, logprob_threshold=None, no_speech_threshold=None)
    first = transcribe(tiny_whisper, whisper_noise(0.9), options)
    tokens = tuple(token for segment in first.segments for token in segment.tokens)
    again = transcribe(tiny_whisper, whisper_noise(0.9), evolve(options, draft=tokens))
    assert tokens
    assert again.text == first.text
    assert [(word.text, word.start_s, word.end_s) for word in again.words] == [
        (word.text, word.start_s, word.end_s) for word in first.words
    ]


def test_drafts_of_another_model_are_refused(tiny_whisper, whisper_noise):
    """Ids beyond the vocabulary, none at all, negative ones; without telling what they were."""
    with pytest.raises(InvalidTranscribeOption, match="draft has tokens"):
        Transcriber.of(tiny_whisper).add(whisper_noise(1), TranscribeOptions(language="en", draft=(5, 60_000)))
    for wrong in (None, (-1,), "text"):
        with pytest.raises(InvalidTranscribeOption, match="draft is a"):
            TranscribeOptions(draft=wrong)

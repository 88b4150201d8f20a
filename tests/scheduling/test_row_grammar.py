"""A row's grammar in a step: the state that acceptance walks and rolls back, whose failure raises nothing."""

import mlx.core as mx
import numpy as np
import pytest
from attrs import frozen

from headrace_sampling import (
    GrammarCompiler,
    GrammarFailed,
    GrammarSpec,
    GrammarState,
    SamplingParams,
    TokenizerFacts,
    accept_drafts,
    create_row_sampling,
    make_step_sampler,
)
from headrace_scheduling.row_grammar import MAX_KNOWN, RowGrammar

_EOS, _V = 256, 257
_COMPILER = GrammarCompiler(
    TokenizerFacts(
        vocab_size=_V,
        eos_token_ids=(_EOS,),
        tokens=(*(bytes([n]) for n in range(256)), b""),
        special_token_ids=(_EOS,),
    )
)
_SPEC = GrammarSpec.regex("(ab|cd)[x-z]{2}(end|final)")


@frozen
class Draft:
    tokens: list
    logprobs: object = None


def _row(spec=_SPEC, state=None):
    return RowGrammar(_COMPILER.compile(spec) if state is None else state, _V)


def _sampling(mask, **params):
    return create_row_sampling(make_step_sampler(SamplingParams(**params), mask=mask, eos_token_ids=[_EOS]))


def _open(mask):
    return set(np.flatnonzero(np.unpackbits(mask.mask_words().view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("proposal", [None, mx.full((4, _V), -np.log(_V))], ids=["match", "rejection"])
@pytest.mark.parametrize("draft", [b"abyx", b"abqq", b"zzzz", b"cdyz"])
def test_drafts_are_accepted_under_a_rows_grammar(draft, proposal):
    """Law: a row's grammar gives acceptance what the compiled grammar itself gives, and stands after what it emits."""
    logits = mx.random.normal((1, 5, _V), key=mx.random.key(3)) * 4
    bare, bound = _COMPILER.compile(_SPEC), _row()
    emitted = {}
    for mask in (bare, bound):
        row = _sampling(mask, temperature=1.0, seed=9, presence_penalty=0.5)
        emitted[id(mask)] = accept_drafts(logits, [row], [Draft(list(draft), proposal)]).settle()[0]
    assert emitted[id(bound)] == emitted[id(bare)]
    assert bound.error is None
    assert _open(bound) == _open(bare)


def test_a_rolled_back_row_is_as_before():
    """Law: after tokens and their rollback, masks and the end are those of a row that never had them."""
    row, fresh = _row(), _row()
    for token_id in b"abxyfina":
        row.accept(token_id)
    row.rollback(5)
    for token_id in b"abx":
        fresh.accept(token_id)
    assert _open(row) == _open(fresh)
    for token_id in b"zend":
        row.accept(token_id)
    assert row.error is None
    assert row.only_ends
    row.accept(_EOS)
    assert row.is_terminated


class DeadEnd(GrammarState):
    """A grammar that lets nothing follow, and cannot be rolled back."""

    is_terminated = only_ends = False

    def mask_words(self):
        raise GrammarFailed("no token may follow")

    def accept(self, token_id):
        raise GrammarFailed("it grew too large")

    def rollback(self, num_tokens):
        raise GrammarFailed("it could not be rolled back")

    def forced_tokens(self):
        return []

    def draft_masks(self, draft_ids):
        raise GrammarFailed("no token may follow")


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda row: row.mask_words(), "no token may follow"),
        (lambda row: row.accept(7), "grew"),
        (lambda row: row.rollback(0), "rolled back"),
        (lambda row: row.draft_masks([1]), "no token may follow"),
    ],
    ids=["mask", "accept", "rollback", "draft"],
)
def test_a_failed_grammar_tells_why_and_disturbs_no_neighbour(use, reason):
    """Law: whatever fails is kept as the row's error; its drafts and its neighbour's are decided all the same."""
    failed = _row(state=DeadEnd())
    use(failed)
    assert reason in failed.error
    logits = mx.zeros((2, 3, _V))
    logits[:, :, ord("c")] = 5
    result = accept_drafts(logits, [_sampling(failed), _sampling(_row())], [Draft([1, 2]), Draft(list(b"cd"))])
    assert result.settle()[1][:2] == list(b"cd")
    assert not failed.only_ends
    assert not failed.is_terminated


def test_a_token_that_the_grammar_closes_is_the_rows_error():
    """Law: a token that could not have been sampled ends the row with the reason, and is not raised."""
    row = _row()
    row.accept(ord("q"))
    assert "q" not in row.error
    assert "closes" in row.error
    assert len(_open(row)) >= _V


_FORCING = (
    GrammarSpec.choice(["yes, indeed", "yes, sure", "no"]),
    GrammarSpec.regex("<call>(a|bc)</call>(\n<end>)?"),
    GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {"name": {"enum": ["ann", "anna"]}, "on": {"type": "boolean"}},
            "required": ["name", "on"],
        }
    ),
    GrammarSpec.choice(["x" * 90]),
)


@pytest.mark.parametrize("spec", _FORCING, ids=["choice", "regex", "schema", "long"])
def test_known_tokens_are_those_that_the_masks_leave_no_choice_about(spec):
    """Law: a row that looks ahead has the masks, also along drafts, and the ends of one that does not."""
    random = np.random.default_rng(2)
    for _ in range(3):
        plain, ahead = _row(spec), RowGrammar(_COMPILER.compile(spec), _V, looks_ahead=True)
        num_known = 0
        while not plain.only_ends:
            assert _open(ahead) == _open(plain)
            assert not ahead.only_ends
            assert list(ahead.forced_tokens()[:1]) == list(plain.forced_tokens()[:1])
            draft = [*ahead.known, *random.choice(sorted(_open(ahead.state)), size=2).tolist()]
            masks = zip(ahead.draft_masks(draft), plain.draft_masks(draft), strict=True)
            assert all(_open(mine) == _open(theirs) for mine, theirs in masks)
            token_id = int(random.choice(sorted(_open(plain))))
            if ahead.known:
                num_known += 1
                assert _open(plain) == {ahead.known[0]} == {token_id}
            elif _EOS in _open(plain):
                break
            plain.accept(token_id)
            ahead.accept(token_id)
            if random.random() < 0.2:
                plain.rollback(1)
                ahead.rollback(1)
        assert num_known > 0
        assert ahead.error is None
    assert len(ahead.known) <= MAX_KNOWN


def test_another_token_than_the_known_one_is_an_error():
    """Law: a token that was not the forced one ends its row; nothing is known of it any more."""
    row = RowGrammar(_COMPILER.compile(_FORCING[1]), _V, looks_ahead=True)
    row.accept(ord("<"))
    assert bytes(row.known) == b"call>"
    row.accept(ord("q"))
    assert "closes" in row.error
    assert not row.known
    assert len(_open(row)) >= _V

"""A free part with a limit, any text behind it, and tags without text around them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import GrammarSpec, GrammarTag, InvalidGrammar, TokenNotAllowed, check_grammar

EOS, TURN_END, THINK_END, CALL = 256, 257, 258, 259
ENDS = {EOS, TURN_END}


@pytest.mark.parametrize("marker", ["</think>", (THINK_END,)])
@pytest.mark.parametrize("limit", [0, 1, 7])
def test_the_free_part_ends_at_its_limit(compiler, open_ids, facts, marker, limit):
    """Up to the limit all is open; from there only what writes the marker, and then the grammar holds."""
    row = compiler.compile(GrammarSpec.json_object(free_until=marker).limited(limit))
    for _ in range(limit):
        assert ord("x") in open_ids(row)
        row.accept(ord("x"))
    with pytest.raises(TokenNotAllowed, match="limit"):
        row.accept(ord("x"))
    written = b""
    while row.is_free:
        opened = open_ids(row)
        assert opened
        assert opened.isdisjoint(ENDS)
        token_id = min(opened)
        written += facts.tokens[token_id]
        row.accept(token_id)
    assert written == (marker.encode() if isinstance(marker, str) else facts.tokens[THINK_END])
    assert open_ids(row) == open_ids(compiler.compile(GrammarSpec.json_object()))


def test_a_marker_that_was_begun_goes_on_from_there(compiler, open_ids, write):
    """At the limit, what the row has of the marker counts."""
    row = compiler.compile(GrammarSpec.any_text(free_until="</think>", free_limit=7))
    write(row, "abc</th")

    assert ord("i") in open_ids(row)
    assert ord("<") not in open_ids(row)
    write(row, "ink>")
    assert not row.is_free


def test_any_text_may_follow(compiler, open_ids, facts, write):
    """Behind the marker every token that stands for bytes is open, special ones and EOS included."""
    row = compiler.compile(GrammarSpec.any_text(free_until=(THINK_END,), free_limit=3))
    row.accept(THINK_END)
    expected = {token_id for token_id, text in enumerate(facts.tokens) if text} | ENDS

    for token_id in (ord("a"), CALL, THINK_END, 255):
        assert open_ids(row) == expected
        assert row.is_satisfied
        assert not row.only_ends
        assert row.forced_tokens() == []
        row.accept(token_id)
    row.accept(EOS)
    assert row.is_terminated


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 4)), max_size=25), any_text=st.booleans())
def test_rollback_gives_the_limit_back(compiler, open_ids, steps, any_text):
    """Going on and back in any order gives the masks of a fresh row; so do the masks along a draft."""
    marker = "</think>"
    spec = GrammarSpec.json_object(free_until=marker).limited(4)
    if any_text:
        spec = GrammarSpec.any_text(free_until=marker, free_limit=4)
    row, taken = compiler.compile(spec), []
    for choice, back in steps:
        candidates = sorted(open_ids(row))
        if not row.is_terminated:
            taken.append(candidates[choice % len(candidates)])
            row.accept(taken[-1])
        num_back = min(back, len(taken)) if back > 2 else 0
        row.rollback(num_back)
        del taken[len(taken) - num_back :]
        fresh = compiler.compile(spec)
        for token_id in taken:
            fresh.accept(token_id)
        assert open_ids(row) == open_ids(fresh)
    fresh = compiler.compile(spec)
    masks = fresh.draft_masks(taken)
    for mask, token_id in zip(masks, [*taken, None], strict=False):
        assert open_ids(mask) == open_ids(fresh)
        if token_id is not None and len(masks) > 1:
            fresh.accept(token_id)


@pytest.mark.parametrize("limit", [-1, True, 1.5, None])
def test_wrong_limits_are_refused(limit):
    """A limit is an integer from 0, of a grammar with a free part."""
    with pytest.raises(InvalidGrammar, match="free_limit"):
        GrammarSpec.any_text(free_until="x", free_limit=limit)
    with pytest.raises(InvalidGrammar, match="free part"):
        GrammarSpec.json_object().limited(1)


def test_tags_alone(compiler, open_ids, write):
    """Without free text the reply is one tag, or several with what is between them, and then only the end."""
    tags = [
        GrammarTag(begin='<f={"a"', content=GrammarSpec.json_object(compact=True), end="</f>"),
        GrammarTag(begin='<f={"b"', content=GrammarSpec.choice(["on", "off"]), end="</f>"),
    ]
    alone = GrammarSpec.structural_tag(tags, triggers=["<f="], allows_text=False)
    check_grammar(alone)
    row = compiler.compile(alone)
    assert open_ids(row).isdisjoint({*ENDS, ord("x")})
    write(row, '<f={"b"off</f>')
    assert open_ids(row) == ENDS

    several = compiler.compile(GrammarSpec.structural_tag(tags, triggers=["<f="], allows_text=False, between="\n"))
    write(several, '<f={"b"on</f>')
    assert several.is_satisfied
    assert open_ids(several) & {ord("\n"), ord("x"), ord("<")} == {ord("\n")}
    write(several, '\n<f={"a"{}</f>')
    assert several.is_satisfied

    close = compiler.compile(GrammarSpec.structural_tag(tags, triggers=["<f="], allows_text=False, between=""))
    write(close, '<f={"b"on</f><f={"b"off</f>')
    assert close.is_satisfied


def test_a_special_token_opens_a_tag_alone(compiler, open_ids, write):
    """A trigger that is a special token is that token, not its text."""
    tag = GrammarTag(begin="<call>", content=GrammarSpec.choice(["on"]), end="")
    row = compiler.compile(GrammarSpec.structural_tag([tag], triggers=["<call>"], allows_text=False))

    assert open_ids(row) == {CALL}
    row.accept(CALL)
    write(row, "on")
    assert open_ids(row) == ENDS

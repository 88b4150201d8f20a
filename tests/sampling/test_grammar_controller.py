"""One row's grammar: what is open, going on and going back, the free part before it, and the end after it."""

import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_sampling import (
    GrammarCompiler,
    GrammarFailed,
    GrammarSpec,
    GrammarTag,
    InvalidGrammar,
    TokenizerFacts,
    TokenNotAllowed,
    compile_grammar,
    start_masks,
)

EOS, TURN_END, THINK_END, CALL, NO_BYTES = 256, 257, 258, 259, 260
ENDS = {EOS, TURN_END}
POINT = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    compact=True,
)


def texts(facts, ids):
    return {facts.tokens[one] for one in ids}


def test_a_complete_grammar_leaves_only_the_ends(compiler, open_ids, write):
    """After the last token every EOS token and nothing else is open; after EOS the row is over and takes nothing."""
    row = compile_grammar(POINT, compiler)
    assert not row.only_ends
    write(row, '{"x":1}')

    assert open_ids(row) == ENDS
    assert row.only_ends
    assert row.is_satisfied
    assert not row.is_terminated
    row.accept(TURN_END)
    assert row.is_terminated
    assert row.only_ends
    assert open_ids(row) == ENDS
    with pytest.raises(TokenNotAllowed, match="over"):
        row.accept(EOS)


def test_eos_is_closed_until_the_grammar_is_satisfied(compiler, open_ids, write):
    """EOS is open exactly where the text so far matches; a refused token changes nothing."""
    row = compiler.compile(GrammarSpec.regex("ab(cd)?"))
    for text, is_match in (("", False), ("a", False), ("ab", True), ("abc", False), ("abcd", True)):
        row = compiler.compile(GrammarSpec.regex("ab(cd)?"))
        write(row, text)
        before = open_ids(row)
        assert (EOS in before) == row.is_satisfied == is_match
        if not is_match:
            with pytest.raises(TokenNotAllowed, match="not satisfied"):
                row.accept(EOS)
        with pytest.raises(TokenNotAllowed):
            row.accept(ord("z"))
        assert open_ids(row) == before
        assert row.num_accepted == len(text)


@given(steps=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 5)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_rollback_restores_what_was_before(compiler, open_ids, steps):
    """Going on and back in any order, across the free part, the grammar and EOS, gives the masks of a fresh row."""
    spec = GrammarSpec.json_object(free_until="</think>")
    row, taken = compiler.compile(spec), []
    for choice, back in steps:
        candidates = sorted(open_ids(row))
        if not row.is_terminated:
            # The marker's own tokens come often, so that the grammar is reached.
            token_id = candidates[choice % len(candidates)] if choice < 200 or not row.is_free else THINK_END
            row.accept(token_id)
            taken.append(token_id)
        num_back = min(back, len(taken)) if back > 2 else 0
        row.rollback(num_back)
        del taken[len(taken) - num_back :]
        fresh = compiler.compile(spec)
        for token_id in taken:
            fresh.accept(token_id)
        assert open_ids(row) == open_ids(fresh)
        assert (row.is_free, row.is_terminated, row.is_satisfied) == (
            fresh.is_free,
            fresh.is_terminated,
            fresh.is_satisfied,
        )
    with pytest.raises(ValueError, match="num_tokens"):
        row.rollback(len(taken) + 1)


def test_special_tokens_never_stand_for_their_text(compiler, open_ids, write):
    """Inside a JSON string that may hold any text, no special token, no token without bytes and no padding is open."""
    row = compiler.compile(GrammarSpec.json_schema({"type": "string"}))
    write(row, '"<cal')
    opened = open_ids(row)

    assert ord("l") in opened
    assert opened.isdisjoint({EOS, TURN_END, THINK_END, CALL, NO_BYTES})
    assert max(opened) < len(compiler.facts.tokens) < compiler.facts.vocab_size


def test_no_padding_is_ever_open(compiler, open_ids, facts, write):
    """Ids beyond the tokenizer and ids without bytes are closed: free, bound, complete, over; accepting one fails."""
    row = compiler.compile(GrammarSpec.json_object(free_until=(THINK_END,)))
    for step in ([], [THINK_END], "{}", [EOS]):
        write(row, step)
        assert open_ids(row).isdisjoint({NO_BYTES, *range(len(facts.tokens), 352)})
    row = compiler.compile(GrammarSpec.regex(".*"))
    for token_id in (NO_BYTES, len(facts.tokens), 319, 100_000, -1):
        with pytest.raises(TokenNotAllowed):
            row.accept(token_id)
    assert row.mask_words().shape == (10,)
    assert row.mask_words().dtype == np.uint32
    assert not row.mask_words().flags.writeable


@pytest.mark.parametrize("marker", ["</think>", (THINK_END,), (ord("."), ord("."), ord("!"))])
def test_free_until_its_marker_then_bound(compiler, open_ids, facts, write, marker):
    """Before the marker everything but EOS is open, the grammar holds from the next token on."""
    row = compiler.compile(GrammarSpec.json_object(free_until=marker))
    bound = open_ids(compiler.compile(GrammarSpec.json_object()))
    write(row, "I think... <thi")

    assert row.is_free
    assert not row.is_satisfied
    assert {ord("x"), CALL, ord("\xff")} < open_ids(row)
    assert open_ids(row).isdisjoint(ENDS)
    with pytest.raises(TokenNotAllowed, match="free part"):
        row.accept(EOS)
    write(row, marker)
    assert not row.is_free
    assert open_ids(row) == bound


def test_a_free_token_never_hides_the_grammars_first(compiler, open_ids, facts):
    """A token that holds the end of the marker and more is closed, whatever part of the marker came before."""
    marker, tokens = b"</think>", facts.tokens
    for text in ("", "so <", "</thin", "x</thi", "<</", "</th"):
        row = compiler.compile(GrammarSpec.json_object(free_until=marker.decode()))
        for byte in text.encode():
            row.accept(byte)
        opened = open_ids(row)
        for token_id, piece in enumerate(tokens):
            if not piece or token_id in ENDS:
                continue
            whole = text.encode() + piece
            crosses = marker in whole and not whole.endswith(marker)
            assert (token_id in opened) == (not crosses), (text, piece)
            if token_id in opened:
                row.accept(token_id)
                assert row.is_free == (not whole.endswith(marker))
                row.rollback(1)


def test_rollback_within_the_marker(compiler, open_ids, write):
    """Rolled back inside a marker that was spelled in pieces, the row knows how much of it is left."""
    row = compiler.compile(GrammarSpec.json_object(free_until="</think>"))
    write(row, "a</thi")
    row.rollback(3)
    write(row, "thinx")
    row.rollback(1)
    write(row, "k>")

    assert not row.is_free
    row.rollback(2)
    assert row.is_free
    row.rollback(4)
    write(row, "hink>")
    assert row.is_free


def test_a_draft_is_walked_from_where_the_row_stands(compiler, open_ids, write):
    """Drafts within the free part, across its marker, and within the grammar see the masks that the row would see."""
    spec = GrammarSpec.regex("ab?c", free_until="</think>")
    for done, draft in (("so </thi", b"nk>ab"), ("so </thi", b"cc"), ("</think>a", b"bc"), ("</think>ac", [EOS, EOS])):
        row, fresh = compiler.compile(spec), compiler.compile(spec)
        write(row, done)
        write(fresh, done)
        masks = row.draft_masks(list(draft))
        for mask in masks:
            assert open_ids(mask) == open_ids(fresh)
            assert mask.only_ends == fresh.only_ends
            if fresh.num_accepted - len(done) < len(draft) and not fresh.is_terminated:
                fresh.accept(draft[fresh.num_accepted - len(done)])
        assert row.num_accepted == len(done)
        assert len(masks) == (1 if draft[0] == EOS else len(draft) + 1)


def test_a_grammar_of_token_ids_opens_no_token_without_bytes(compiler, open_ids):
    """Where a Lark grammar takes any token but one, ids without bytes and padding stay closed."""
    opened = open_ids(compiler.compile(GrammarSpec.lark("start: <[^258]>")))

    assert CALL in opened
    assert opened.isdisjoint({THINK_END, NO_BYTES, *range(len(compiler.facts.tokens), 352)})


def test_forced_tokens_are_what_must_come(compiler, write):
    """Forced tokens spell what the grammar leaves no choice about, and are not accepted by asking."""
    row = compiler.compile(POINT)
    forced = row.forced_tokens()

    assert b"".join(compiler.facts.tokens[one] for one in forced) == b'{"x":'
    assert row.num_accepted == 0
    for token_id in forced:
        row.accept(token_id)
    assert row.forced_tokens() == []
    assert compiler.compile(GrammarSpec.json_object(free_until="</think>")).forced_tokens() == []
    write(row, [ord("1"), ord("}"), EOS])
    assert row.forced_tokens() == []


def test_known_tokens_may_spell_forced_text_otherwise(compiler):
    """A token that the mask leaves out only because text is forced in another spelling is accepted."""
    row = compiler.compile(POINT)
    for byte in b'{"x":7}':
        row.accept(byte)

    assert row.only_ends


def test_masks_are_computed_by_a_worker(compiler, open_ids):
    """Masks started together equal those computed one by one; a row may go on or back before it is looked at."""
    specs = [
        POINT,
        GrammarSpec.regex("[a-z]+"),
        GrammarSpec.json_object(free_until="</think>"),
        GrammarSpec.choice(["yes", "no"]),
    ]
    rows = [compiler.compile(spec) for spec in specs]
    expected = [open_ids(compiler.compile(spec)) for spec in specs]

    start_masks(rows)
    start_masks(rows)
    assert [open_ids(row) for row in rows] == expected
    assert all(row.is_ready for row in rows)
    rows[1].accept(ord("a"))
    start_masks(rows)
    rows[1].accept(ord("b"))
    rows[1].start()
    rows[1].rollback(2)
    assert open_ids(rows[1]) == expected[1]


def test_a_draft_is_walked_and_taken_back(compiler, open_ids, write):
    """Masks along a draft are those after each token, end at a closed token or EOS, and leave the row as it was."""
    row = compiler.compile(GrammarSpec.regex("ab?c"))
    good = row.draft_masks([*b"abc", EOS, EOS])
    bad = row.draft_masks(list(b"axc"))

    assert [open_ids(one) for one in good] == [{97}, {98, 99}, {99}, ENDS]
    assert [one.only_ends for one in good] == [False, False, False, True]
    assert [open_ids(one) for one in bad] == [{97}, {98, 99}]
    assert row.num_accepted == 0
    assert open_ids(row) == {97}
    assert [open_ids(one) for one in row.draft_masks([100_000])] == [{97}]


def test_free_text_with_constrained_calls(compiler, open_ids, write):
    """Free text may end at any place; a trigger must lead into one of its tags; after the tag text is free again."""
    tags = [
        GrammarTag(begin="<f=a>", content=POINT, end="</f>"),
        GrammarTag(begin="<f=b>", content=GrammarSpec.regex("[01]/x"), end="</f>"),
        GrammarTag(begin="<call>", content=GrammarSpec.choice(["on", "off"])),
    ]
    row = compiler.compile(GrammarSpec.structural_tag(tags, triggers=["<f=", "<call>"]))
    write(row, "Well, <")
    assert {*ENDS, CALL, ord("\n")} < open_ids(row)
    write(row, "f=")
    assert open_ids(row) == {ord("a"), ord("b")}
    write(row, "b>1/x</f> and ")
    assert row.is_satisfied
    assert THINK_END not in open_ids(row)
    row.accept(CALL)
    assert open_ids(row) == {ord("o")}
    write(row, "off")
    assert row.is_satisfied

    needed = compiler.compile(GrammarSpec.structural_tag(tags, triggers=["<f=", "<call>"], is_required=True))
    write(needed, "text")
    assert open_ids(needed).isdisjoint(ENDS)
    write(needed, '<f=a>{"x":1}</f>')
    assert needed.is_satisfied


def test_a_dead_end_is_an_error_and_no_hang(facts):
    """A tokenizer that cannot spell what the grammar asks for fails with a type at the mask, and again when asked."""
    tokens = tuple(b"" if text == b"z" else text for text in facts.tokens)
    with GrammarCompiler(TokenizerFacts(tokens=tokens, vocab_size=320, eos_token_ids=(EOS,))) as compiler:
        row = compiler.compile(GrammarSpec.regex("az"))
        row.accept(ord("a"))
        for _ in range(2):
            with pytest.raises(GrammarFailed):
                row.mask_words()
        assert not row.only_ends
        with pytest.raises(GrammarFailed):
            row.rollback(1)
        other = compiler.compile(GrammarSpec.regex("az|b"))
        assert len(other.draft_masks([ord("a"), ord("z")])) == 1
        other.accept(ord("b"))
        assert other.only_ends


def test_a_grammar_that_grows_too_large_is_an_error(compiler):
    """A grammar whose parse explodes while it runs ends with a type; other rows go on."""
    spec = GrammarSpec.lark(
        "start: r0\n" + "\n".join(f"r{one}: r{one + 1} r{one + 1} |" for one in range(300)) + '\nr300: "a"'
    )
    row = compiler.compile(spec)

    def run_on():
        for _ in range(50):
            row.accept(ord("a"))
            row.mask_words()

    with pytest.raises(GrammarFailed):
        run_on()
    assert compiler.compile(POINT).mask_words().any()


def test_compiled_once_and_kept_in_order_of_use(facts):
    """Equal specs share one compilation, rows share no state, and the cache keeps the last ones."""
    with GrammarCompiler(facts, cache_size=2) as compiler:
        first, second = compiler.compile(POINT), compiler.compile(pickle.loads(pickle.dumps(POINT)))
        first.accept(ord("{"))
        assert second.num_accepted == 0
        assert len(compiler._compiled) == 1
        for pattern in ("a", "b", "a", "c"):
            compiler.compile(GrammarSpec.regex(pattern))
        assert [spec.text for spec in compiler._compiled] == ["a", "c"]
        with pytest.raises(InvalidGrammar):
            compiler.compile(GrammarSpec.regex("("))
        assert len(compiler._compiled) == 2
        compiler.close()
        first.start()
        assert first.mask_words().any()


def test_any_thread_may_compile(compiler, open_ids):
    """Compiling from many threads at once gives every row its own working grammar."""
    masks = []

    def work(number):
        row = compiler.compile(GrammarSpec.regex(f"a{{{number % 3 + 1}}}"))
        row.accept(ord("a"))
        masks.append((number % 3, row.only_ends))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(set(masks)) == [(0, True), (1, False), (2, False)]
    assert len(masks) == 12


def test_facts_are_plain_and_checked(facts):
    """Facts are picklable, and refuse what no tokenizer has."""
    assert pickle.loads(pickle.dumps(facts)) == facts
    for wrong in (
        {"eos_token_ids": ()},
        {"eos_token_ids": (5000,)},
        {"vocab_size": 10},
        {"tokens": ()},
        {"tokenizer_json": "{}"},
    ):
        with pytest.raises(ValueError, match="token"):
            TokenizerFacts(**{"tokens": facts.tokens, "vocab_size": 320, "eos_token_ids": (EOS,), **wrong})
    with pytest.raises(ValueError, match="cache_size"):
        GrammarCompiler(facts, cache_size=-1)


def test_special_tokens_by_name_and_unknown_ones(compiler, open_ids):
    """A Lark grammar may name a special token of the model; one that it lacks is refused when compiled."""
    row = compiler.compile(GrammarSpec.lark('start: "a" <call> "b"'))
    row.accept(ord("a"))

    assert open_ids(row) == {CALL}
    with pytest.raises(InvalidGrammar, match="special token"):
        compiler.compile(GrammarSpec.lark("start: <nope>"))
    with pytest.raises(InvalidGrammar, match="free_until"):
        compiler.compile(GrammarSpec.json_object(free_until=(5000,)))

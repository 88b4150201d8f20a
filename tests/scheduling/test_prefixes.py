"""Laws of stored and shared prefixes, on a fake runner whose caches are the tokens themselves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_scheduling import Cancel, Cancelled, Finished
from headrace_scheduling.testing import EngineRun, FakePrefixStore, make_submit

_LONG = "abcdefghij" * 8


def _harness(*, store=None, **options):
    run = EngineRun(prompt_cache_bytes=1, **options)
    if store is not None:
        run.loop._scheduler.prefixes.store = store
    return run


def _store(run):
    return run.loop._scheduler.prefixes.store


def _computed(run):
    return {row_id.request_id: count for row_id, count in run.runner.num_computed.items() if not row_id.choice}


@pytest.mark.parametrize("can_trim", [True, False])
def test_the_next_turn_computes_its_new_tokens_alone(can_trim):
    """Law: what a turn computed and generated is not computed again, trimmable caches or not."""
    run = _harness(can_trim=can_trim, store=FakePrefixStore(can_trim=can_trim))
    run.run(make_submit(1, _LONG, 5), later=[make_submit(2, _LONG + "abcd" + "xyz", 3)])
    # The last token of the reply was sampled but not fed, so it is computed with the new ones.
    assert _computed(run) == {1: 80, 2: 3}
    assert run.end(2).stats.num_cached_tokens == 84
    assert run.events[-1].status.num_prefix_hits == 1


def test_an_edited_last_turn_hits_up_to_the_stable_boundary():
    """Law: caches that cannot be trimmed serve an edited turn from the copy at the stable boundary."""
    run = _harness(can_trim=False, store=FakePrefixStore(can_trim=False))
    run.run(
        make_submit(1, _LONG, 5, about={"stable_boundary": 60}), later=[make_submit(2, _LONG[:60] + "other words", 3)]
    )
    assert run.end(2).stats.num_cached_tokens == 60
    assert _computed(run)[2] == 11


def test_an_exact_repeat_computes_one_token():
    """Law: at least one token is computed, because its logits are needed."""
    for can_trim in (True, False):
        run = _harness(can_trim=can_trim, store=FakePrefixStore(can_trim=can_trim))
        run.run(make_submit(1, _LONG, 5), later=[make_submit(2, _LONG, 3)])
        assert _computed(run)[2] == 1
        assert run.text(2) == run.text(1)[:3]


@pytest.mark.parametrize("can_trim", [True, False])
def test_requests_that_arrive_together_share_one_prefill(can_trim):
    """Law: a common beginning is computed once, whoever comes first, and every reply is its own."""
    run = _harness(can_trim=can_trim, store=FakePrefixStore(can_trim=can_trim), prefill_chunk=16)
    endings = ["", "-one", "-two", "-three"]
    run.run(*(make_submit(n, _LONG + ending, 5) for n, ending in enumerate(endings)))
    computed = _computed(run)
    assert computed.pop(0) == 80
    # 79 of the 80 come from the first row when the prompt is all of it; its own end needs computing.
    assert all(count <= 1 + 6 for count in computed.values()), computed
    for number, ending in enumerate(endings):
        assert run.text(number) == (_LONG + ending)[:5]


def test_sharing_needs_no_store_between_choices():
    """Law: choices of one request compute the prompt once, also where nothing is stored."""
    run = EngineRun(max_rows=2)
    run.run(make_submit(1, _LONG, 4, num_choices=5))
    assert sum(run.runner.num_computed.values()) == 80 + 4
    assert [run.text(1, choice) for choice in range(5)] == [_LONG[:4]] * 5
    assert all(isinstance(run.end(1, choice), Finished) for choice in range(5))
    assert run.events[-1].status.num_finished == 5


@pytest.mark.parametrize("can_trim", [True, False])
def test_choices_beyond_the_slots_still_share(can_trim):
    """Law: choices that have to wait for a slot keep the prefix that was computed for them."""
    run = EngineRun(max_rows=1, can_trim=can_trim)
    run.run(make_submit(1, _LONG, 4, num_choices=3))
    assert sum(run.runner.num_computed.values()) == 80 + 2
    assert [run.text(1, choice) for choice in range(3)] == [_LONG[:4]] * 3


def test_other_tenants_share_nothing():
    """Law: neither stored nor running rows of one tenant serve another, and None is a tenant of its own."""
    run = _harness(prefill_chunk=16)
    run.run(
        make_submit(1, _LONG, 2, about={"tenant": "a"}),
        make_submit(2, _LONG, 2, about={"tenant": "b"}),
        make_submit(3, _LONG, 2),
        later=[make_submit(4, _LONG, 2, about={"tenant": "b"})],
    )
    computed = _computed(run)
    assert computed[1] == computed[2] == computed[3] == 80
    assert computed[4] == 1


def test_a_request_may_decline_to_be_cached():
    """Law: `caches_prefix` False neither takes nor stores."""
    run = _harness()
    run.run(make_submit(1, _LONG, 3, about={"caches_prefix": False}), later=[make_submit(2, _LONG, 2)])
    assert _computed(run) == {1: 80, 2: 80}
    assert len(_store(run).entries) == 1


def test_a_cancelled_row_keeps_what_it_computed():
    """Law: cancelled in prefill or decode, a row stores exactly the tokens that its slot holds."""
    for at_step, least in ((3, 40), (8, 80)):
        run = _harness(prefill_chunk=20)
        run.script[at_step] = [Cancel(1)]
        run.run(make_submit(1, _LONG, 50))
        assert run.end(1) == Cancelled()
        ((_, tokens),) = _store(run).entries
        assert len(tokens) >= least
        assert bytes(tokens).decode() == (_LONG * 2)[: len(tokens)]


def test_failed_rows_store_nothing():
    """Law: after a failed step nothing of its rows is stored."""
    run = _harness(failing_dispatches=frozenset({3})).run(make_submit(1, _LONG, 9))
    assert run.end(1).code == "engine_failed"
    assert _store(run).entries == []


@pytest.mark.parametrize("failing", ["peek", "take", "held", "put"])
def test_a_failing_store_means_no_hit(failing):
    """Law: whatever the store raises, every request is served as without it."""
    store = FakePrefixStore(failing=frozenset({failing}))
    run = _harness(store=store)
    run.run(make_submit(1, _LONG, 5), later=[make_submit(2, _LONG + "x", 3)])
    assert isinstance(run.end(1), Finished)
    assert run.text(2) == _LONG[:3]
    assert run.loop._scheduler.prefixes.num_faults > 0


def test_a_failing_copy_costs_nobody_a_row():
    """Law: rows whose copy fails go on, and rows that waited for it compute for themselves."""
    run = _harness(failing_copies=frozenset(range(20)), prefill_chunk=16)
    run.run(make_submit(1, _LONG, 5), make_submit(2, _LONG + "x", 5), make_submit(3, _LONG, 4, num_choices=2))
    assert run.text(1) == run.text(2) == _LONG[:5]
    assert run.text(3, 1) == _LONG[:4]


def test_a_row_that_cannot_be_seated_fails_alone():
    """Law: an opening that raises ends its row only."""
    run = EngineRun(failing_seats=frozenset({1})).run(make_submit(1), make_submit(2), make_submit(3))
    assert run.end(2).code == "request_failed"
    assert run.text(1) == run.text(3) == "abcab"
    assert run.runner.num_slots == 0


def test_a_leader_that_leaves_frees_its_followers():
    """Law: a row that waits for another one's prefix goes on alone when that one is cancelled."""
    run = _harness(prefill_chunk=8)
    run.script[3] = [Cancel(1)]
    run.run(make_submit(1, _LONG, 5), make_submit(2, _LONG + "x", 5))
    assert run.text(2) == _LONG[:5]


def test_quantized_rows_are_converted_at_their_own_first_chunk():
    """Law: where a row is converted follows from its prompt, not from slices, neighbours or sharing."""

    def first_chunk(num_prompt, boundary):
        return min(num_prompt, 50, boundary or num_prompt)

    for chunk in (7, 16, 512):
        run = _harness(prefill_chunk=chunk, first_chunk=first_chunk)
        run.run(
            make_submit(1, _LONG, 5), make_submit(2, _LONG[:30] + "x" * 40, 5), make_submit(3, _LONG, 4, num_choices=2)
        )
        slices = [part for step in run.steps for part in step.prefills]
        for number in (1, 2):
            seen, converted_at = 0, []
            for part in slices:
                if part.row_id.request_id == number:
                    seen += len(part.token_ids)
                    converted_at += [seen] if part.converts else []
            total = seen
            offset = (80 if number == 1 else 70) - total
            assert [offset + at for at in converted_at] in ([50], []), (chunk, number)
        assert run.text(1) == _LONG[:5]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_prefixes_change_no_text_and_every_row_ends_once(data):
    """Law: under any arrivals, branches, cancels and faults, text is as without a store, and all slots come back."""
    can_trim = data.draw(st.booleans())
    store = FakePrefixStore(can_trim=can_trim, failing=data.draw(st.sampled_from([frozenset(), frozenset({"take"})])))
    prompts = st.sampled_from([_LONG, _LONG[:40], _LONG[:40] + "zz", _LONG + "tail", "short", _LONG[:70] + "y" * 30])
    script, submits = {}, {}
    for number in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(prompts)
        choices = data.draw(st.integers(1, 3))
        about = {"stable_boundary": data.draw(st.sampled_from([None, 0, len(prompt) // 2, len(prompt)]))}
        about["priority"] = data.draw(st.sampled_from(["interactive", "batch"]))
        submits[number] = (prompt, choices)
        step = data.draw(st.integers(0, 8))
        script.setdefault(step, []).append(
            make_submit(number, prompt, data.draw(st.integers(1, 8)), num_choices=choices, about=about)
        )
        if data.draw(st.booleans()):
            script.setdefault(step + data.draw(st.integers(0, 8)), []).append(Cancel(number))
    run = EngineRun(
        prompt_cache_bytes=1,
        kv_budget_bytes=data.draw(st.sampled_from([None, 1024, 4096])),
        max_rows=data.draw(st.integers(1, 4)),
        prefill_chunk=data.draw(st.integers(1, 60)),
        script=script,
        can_trim=can_trim,
        failing_copies=data.draw(st.frozensets(st.integers(0, 5), max_size=2)),
        failing_dispatches=data.draw(st.frozensets(st.integers(0, 30), max_size=1)),
    )
    run.loop._scheduler.prefixes.store = store
    run.run(*script.pop(0, []))
    seen = {(row.request_id, row.choice) for events in run.events for row in events.rows}
    for number, choice in seen:
        end = run.end(number, choice)
        prompt, _ = submits[number]
        if isinstance(end, Finished):
            expected = prompt * 9
            assert run.text(number, choice) == expected[: end.stats.num_generated_tokens]
    assert run.runner.num_slots == 0
    run.loop._scheduler.check_integrity()
    assert run.loop._scheduler.num_running == run.loop._scheduler.num_waiting == 0
    assert run.events[-1].status.kv_reserved_bytes == 0


def test_choices_of_a_repeat_do_not_wait_for_the_first_to_end():
    """Law: where caches cannot be cut back, choices of a prompt that is stored begin with it beside choice 0."""
    run = _harness(can_trim=False, store=FakePrefixStore(can_trim=False))
    run.run(make_submit(1, _LONG, 3), later=[make_submit(2, _LONG, 30, num_choices=3)])
    beginnings = [
        number for number, step in enumerate(run.steps) for row in step.openings if row.row_id.request_id == 2
    ]
    assert len(beginnings) == 3
    assert beginnings[-1] - beginnings[0] <= 2
    assert sum(count for row_id, count in run.runner.num_computed.items() if row_id.request_id == 2) == 3
    assert [run.text(2, choice) for choice in range(3)] == [_LONG[:30]] * 3


def test_a_row_that_stands_at_the_common_length_is_copied_there():
    """Law: a prompt whose common part ends exactly where a running row stands gets a copy, and does not wait."""
    run = _harness(can_trim=False, store=FakePrefixStore(can_trim=False), prefill_chunk=40)
    run.script[1] = [make_submit(2, _LONG[:40] + "other", 30)]
    run.run(make_submit(1, _LONG, 40, about={"stable_boundary": 1}))
    assert _computed(run) == {1: 80, 2: 5}
    ends = [number for number, events in enumerate(run.events) for row in events.rows if row.end is not None]
    first_of_2 = next(n for n, events in enumerate(run.events) for row in events.rows if row.request_id == 2)
    assert first_of_2 < ends[0]


def test_the_end_of_a_reply_does_not_wait_for_its_copy():
    """Law: a row's end is published before its keys and values are copied and stored."""
    told = []

    class Watching(FakePrefixStore):
        def put(self, tokens, caches, **about):
            told.append([bool(run.ends(request_id)) for request_id in (1, 2)])
            return super().put(tokens, caches, **about)

    run = _harness(store=Watching())
    run.run(make_submit(1, _LONG, 3), make_submit(2, _LONG[::-1], 6))
    assert told[-2:] == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("can_trim", "failing", "first"), [(True, frozenset(), 84), (True, frozenset({"held"}), 0), (False, frozenset(), 0)]
)
def test_a_row_that_leaves_is_copied_without_what_the_store_has(can_trim, failing, first):
    """Law: the end of a later turn copies what the turn has added; a store that cannot tell gets all of it."""
    told = []

    class Watching(FakePrefixStore):
        def put(self, tokens, caches, **about):
            told.append((len(tokens), len(caches), about["first"]))
            return super().put(tokens, caches, **about)

    run = _harness(can_trim=can_trim, store=Watching(can_trim=can_trim, failing=failing))
    about = {"stable_boundary": 10}
    run.run(make_submit(1, _LONG, 5, about=about), later=[make_submit(2, _LONG + "abcd" + "xyz", 3, about=about)])
    assert run.end(2).stats.num_cached_tokens == 84
    assert told == [(84, 84, 0), (89, 89 - first, first)]

"""Cutting a step's forwards for streams: every token once, in order, and each row's end where it was."""

from hypothesis import given
from hypothesis import strategies as st

from headrace_scheduling.packs import Part, pack_slices, split_pack
from headrace_scheduling.steps import RowId


def _parts(lengths):
    return [
        Part(RowId(index), tuple(range(length)), samples=index % 2 == 0, is_prompt=True, converts=index % 3 == 0)
        for index, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=9), st.integers(1, 4))
def test_shares_of_a_pack_are_its_parts(lengths, num_streams):
    for pack in pack_slices(_parts(lengths)):
        shares = split_pack(pack, num_streams)
        for part in pack:
            pieces = [piece for share in shares for piece in share if piece.row_id == part.row_id]
            assert sum((piece.token_ids for piece in pieces), ()) == part.token_ids
            assert [piece.samples for piece in pieces] == [False] * (len(pieces) - 1) + [part.samples]
            assert [piece.converts for piece in pieces] == [False] * (len(pieces) - 1) + [part.converts]
        assert all(shares)


def test_rows_are_dealt_where_that_is_even_and_cut_otherwise():
    even = split_pack(_parts([100, 100, 90, 90]), 2)
    assert [[part.length for part in share] for share in even] == [[100, 90], [100, 90]]
    odd = split_pack(_parts([100, 100, 90]), 2)
    assert [[part.length for part in share] for share in odd] == [[50, 50, 45], [50, 50, 45]]


def test_few_positions_stay_one_forward():
    assert len(split_pack(_parts([30, 30]), 2)) == 1
    assert len(split_pack(_parts([32, 32]), 2)) == 2


def test_many_rows_of_one_token_are_one_forward():
    (share,) = split_pack(_parts([1] * 65), 2)
    assert len(share) == 65


def test_a_row_shorter_than_the_streams_is_in_the_last_of_them():
    shares = split_pack(_parts([64, 1, 1]), 2)
    assert [[part.length for part in share] for share in shares] == [[32], [32, 1, 1]]

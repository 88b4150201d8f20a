"""Which parts of rows run in one forward, padded to the longest of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace_scheduling.steps import RowId, Step

# A forward of so few positions costs about the same however many of them are padding.
_CHEAP_POSITIONS = 128
# Otherwise at most a fifth of a forward's positions are padding.
_MAX_WASTE = 1.25
# Fewer positions are not worth more than one forward.
_SPLIT_POSITIONS = 64
# Rows that decode wait for the padding of every step, so for them it has to be cheaper than another forward.
_CHEAP_DECODE = 32


@frozen
class Part:
    """What one row feeds in a step.

    Attributes:
        token_ids: in order; empty for the row's last sampled token, which may be unread.
        samples: whether the token after them is sampled.
        is_prompt: whether they are of the row's prompt.
        converts: whether the row is converted after them.
    """

    row_id: RowId
    token_ids: tuple[int, ...] = ()
    samples: bool = True
    is_prompt: bool = False
    converts: bool = False

    @property
    def length(self) -> int:
        """Positions that are fed."""
        return len(self.token_ids) or 1


def pack_decodes(step: Step) -> tuple[list[Part], list[Part]]:
    """Return what runs in the forward of the rows that decode, and all else.

    Runs of forced tokens go beside those rows if that takes few positions, and among the slices of prompts otherwise.
    """
    decodes = [Part(row_id) for row_id in step.decodes]
    runs = [Part(run.row_id, run.token_ids) for run in step.runs]
    slices = [
        Part(part.row_id, part.token_ids, samples=part.is_last, is_prompt=True, converts=part.converts)
        for part in step.prefills
    ]
    longest = max((part.length for part in runs), default=1)
    if decodes and longest * (len(decodes) + len(runs)) <= _CHEAP_DECODE:
        return decodes + runs, slices
    return decodes, runs + slices


def pack_slices(slices: Sequence[Part]) -> list[list[Part]]:
    """Group slices by length so that little is computed for padding; each group is one forward."""
    packs: list[list[Part]] = []
    num_tokens = 0
    for part in sorted(slices, key=_length, reverse=True):
        if packs:
            padded = packs[-1][0].length * (len(packs[-1]) + 1)
            if padded <= max(_CHEAP_POSITIONS, _MAX_WASTE * (num_tokens + part.length)):
                packs[-1].append(part)
                num_tokens += part.length
                continue
        packs.append([part])
        num_tokens = part.length
    return packs


def split_pack(pack: Sequence[Part], num_streams: int) -> list[list[Part]]:
    """Split a forward into about equal ones for streams that run at the same time.

    Rows are dealt out if that comes out even; otherwise every row is cut, and its pieces follow one another.
    """
    if num_streams == 1 or pack[0].length * len(pack) < _SPLIT_POSITIONS:
        return [list(pack)]
    if len(pack) % num_streams == 0:
        return [list(pack[index::num_streams]) for index in range(num_streams)]
    pieces = [_cut(part, num_streams) for part in pack]
    shares = [[cut[index] for cut in pieces if cut[index].token_ids] for index in range(num_streams)]
    return [share for share in shares if share]


def _cut(part: Part, num_pieces: int) -> list[Part]:
    """Cut a part into pieces, the last of which is never empty and does what the whole was to do at its end."""
    length = part.length
    ends = [length * (index + 1) // num_pieces for index in range(num_pieces)]
    starts = [0, *ends[:-1]]
    inner = evolve(part, samples=False, converts=False)
    return [
        evolve(part if end == length else inner, token_ids=part.token_ids[start:end])
        for start, end in zip(starts, ends, strict=True)
    ]


def _length(part: Part) -> int:
    return part.length

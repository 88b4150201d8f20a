"""A row's grammar inside a step: it goes along with what was read, and its failure is its own row's."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from headrace_sampling import GrammarFailed, GrammarState, KnownBitmask, TokenNotAllowed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from headrace_sampling import TokenBitmask

# A long constant is looked at piece by piece: finding each token takes time in the length of what is forced.
MAX_KNOWN = 32


class RowGrammar(GrammarState):
    """Binds one row to a grammar until that fails; from then on everything is open and `error` says why.

    Inside a step an exception would end the row's neighbours too, so nothing here raises `GrammarFailed` or
    `TokenNotAllowed`.

    A grammar that looks ahead stands after all tokens that it forces: those that must follow what was accepted are
    `known`, and every mask up to them opens one token.

    Args:
        state: the grammar, at the row's beginning.
        vocab_size: V.
        looks_ahead: whether forced tokens are looked for after each token.

    Attributes:
        error: why the grammar failed; None while it holds.
    """

    def __init__(self, state: GrammarState, vocab_size: int, *, looks_ahead: bool = False) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self._max_known = MAX_KNOWN if looks_ahead else 0
        # Accepted by the state already, and not yet by the row.
        self._known: deque[int] = deque()
        self.error: str | None = None

    @property
    def known(self) -> tuple[int, ...]:
        """Tokens that must follow what was accepted, at most `MAX_KNOWN`; the end is not among them."""
        return tuple(self._known)

    @property
    def ends_known(self) -> bool:
        """Whether nothing but the end may follow the known tokens; waits for the mask."""
        return self.error is None and self._state.only_ends

    @property
    def state(self) -> GrammarState:
        return self._state

    def mask_words(self) -> NDArray[np.uint32]:
        """Return the mask of the next token; all open once the grammar has failed."""
        if self.error is None and self._known:
            return self._one_open(self._known[0])
        if self.error is None:
            try:
                return self._state.mask_words()
            except GrammarFailed as error:
                self._fail(error)
        return self._all_open()

    @property
    def only_ends(self) -> bool:
        """Whether nothing but the end may follow."""
        return not self._known and self.ends_known

    @property
    def is_terminated(self) -> bool:
        return self.error is None and self._state.is_terminated

    def accept(self, token_id: int) -> None:
        """Go on by a token of the row; nothing once the grammar has failed or the row is over."""
        if self.error is not None or self._state.is_terminated:
            return
        try:
            if self._known:
                self._take_known(token_id)
            else:
                self._state.accept(token_id)
            self._look_ahead()
        except (GrammarFailed, TokenNotAllowed) as error:
            self._fail(error)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens of the row; nothing once the grammar has failed."""
        if self.error is not None:
            return
        try:
            self._state.rollback(num_tokens + len(self._known))
            self._known.clear()
            self._look_ahead()
        except (GrammarFailed, TokenNotAllowed) as error:
            self._fail(error)

    def forced_tokens(self) -> Sequence[int]:
        """Return what must come next; nothing once the grammar has failed."""
        if self.error is not None:
            return ()
        return self.known or self._state.forced_tokens()

    def draft_masks(self, draft_ids: Sequence[int]) -> Sequence[TokenBitmask]:
        """Return the masks along a draft; one that is all open once the grammar has failed."""
        masks: list[TokenBitmask] = []
        for place, token_id in enumerate(self._known):
            masks.append(KnownBitmask(self._one_open(token_id), only_ends=False))
            if draft_ids[place : place + 1] != [token_id]:
                return masks
        if self.error is None:
            try:
                return [*masks, *self._state.draft_masks(draft_ids[len(masks) :])]
            except GrammarFailed as error:
                self._fail(error)
        return [KnownBitmask(self._all_open(), only_ends=False)]

    def _take_known(self, token_id: int) -> None:
        if self._known.popleft() != token_id:
            raise TokenNotAllowed(token_id, "the grammar closes it")

    def _look_ahead(self) -> None:
        # Token by token: after the first the rest may be spelled in other tokens, and what counts is what each mask
        # along the way would open.
        while len(self._known) < self._max_known:
            forced = self._state.forced_tokens()
            if not forced:
                return
            self._state.accept(forced[0])
            self._known.append(forced[0])

    def _fail(self, error: Exception) -> None:
        self.error = str(error)
        self._known.clear()

    def _one_open(self, token_id: int) -> NDArray[np.uint32]:
        import numpy as np

        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        words[token_id // 32] = 1 << token_id % 32
        return words

    def _all_open(self) -> NDArray[np.uint32]:
        import numpy as np

        return np.full(-(-self._vocab_size // 32), 0xFFFFFFFF, np.uint32)


def advance(grammars: Iterable[RowGrammar], tokens: Sequence[int]) -> None:
    """Accept a step's tokens, then start computing the next masks of all these rows at once."""
    from headrace_sampling import GrammarController, start_masks

    going: list[GrammarController] = []
    for grammar, token_id in zip(grammars, tokens, strict=True):
        grammar.accept(token_id)
        if grammar.error is None and isinstance(grammar.state, GrammarController):
            going.append(grammar.state)
    start_masks(going)

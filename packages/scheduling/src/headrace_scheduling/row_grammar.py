"""A row's grammar inside a step: it goes along with what was read, and its failure is its own row's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_sampling import GrammarFailed, GrammarState, TokenBitmask, TokenNotAllowed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray


class RowGrammar(TokenBitmask):
    """Masks one row by a grammar until that fails; from then on everything is open and `error` says why.

    Inside a step an exception would end the row's neighbours too.

    Attributes:
        error: why the grammar failed; None while it holds.
    """

    def __init__(self, state: GrammarState, vocab_size: int) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self.error: str | None = None

    def mask_words(self) -> NDArray[np.uint32]:
        """Return the mask of the next token; all open once the grammar has failed."""
        if self.error is None:
            try:
                return self._state.mask_words()
            except GrammarFailed as error:
                self.error = str(error)
        return self._all_open()

    @property
    def only_ends(self) -> bool:
        """Whether nothing but the end may follow."""
        return self.error is None and self._state.only_ends

    def accept(self, token_id: int) -> None:
        """Go on by a token of the row."""
        if self.error is not None or self._state.is_terminated:
            return
        try:
            self._state.accept(token_id)
        except (GrammarFailed, TokenNotAllowed) as error:
            self.error = str(error)

    @property
    def state(self) -> GrammarState:
        return self._state

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

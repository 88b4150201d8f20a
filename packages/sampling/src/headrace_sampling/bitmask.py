"""Masks of one bit per token, and the one operation that applies those of all rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

_WORD = 32


class TokenBitmask(ABC):
    """A grammar mask of one bit per token. Rows that have one are masked together; see `close_tokens`."""

    @abstractmethod
    def mask_words(self) -> NDArray[np.uint32]:
        """Return the mask of the next token, waiting for it if it is under way.

        Returns:
            `(ceil(V / 32),) uint32`, read-only: bit i of word w is token 32 w + i, 1 is open. At least one is.

        Raises:
            GrammarFailed: no token may follow.
        """

    @property
    @abstractmethod
    def only_ends(self) -> bool:
        """Whether nothing is open but tokens that end the row; waits for the mask."""

    def apply_mask(self, logits: mx.array) -> mx.array:
        """Return `logits (1, V) float32` with closed tokens at minus infinity, lazily.

        Raises:
            GrammarFailed: no token may follow.
        """
        return close_tokens(logits, [self.mask_words()])


class GrammarState(TokenBitmask):
    """A bitmask that goes along with its row."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether a token that ends the row was accepted."""

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """Go on by one token of the row.

        Raises:
            TokenNotAllowed: the mask closes it.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted.

        Raises:
            ValueError: fewer than so many were accepted.
            GrammarFailed: the grammar has failed before.
        """

    @abstractmethod
    def forced_tokens(self) -> Sequence[int]:
        """Return tokens that must come next, whatever the model says; empty if there is a choice or only the end.

        Where the first of them is, the mask opens it alone. They are not accepted.
        """

    @abstractmethod
    def draft_masks(self, draft_ids: Sequence[int]) -> Sequence[TokenBitmask]:
        """Return the masks along a draft: before its first token, and after each up to one that is closed or ends."""


@frozen(eq=False)
class KnownBitmask(TokenBitmask):
    """A mask that is there already: `(ceil(V / 32),) uint32`, and whether it opens nothing but the end."""

    _words: NDArray[np.uint32]
    _only_ends: bool = field(kw_only=True, alias="only_ends")

    def mask_words(self) -> NDArray[np.uint32]:
        return self._words

    @property
    def only_ends(self) -> bool:
        return self._only_ends


def close_tokens(
    logits: mx.array, words: Sequence[NDArray[np.uint32] | None], *, on_device: bool | None = None
) -> mx.array:
    """Send the closed tokens of several rows to minus infinity, in one operation.

    Args:
        logits: `(R, V)` floating point.
        words: each row's mask, `(W,) uint32`; tokens from 32 W on are closed. None leaves the row as it is.
        on_device: whether bits are spread to tokens on the device; by default everywhere but on the CPU, whose
            kernels are slower at it than numpy.

    Returns:
        `(R, V)` in the dtype of `logits`; open tokens keep their bits.
    """
    num_rows, vocab_size = logits.shape
    packed = _packed(words, num_rows, -(-vocab_size // _WORD))
    if on_device is None:
        on_device = mx.default_device() != mx.Device(mx.cpu)
    if on_device:
        bits = mx.array(packed)[:, :, None] & _bit_values()
        return mx.where((bits != 0).reshape(num_rows, -1)[:, :vocab_size], logits, mx.array(-mx.inf, logits.dtype))
    limits = mx.array(_limits(packed))[:, :vocab_size]
    return mx.minimum(logits, limits.astype(logits.dtype))


def _packed(words: Sequence[NDArray[np.uint32] | None], num_rows: int, num_words: int) -> NDArray[np.uint32]:
    import numpy as np

    packed = np.zeros((num_rows, num_words), np.uint32)
    for row, mask in enumerate(words):
        if mask is None:
            packed[row] = 0xFFFFFFFF
        else:
            size = min(num_words, mask.size)
            packed[row, :size] = mask[:size]
    return packed


def _limits(packed: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return plus infinity for open and minus infinity for closed tokens, `(R, 32 W)`."""
    import numpy as np

    # Eight tokens at a time: a byte of the mask picks its row of the table.
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table = np.where(bits == 1, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)
    little = packed.astype("<u4", copy=False).view(np.uint8)
    return np.take(table, little.reshape(-1), axis=0).reshape(packed.shape[0], -1)


def _bit_values() -> mx.array:
    return mx.array([1 << bit for bit in range(_WORD)], mx.uint32)

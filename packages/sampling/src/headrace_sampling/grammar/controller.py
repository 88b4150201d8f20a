"""One row's grammar: which tokens may come next, as the row goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

from headrace_sampling.bitmask import GrammarState, KnownBitmask
from headrace_sampling.errors import GrammarFailed, TokenNotAllowed
from headrace_sampling.grammar.check import check_alive

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    import numpy as np
    from llguidance import LLMatcher
    from numpy.typing import NDArray

    from headrace_sampling.grammar.prefix import FreePrefix
    from headrace_sampling.grammar.worker import MaskWorker

# What a token did, for rollback: a free token leaves the state before it, from 0.
_BY_GRAMMAR, _AS_END, _AS_ANY = -1, -2, -3


@frozen(kw_only=True, eq=False)
class GrammarVocabulary:
    """What controllers of one tokenizer share.

    Attributes:
        vocab_size: V of the model, at least that of the tokenizer.
        num_tokens: of the tokenizer.
        eos_ids: tokens that end a row.
        ends: mask of `eos_ids`.
        written: mask of the tokens that stand for bytes, special ones included; as long as `ends`.
        worker: computes masks.
    """

    vocab_size: int
    num_tokens: int
    eos_ids: frozenset[int]
    ends: NDArray[np.uint32]
    written: NDArray[np.uint32]
    worker: MaskWorker


@define(eq=False)
class GrammarController(GrammarState):
    """Follows one row and says which tokens may come next. Made by a `GrammarCompiler`; belongs to one thread.

    The row is free until its marker, if it has one; then the grammar holds; when nothing else may follow, only EOS is
    open; after EOS the row is over.
    """

    _matcher: LLMatcher
    _vocabulary: GrammarVocabulary
    _prefix: FreePrefix | None = None
    _free_limit: int | None = field(default=None, kw_only=True, alias="free_limit")
    _takes_any: bool = field(default=False, kw_only=True, alias="takes_any")
    _num_free: int = field(default=0, init=False)
    _free: int = field(default=0, init=False)
    _trail: list[int] = field(factory=list, init=False)
    _words: NDArray[np.uint32] | None = field(default=None, init=False)
    _pending: tuple[Future[NDArray[np.uint32]], int] | None = field(default=None, init=False)

    @property
    def num_accepted(self) -> int:
        """How many tokens were accepted and not rolled back."""
        return len(self._trail)

    @property
    def is_free(self) -> bool:
        """Whether the row is before its marker, where anything but EOS may come."""
        return self._prefix is not None and self._free < self._prefix.end

    @property
    def is_terminated(self) -> bool:
        """Whether EOS was accepted; nothing may be accepted or sampled any more."""
        return bool(self._trail) and self._trail[-1] == _AS_END

    @property
    def is_satisfied(self) -> bool:
        """Whether what was accepted so far is a complete match, though more may be allowed."""
        if self.is_free:
            return False
        self._settle()
        return self.is_terminated or self._matcher.is_accepting()

    @property
    def only_ends(self) -> bool:
        """Whether nothing but EOS may follow: the row may end without it. Waits for the mask."""
        if self.is_terminated:
            return True
        if self.is_free:
            return False
        try:
            return not (self.mask_words() & ~self._vocabulary.ends).any()
        except GrammarFailed:
            return False

    @property
    def is_ready(self) -> bool:
        """Whether the next mask can be had without waiting."""
        return self._words is not None or (self._pending is not None and self._pending[0].done())

    def accept(self, token_id: int) -> None:
        """Go on by one token of the row: each emitted token exactly once, EOS included.

        Raises:
            TokenNotAllowed: the grammar closes it. The state is as before.
            GrammarFailed: the grammar grew beyond a limit.
        """
        self._settle()
        if self.is_terminated:
            raise TokenNotAllowed(token_id, "the row is over")
        if not 0 <= token_id < self._vocabulary.num_tokens:
            raise TokenNotAllowed(token_id, "the tokenizer has no such token")
        if self.is_free:
            self._accept_free(token_id)
        elif token_id in self._vocabulary.eos_ids:
            if not is_open(self.mask_words(), token_id):
                raise TokenNotAllowed(token_id, "the grammar is not satisfied")
            self._trail.append(_AS_END)
        elif self._takes_any:
            self._trail.append(_AS_ANY)
        else:
            self._accept_bound(token_id)
        self._words = None

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens.

        Raises:
            ValueError: fewer than so many were accepted.
            GrammarFailed: the grammar has failed before; it stays so.
        """
        if type(num_tokens) is not int or not 0 <= num_tokens <= len(self._trail):
            raise ValueError(f"num_tokens is {num_tokens!r}; it must be an integer from 0 to {len(self._trail)}")
        if not num_tokens:
            return
        self._settle()
        undone = self._trail[-num_tokens:]
        num_bound = undone.count(_BY_GRAMMAR)
        if num_bound and not self._matcher.rollback(num_bound):
            raise GrammarFailed("it could not be rolled back")
        states = [state for state in undone if state >= 0]
        if states:
            self._free = states[0]
            self._num_free -= len(states)
        del self._trail[-num_tokens:]
        self._words = None

    def start(self) -> None:
        """Start computing the next mask in a worker thread; `start_masks` does it for many rows at once."""
        start_masks((self,))

    def mask_words(self) -> NDArray[np.uint32]:
        """Return the mask of the next token; see `TokenBitmask`. A row that is over keeps its EOS open."""
        self._settle()
        if self._words is None:
            if self._needs_matcher:
                self._take(self._vocabulary.worker.compute((self._matcher,))[0])
            else:
                self._words = self._frozen(self._without_matcher())
        words = self._words
        assert words is not None, "a mask was computed"
        if not words.any():
            raise GrammarFailed("no token may follow")
        return words

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, whatever the model says; empty if there is a choice.

        They are not accepted. Costs more than a mask the first time in a state.
        """
        if not self._needs_matcher:
            return []
        self._settle()
        return self._matcher.compute_ff_tokens()

    def draft_masks(self, draft_ids: Sequence[int]) -> list[KnownBitmask]:
        """Return the masks along a draft: before its first token, and after each of them up to one that is closed.

        At most `len(draft_ids) + 1` masks; after a closed token, or EOS, there are none. The state is as before.

        Raises:
            GrammarFailed: no token may follow where the row stands now.
        """
        words = self.mask_words()
        masks = [KnownBitmask(words, only_ends=self.only_ends)]
        # A copy walks ahead, because a matcher that fails stays failed.
        ahead = self._fork()
        try:
            for token_id in draft_ids:
                if not is_open(words, token_id):
                    break
                ahead.accept(token_id)
                if ahead.is_terminated:
                    break
                words = ahead.mask_words()
                masks.append(KnownBitmask(words, only_ends=ahead.only_ends))
        except (GrammarFailed, TokenNotAllowed):
            # The row may never come there; if it does, the mask fails again.
            pass
        return masks

    def _fork(self) -> GrammarController:
        fork = GrammarController(
            self._matcher.deep_copy(),
            self._vocabulary,
            self._prefix,
            free_limit=self._free_limit,
            takes_any=self._takes_any,
        )
        fork._num_free = self._num_free
        fork._free, fork._trail, fork._words = self._free, self._trail[-1:], self._words
        return fork

    @property
    def _needs_matcher(self) -> bool:
        return not (self.is_free or self.is_terminated or self._takes_any)

    @property
    def _is_spent(self) -> bool:
        """Whether a free row has no token left but the marker's."""
        return self._free_limit is not None and self._num_free >= self._free_limit

    def _accept_free(self, token_id: int) -> None:
        assert self._prefix is not None, "a free row has a marker"
        if token_id in self._vocabulary.eos_ids:
            raise TokenNotAllowed(token_id, "the free part has not ended")
        if self._is_spent and token_id not in self._prefix.leading(self._free):
            raise TokenNotAllowed(token_id, "the free part has reached its limit")
        if token_id in self._prefix.closed(self._free):
            raise TokenNotAllowed(token_id, "it goes on past the marker of the free part")
        before, self._free = self._free, self._prefix.step(self._free, token_id)
        self._num_free += 1
        self._trail.append(before)

    def _accept_bound(self, token_id: int) -> None:
        # Not by the mask: where text is forced it opens one spelling only, and known tokens may have another.
        if self._matcher.try_consume_tokens([token_id]) != 1:
            check_alive(self._matcher)
            raise TokenNotAllowed(token_id, "the grammar closes it")
        self._trail.append(_BY_GRAMMAR)

    def _without_matcher(self) -> NDArray[np.uint32]:
        vocabulary = self._vocabulary
        if self.is_terminated:
            return vocabulary.ends.copy()
        if self._takes_any and not self.is_free:
            return vocabulary.written | vocabulary.ends
        assert self._prefix is not None, "a free row has a marker"
        if self._is_spent:
            return mask_of(self._prefix.leading(self._free), 32 * vocabulary.ends.size)
        words = vocabulary.written & ~vocabulary.ends
        for token_id in self._prefix.closed(self._free):
            word, bit = divmod(token_id, 32)
            words[word] &= 0xFFFFFFFF ^ (1 << bit)
        return words

    def _settle(self) -> None:
        """Wait for a mask that is being computed: until then the matcher belongs to the worker."""
        if self._pending is None:
            return
        future, row = self._pending
        self._pending = None
        self._take(future.result()[row])

    def _take(self, words: NDArray[np.uint32]) -> None:
        check_alive(self._matcher)
        ends = self._vocabulary.ends[: words.size]
        bound = words & self._vocabulary.written[: words.size] & ~ends
        # EOS may have a text that fits the grammar, but ends a row only where the grammar may end, or names it.
        may_end = self._matcher.is_accepting() or not bound.any()
        self._words = self._frozen(bound | (words & ends) if may_end else bound)

    def _frozen(self, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        whole = self._vocabulary.ends.copy()
        whole[words.size :] = 0
        whole[: words.size] = words
        whole.flags.writeable = False
        return whole

    def take_over(self) -> LLMatcher | None:
        """Return the matcher if a mask has to be computed; for `start_masks`."""
        if self._words is not None or self._pending is not None or not self._needs_matcher:
            return None
        return self._matcher

    def wait_on(self, masks: Future[NDArray[np.uint32]], row: int) -> None:
        """Take the next mask from row `row` of a worker's result; for `start_masks`."""
        self._pending = masks, row

    @property
    def worker(self) -> MaskWorker:
        """The worker that computes this row's masks."""
        return self._vocabulary.worker


def start_masks(controllers: Iterable[GrammarController]) -> None:
    """Start computing the next masks of all these rows in a worker thread, and return at once.

    Call it when the step's tokens are accepted and before the forward pass is built, so that masks and forward run side
    by side. Rows whose mask is there, or needs no computing, are left alone.
    """
    by_worker: dict[int, list[tuple[GrammarController, LLMatcher]]] = {}
    for controller in controllers:
        matcher = controller.take_over()
        if matcher is not None:
            by_worker.setdefault(id(controller.worker), []).append((controller, matcher))
    for pairs in by_worker.values():
        masks = pairs[0][0].worker.start([matcher for _, matcher in pairs])
        for row, (controller, _) in enumerate(pairs):
            controller.wait_on(masks, row)


def is_open(words: NDArray[np.uint32], token_id: int) -> bool:
    """Whether a mask opens a token."""
    word, bit = divmod(token_id, 32)
    return 0 <= word < words.size and bool(int(words[word]) >> bit & 1)


def mask_of(token_ids: Iterable[int], size: int) -> NDArray[np.uint32]:
    """Return the mask of so many words that opens these ids."""
    import numpy as np

    words = np.zeros(-(-size // 32), np.uint32)
    ids = np.fromiter((one for one in token_ids if one < size), np.int64)
    np.bitwise_or.at(words, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
    return words

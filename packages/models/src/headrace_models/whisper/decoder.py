"""Whisper's text decoder over rows of different lengths: causal self-attention, then attention to the audio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
from attrs import define

from headrace_models.whisper.blocks import FeedForward, merge_heads, split_heads
from headrace_models.whisper.caches import AudioKeys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headrace_models.layers import Embedding, LayerNorm, Projection
    from headrace_models.whisper.caches import DecoderState, TokenKeys
    from headrace_models.whisper.host import Attend

__all__ = ["CrossAttention", "DecoderBlock", "SelfAttention", "TextDecoder"]


@define
class SelfAttention:
    """Attention over a row's own tokens."""

    norm: LayerNorm
    query_key_value: Projection
    out: Projection
    num_heads: int

    def __call__(self, x: mx.array, cache: TokenKeys, ends: Sequence[int], mask: mx.array | None) -> mx.array:
        queries, keys, values = (
            split_heads(part, self.num_heads) for part in mx.split(self.query_key_value(self.norm(x)), 3, axis=-1)
        )
        keys, values = cache.append(keys, values, ends)
        scale = queries.shape[-1] ** -0.5
        return self.out(
            merge_heads(mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask))
        )

    def arrays(self) -> Iterator[mx.array]:
        for part in (self.norm, self.query_key_value, self.out):
            yield from part.arrays()


@define
class CrossAttention:
    """Attention to the audio of a row's window, whose keys and values are made once."""

    norm: LayerNorm
    query: Projection
    key_value: Projection
    out: Projection
    num_heads: int
    attend: Attend

    def audio_keys(self, features: mx.array) -> tuple[mx.array, mx.array]:
        """Make keys and values `(G, H, N, D)` of features `(G, N, state)`."""
        keys, values = mx.split(self.key_value(features), 2, axis=-1)
        # Laid out as they are read: a view would be copied by every step's products.
        return mx.contiguous(split_heads(keys, self.num_heads)), mx.contiguous(split_heads(values, self.num_heads))

    def __call__(self, x: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        queries = self._queries(x, keys.shape[0])
        attended = self.attend(queries, keys, values)
        # (G, H, candidates * T, D) back to a row per candidate.
        groups, heads, _, size = attended.shape
        attended = attended.reshape(groups, heads, -1, x.shape[1], size).swapaxes(1, 2)
        return self.out(merge_heads(attended.reshape(x.shape[0], heads, x.shape[1], size)))

    def scores(self, x: mx.array, keys: mx.array, heads: Sequence[int]) -> mx.array:
        """Return scaled scores `(G, len(heads), T, N)` float32 of some heads, with one row per window."""
        picked = mx.array(list(heads))
        queries = self._queries(x, keys.shape[0])[:, picked]
        found = queries @ keys[:, picked].swapaxes(-1, -2)
        return found.astype(mx.float32) * queries.shape[-1] ** -0.5

    def _queries(self, x: mx.array, num_groups: int) -> mx.array:
        """All candidates of a window ask its audio at once: `(G, H, candidates * T, D)`."""
        return split_heads(self.query(self.norm(x)).reshape(num_groups, -1, x.shape[-1]), self.num_heads)

    def arrays(self) -> Iterator[mx.array]:
        for part in (self.norm, self.query, self.key_value, self.out):
            yield from part.arrays()


@define
class DecoderBlock:
    """Tokens, audio, feed-forward."""

    self_attention: SelfAttention
    cross_attention: CrossAttention
    feed_forward: FeedForward

    def arrays(self) -> Iterator[mx.array]:
        for part in (self.self_attention, self.cross_attention, self.feed_forward):
            yield from part.arrays()


@define
class TextDecoder:
    """From tokens and audio keys to hidden states and logits."""

    embedding: Embedding
    positions: mx.array
    """`(text_context, state)`."""
    blocks: tuple[DecoderBlock, ...]
    norm: LayerNorm

    def audio_keys(self, features: mx.array) -> AudioKeys:
        """Make the keys and values of windows' features `(G, N, state)`."""
        return AudioKeys(tuple(block.cross_attention.audio_keys(features) for block in self.blocks))

    def forward(
        self,
        ids: mx.array,
        state: DecoderState,
        *,
        lengths: Sequence[int] | None = None,
        heads: Mapping[int, Sequence[int]] | None = None,
        scores: list[mx.array] | None = None,
    ) -> mx.array:
        """Feed tokens and move the rows' ends.

        Args:
            ids: `(R, T)`, padded on the right.
            state: of R rows.
            lengths: how many of each row's tokens are real; None means all. Of 0, the row stands still.
            heads: heads by layer whose scores are wanted.
            scores: gets per layer of `heads` an array `(G, heads, T, N)`.

        Returns:
            Hidden states `(R, T, state)`, to be given to `logits`.
        """
        count = ids.shape[1]
        ends = list(state.ends)
        positions = mx.array(ends)[:, None] + mx.arange(count)
        # What is padded may lie past the last position; its result is never used.
        x = self.embedding(ids) + self.positions[mx.minimum(positions, self.positions.shape[0] - 1)]
        mask = _mask(positions, ends)
        for index, (block, tokens, audio) in enumerate(zip(self.blocks, state.tokens, state.audio.layers, strict=True)):
            x = x + block.self_attention(x, tokens, ends, mask)
            if heads is not None and scores is not None and index in heads:
                scores.append(block.cross_attention.scores(x, audio[0], heads[index]))
            x = x + block.cross_attention(x, *audio)
            x = x + block.feed_forward(x)
        state.ends = (
            [end + count for end in ends] if lengths is None else list(map(sum, zip(ends, lengths, strict=True)))
        )
        return self.norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """Score `(..., state)` against every token: `(..., V)` float32."""
        return self.embedding.project(hidden).astype(mx.float32)

    def arrays(self) -> Iterator[mx.array]:
        """The arrays that hold its weights."""
        yield from self.embedding.arrays()
        yield self.positions
        for block in self.blocks:
            yield from block.arrays()
        yield from self.norm.arrays()


def _mask(positions: mx.array, ends: Sequence[int]) -> mx.array | None:
    """Return which columns each position sees, `(R, 1, T, C)`; None when all see all."""
    count = positions.shape[1]
    if count == 1 and min(ends) == max(ends):
        return None
    columns = mx.arange(max(ends) + count)
    return (columns <= positions[..., None])[:, None]

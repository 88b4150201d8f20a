"""What the scheduling package asks of its neighbours, as protocols fitted by shape.

`headrace_models` provides a `RuntimeModel` and a `TextCodec`; `MlxStepRunner` is the `StepRunner` of a real
engine; `EnginePort` has two transports. Tests bring fakes for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio

    import mlx.core as mx

    from headrace_kvcache import PrefixNamespace
    from headrace_sampling import GrammarState
    from headrace_scheduling.messages import EngineInfo, EngineMessage, EngineStatus, StepEvents
    from headrace_scheduling.steps import CacheTraits, RowId, RowOpening, SharedPrefix, Snapshot, Step, StepResult


class ModelFacts(Protocol):
    """Facts of a model's configuration that the engine needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def max_positions(self) -> int: ...


class RowContext(Protocol):
    """What one row adds to the forward input (rulings G-31): adapters and media, in later issues."""

    @property
    def indivisible_prefill(self) -> bool: ...


class RuntimeModel(Protocol):
    """A language model as the engine runs it. B rows, T positions, D hidden size, V vocabulary."""

    @property
    def config(self) -> ModelFacts: ...
    @property
    def weights_bytes(self) -> int: ...

    def make_cache(self) -> list[Any]:
        """Make one fresh, empty single-row cache per cache-owning layer; it costs no memory."""
        ...

    def forward_hidden(self, ids: mx.array, caches: Sequence[Any], *, context: object | None = None) -> mx.array:
        """Append `ids (B, T) int32` to the caches and return the hidden states `(B, T, D)`, before the head."""
        ...

    def forward_embeddings(
        self,
        embeddings: mx.array,
        caches: Sequence[Any],
        *,
        ids: mx.array | None = None,
        context: object | None = None,
    ) -> mx.array:
        """As `forward_hidden`, from embeddings `(B, T, D)`."""
        ...

    def logits_from_hidden(self, hidden: mx.array) -> mx.array:
        """Project `(B, T, D)` to logits `(B, T, V)`."""
        ...

    def row_context(self, *, adapters: Sequence[str] = (), media: object | None = None) -> RowContext | None:
        """Make a row's forward input at admission; None for plain text. Raises ValueError for what it lacks."""
        ...

    def batch_context(self, rows: Sequence[RowContext | None]) -> object | None:
        """Combine the rows' inputs whenever rows join or leave; None when all are plain text."""
        ...


class TokenDecoder(Protocol):
    """Turns one row's token ids into text as they come, O(1) per token."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that became final; never a half character."""
        ...

    def flush(self) -> str:
        """Return held text at the end of the row; bytes that never became a character are dropped."""
        ...


class TextCodec(Protocol):
    """Text and token ids, as the engine needs them."""

    def encode(self, text: str) -> list[int]: ...
    def new_decoder(self) -> TokenDecoder: ...


class LoadedModel(Protocol):
    """What a loader returns, on the engine's thread."""

    @property
    def model(self) -> RuntimeModel: ...
    @property
    def codec(self) -> TextCodec: ...
    @property
    def identity(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def representation(self) -> str: ...


GrammarCompiler = Callable[[LoadedModel, Any], "GrammarState"]
"""Compiles what a request's `grammar` says for a loaded model; called on a worker thread of the engine."""

ModelLoader = Callable[[], LoadedModel]
"""Picklable; called once on the engine's thread, because a lazy array belongs to the thread that made it."""


class StepRunner(Protocol):
    """Runs steps on the device. `dispatch` only enqueues; `collect` reads the tokens of the oldest dispatched step.

    At most two steps are in flight, so that the device works on step n+1 while the host reads step n. Before a step
    with openings or snapshots is dispatched, `seat` and `copy` were called for each of them.
    """

    def seat(self, opening: RowOpening) -> None:
        """Give a row a slot, with a copy of what it begins with. Raises if that row cannot be seated; others can."""
        ...

    def copy(self, snapshot: Snapshot) -> SharedPrefix:
        """Copy a row's first positions, those of dispatched steps included; it shares nothing with the slot."""
        ...

    def dispatch(self, step: Step) -> None:
        """Build and enqueue a step's forwards."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and read its tokens: the one synchronisation of a step."""
        ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def traits(self) -> CacheTraits:
        """What the model's slots can do."""
        ...

    @property
    def serial_reasons(self) -> tuple[str, ...]:
        """Codes of what forbids that rows share steps; empty if they do."""
        ...

    def slot_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a slot for so many positions."""
        ...

    def release(self, row_id: RowId) -> None:
        """Free a row's slot. The row may still be in a dispatched step; its writes there are harmless."""
        ...

    def reset(self) -> None:
        """Drop every row and buffer after a failure."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of slot buffers allocated now."""
        ...


class PrefixHit(Protocol):
    """A stored prefix: `headrace_kvcache.PrefixHit`."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def caches(self) -> Sequence[Any]: ...
    def release(self) -> None:
        """Unpin what the caches share with the store."""
        ...


class PrefixStore(Protocol):
    """Stored prefixes of prompts: `headrace_kvcache.PrefixCache`, or a fake. Used on the engine's thread."""

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        ...

    def peek(self, tokens: Sequence[int], *, namespace: PrefixNamespace | None) -> int:
        """Return how many tokens `take` would give; no side effects."""
        ...

    def take(
        self, tokens: Sequence[int], *, namespace: PrefixNamespace | None, session_id: str | None = None
    ) -> PrefixHit | None:
        """Return the longest stored prefix, never all of `tokens`; it stays stored."""
        ...

    def held(self, tokens: Sequence[int], *, namespace: PrefixNamespace | None) -> int:
        """Return how many first tokens of these `put` may leave out, because an entry holds them; no side effects."""
        ...

    def put(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        *,
        namespace: PrefixNamespace | None,
        session_id: str | None = None,
        first: int = 0,
    ) -> bool:
        """Store caches that hold exactly `tokens`, or all but the `first` ones; whether they were kept."""
        ...


class EnginePort(Protocol):
    """The engine as the serving process sees it: messages in, `StepEvents` out. All calls are thread-safe."""

    def start(self, on_events: Callable[[StepEvents], None], *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the engine and return at once.

        Args:
            on_events: called once per step, on a thread of the port or on `loop`.
            loop: a running loop on which the port may read what its engine sends, which saves a thread's waking up for
                every step.
        """
        ...

    def send(self, message: EngineMessage) -> None:
        """Hand over a message; never blocks on the engine.

        Raises:
            EngineUnavailable: for `Submit`, `Exclusive` and `Prepare` while no engine can take them.
        """
        ...

    @property
    def info(self) -> EngineInfo | None:
        """Facts of the loaded engine; None until it is first ready."""
        ...

    @property
    def status(self) -> EngineStatus:
        """The last published status."""
        ...

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the engine; every outstanding request gets its end. Idempotent.

        Args:
            timeout_s: after which the engine is ended as it stands; None takes `EngineConfig.stop_timeout_s`.
        """
        ...

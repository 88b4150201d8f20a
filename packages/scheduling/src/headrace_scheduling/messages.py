"""Messages across the engine port. All are frozen, picklable and hold no arrays (design D4)."""

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen

from headrace_scheduling.errors import EngineGone, EngineUnavailable
from headrace_scheduling.events import RowEnd, TextDelta
from headrace_scheduling.requests import GenerationRequest

if TYPE_CHECKING:
    from headrace_sampling import TokenLogprobs

EngineState = Literal["loading", "ready", "draining", "restarting", "failed", "stopped"]


# ---- to the engine -------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Submit:
    """Queue one generation. `max_tokens` is the placement's clamped limit; `serial` runs it while nothing else does."""

    request_id: int
    request: GenerationRequest
    max_tokens: int
    serial: bool = False


@frozen
class Cancel:
    """End a generation at the next step boundary, wherever it is."""

    request_id: int


@frozen
class Prefetch:
    """Hint that a prompt will be submitted soon, so that a cold prefix can be read ahead. May be ignored."""

    prompt_ids: tuple[int, ...]


@frozen
class Exclusive:
    """Run a named operation while no row runs: admission stops, running rows finish, it runs, admission resumes."""

    operation_id: int
    operation: object


@frozen
class Prepare:
    """Run a named operation that only reads weights, between two steps."""

    operation_id: int
    operation: object


@frozen
class Drain:
    """Admit nothing more; finish what is running and waiting."""


@frozen
class Stop:
    """End every row as cancelled and leave the loop at the next step boundary."""


EngineMessage = Submit | Cancel | Prefetch | Exclusive | Prepare | Drain | Stop


# ---- from the engine -----------------------------------------------------------------------------------------
# What is made anew for every step may be built by position, which `wire` does: names cost as much as the fields.


@frozen(kw_only=True)
class EngineInfo:
    """Facts of the loaded engine; constant until it restarts.

    Attributes:
        max_context: most positions a row can hold, prompt and reply together.
        max_rows: most rows in the running batch.
        weights_bytes: bytes of the weights as held in memory.
        device: for people, such as `cpu` or `gpu (Apple M4)`.
        representation: how the weights are held, such as `float32` or `4-bit, group 32`.
        identity: of artifact, tokenizer and implementation.
        pid: the process that holds the model.
        kv_scheme: how keys and values are stored, see `KVScheme.key`.
        serial_reasons: codes of what makes every request of this engine run alone; empty if rows share steps.
        prompt_cache_bytes: most bytes of stored prefixes; 0 if prefixes are not kept.
        kv_budget_bytes: most bytes of slots; None if they are not limited.
        has_grammar: whether requests may carry a grammar.
    """

    vocab_size: int
    max_context: int
    max_rows: int
    eos_token_ids: frozenset[int]
    weights_bytes: int
    device: str
    representation: str
    identity: str
    pid: int
    kv_scheme: str = "unquantized"
    serial_reasons: tuple[str, ...] = ()
    prompt_cache_bytes: int = 0
    kv_budget_bytes: int | None = None
    has_grammar: bool = False


@frozen
class EngineStatus:
    """The engine after one step: counts only, published as a whole.

    Attributes:
        num_steps, num_prompt_tokens, num_generated_tokens, num_submitted, num_finished, num_failed,
            num_cancelled: totals since the port was started; they go on growing when an engine is restarted. The
            four of requests count choices, each of which ends by itself.
        num_cached_tokens: total of prompt tokens that were not computed because a stored prefix held them.
        num_prefix_hits, num_prefix_misses: totals of rows that did, and did not, begin with a stored prefix.
        kv_bytes: bytes of slot buffers allocated now.
        kv_reserved_bytes: bytes of the KV budget that rows hold now; 0 without a budget.
        prefix_bytes: bytes of stored prefixes now.
        detail: why the state is what it is, for people; empty when ready.
    """

    state: EngineState
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_submitted: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_cached_tokens: int = 0
    num_prefix_hits: int = 0
    num_prefix_misses: int = 0
    kv_bytes: int = 0
    kv_reserved_bytes: int = 0
    prefix_bytes: int = 0
    num_restarts: int = 0
    detail: str = ""

    def refusal(self) -> EngineUnavailable:
        """Make the error of whoever asks for work in this state, unless it is ready."""
        error = EngineGone if self.state in ("failed", "stopped") else EngineUnavailable
        return error(f"the engine is {self.state}: {self.detail}" if self.detail else f"the engine is {self.state}")


@frozen
class RowEvents:
    """What one row did in a step. `end` comes exactly once per choice of a submitted request, in its last event.

    Attributes:
        prompt_logprobs: of the prompt's tokens after the first, once, with choice 0's first token, if asked for.
    """

    request_id: int
    choice: int = 0
    admitted: bool = False
    delta: TextDelta | None = None
    end: RowEnd | None = None
    prompt_logprobs: "tuple[TokenLogprobs, ...]" = ()


@frozen(kw_only=True)
class OperationResult:
    """The outcome of an `Exclusive` or `Prepare`. `error` is None on success."""

    operation_id: int
    value: object = None
    error: str | None = None


@frozen
class StepEvents:
    """Everything that leaves the engine for one step, all rows together.

    Attributes:
        info: set once, in the first event after the model loaded (and again after a restart).
    """

    status: EngineStatus
    rows: tuple[RowEvents, ...] = ()
    operations: tuple[OperationResult, ...] = field(default=())
    info: EngineInfo | None = None

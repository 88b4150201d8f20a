"""What the routes ask of the application that mounts them, as protocols fitted by shape.

The scheduling package is named in annotations only: importing this module needs no extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from headrace_sampling import TokenLogprobs
    from headrace_scheduling.events import Finished, RowEnd, TextDelta
    from headrace_scheduling.messages import EngineInfo, EngineStatus
    from headrace_scheduling.requests import GenerationPlacement, GenerationRequest, RequestShape

__all__ = [
    "ChatCodec",
    "Gateway",
    "GatewayCounts",
    "Generation",
    "ModelCard",
    "ModelRegistry",
    "ModelStats",
    "PreparedPrompt",
    "Readiness",
    "ReadinessStatus",
    "SamplingDefaults",
    "ServedConfig",
    "ServedModel",
]

ReadinessStatus = Literal["ready", "busy", "loading", "restarting", "draining", "failed", "stopped"]


# ---- a model that is served ----------------------------------------------------------------------------------


class PreparedPrompt(Protocol):
    """A chat rendered by the model's template and encoded."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def stable_boundary(self) -> int | None: ...
    @property
    def starts_in_reasoning(self) -> bool: ...


class ChatCodec(Protocol):
    """Template and tokenizer of one model. Safe to call from several threads."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Names of special tokens, such as `eos_token`, and their texts."""
        ...

    def template_source(self, *, with_tools: bool) -> str:
        """Return the text of the chat template that renders conversations with or without tools; empty without one."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the start token that is due unless `add_special_tokens` is false."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, special tokens left out, or by their names if `skip_special_tokens` is false."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; those of a special token's name."""
        ...

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> PreparedPrompt:
        """Render and encode a chat.

        Raises:
            ValueError: the template refuses these messages, or there is none.
        """
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Render a chat to the text that `prepare_chat` encodes. Raises as it does."""
        ...

    def remember(self, token_ids: Sequence[int]) -> None:
        """Remember a chat's prompt with the ids of its reply, so that the next turn's prompt repeats these very ids."""
        ...


class Generation(Protocol):
    """One running generation: an async iterator of coalesced text deltas of its choices, then how they ended."""

    def __aiter__(self) -> AsyncIterator[TextDelta]: ...

    @property
    def finished_choices(self) -> tuple[Finished, ...]:
        """How each choice ended; valid once the iteration is over."""
        ...

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One per prompt token after the first, if they were asked for; there from the first delta on."""
        ...

    @property
    def num_unread_tokens(self) -> int:
        """How many tokens wait to be iterated."""
        ...

    def end_of(self, choice: int, /) -> RowEnd | None:
        """Return how a choice ended; None while it runs. Nothing of it is iterated later."""
        ...

    async def aclose(self) -> None:
        """Cancel what still runs and wait until the engine has let the row go. Idempotent."""
        ...


class GatewayCounts(Protocol):
    """What a gateway tells of itself without asking the engine."""

    @property
    def num_outstanding(self) -> int: ...
    @property
    def max_outstanding(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def accepting(self) -> bool: ...
    @property
    def status(self) -> EngineStatus: ...
    @property
    def info(self) -> EngineInfo | None: ...


class Gateway(Protocol):
    """The part of `headrace_scheduling.GenerationGateway` that routes call."""

    def place(self, shape: RequestShape, /) -> GenerationPlacement: ...
    async def run(self, placement: GenerationPlacement, request: GenerationRequest, /) -> Generation: ...


@frozen(kw_only=True)
class ServedConfig:
    """Facts that validation needs: vocabulary size, and most positions of a row."""

    vocab_size: int
    max_context: int


@frozen(kw_only=True)
class SamplingDefaults:
    """What a request that names no value gets: the operator's, else the model's, else these."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@frozen(kw_only=True)
class ServedModel:
    """A leased model; valid while the lease is held.

    Attributes:
        created: Unix time in seconds.
        identity: of weights, tokenizer and implementation; its head is the `system_fingerprint`.
        max_tokens: the operator's limit for requests that name none; None runs to the end of the context.
    """

    name: str
    created: int
    gateway: Gateway
    codec: ChatCodec
    config: ServedConfig
    capabilities: frozenset[str] = frozenset({"chat", "completions"})
    sampling_defaults: SamplingDefaults = field(factory=SamplingDefaults)
    identity: str = ""
    max_tokens: int | None = None


# ---- the set of models ---------------------------------------------------------------------------------------


@frozen(kw_only=True)
class ModelCard:
    """One entry of `GET /v1/models`. `created` is Unix time in seconds; `max_context` in tokens, None if unknown."""

    name: str
    created: int
    owned_by: str = "headrace"
    max_context: int | None = None
    capabilities: frozenset[str] = frozenset({"chat", "completions"})


@frozen(kw_only=True)
class Readiness:
    """Whether a request sent now would be admitted, and why not.

    Attributes:
        status: `busy` means that the queue is full, which is no fault.
        detail: for people; empty when there is nothing to tell.
    """

    ready: bool
    status: ReadinessStatus
    detail: str = ""


@frozen(kw_only=True)
class ModelStats:
    """Counts of one model, as published by its engine; totals since it loaded."""

    name: str
    state: str
    num_outstanding: int = 0
    max_outstanding: int = 0
    max_rows: int = 0
    max_context: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_submitted: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_restarts: int = 0
    num_cached_tokens: int = 0
    num_prefix_hits: int = 0
    num_prefix_misses: int = 0
    kv_bytes: int = 0
    kv_budget_bytes: int | None = None
    kv_reserved_bytes: int = 0
    prefix_bytes: int = 0
    max_prefix_bytes: int = 0
    weights_bytes: int = 0
    device: str = ""
    representation: str = ""
    kv_scheme: str = ""


class ModelRegistry(Protocol):
    """The models of a server. Routes reach a model only through `lease`."""

    def lease(self, name: str | None, /) -> AbstractAsyncContextManager[ServedModel, Any]:
        """Hold a model for one request; None and `default_model` name the default one.

        Raises:
            ModelNotFound: nothing of this name is served.
            ModelUnavailable: it cannot be used now.
        """
        ...

    def cards(self) -> Sequence[ModelCard]:
        """Return the served models, the default one first."""
        ...

    def readiness(self) -> Readiness:
        """Answer from the last published status, without waiting."""
        ...

    def stats(self) -> Sequence[ModelStats]:
        """Answer from the last published status, without waiting."""
        ...

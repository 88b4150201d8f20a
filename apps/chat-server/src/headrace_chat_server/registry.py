"""The served model: one of it, behind the protocol that allows several."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from attrs import define, field

from headrace_chat_server.text_side import TextSide
from headrace_http_api.engine_stats import model_stats, readiness_of
from headrace_http_api.errors import ModelNotFound, ModelUnavailable
from headrace_http_api.ports import (
    ModelCard,
    ModelStats,
    Readiness,
    ServedConfig,
    ServedModel,
)

if TYPE_CHECKING:
    from headrace_scheduling import GenerationGateway

DEFAULT_NAME = "default_model"
"""The name under which every client reaches the default model."""


@define(kw_only=True)
class SingleModelRegistry:
    """Leases one model once its engine and its codec are there.

    Attributes:
        name: the served name.
        created: Unix time in seconds.
        max_tokens: reply limit of requests that name none; None runs to the end of the context.
    """

    name: str
    created: int
    gateway: "GenerationGateway"
    max_tokens: int | None = None
    _text_side: TextSide | None = field(default=None, init=False)

    def provide(self, text_side: TextSide) -> None:
        """Hand over the codec; from now on the model can be leased as soon as its engine is ready."""
        self._text_side = text_side

    @asynccontextmanager
    async def lease(self, name: str | None, /) -> AsyncGenerator[ServedModel, None]:
        """Hold the model for one request.

        Raises:
            ModelNotFound: nothing of this name is served.
            ModelUnavailable: it is still loading.
        """
        if name not in {None, DEFAULT_NAME, self.name}:
            raise ModelNotFound(name or "")
        yield self._served()

    def cards(self) -> Sequence[ModelCard]:
        """Return the one card."""
        info = self.gateway.stats().info
        return (
            ModelCard(name=self.name, created=self.created, max_context=None if info is None else info.max_context),
        )

    def readiness(self) -> Readiness:
        """Answer from the last published status."""
        readiness = readiness_of(self.gateway.stats())
        if readiness.ready and self._text_side is None:
            return Readiness(ready=False, status="loading", detail="the tokenizer is loading")
        return readiness

    def stats(self) -> Sequence[ModelStats]:
        """Answer from the last published status."""
        return (model_stats(self.name, self.gateway.stats()),)

    def _served(self) -> ServedModel:
        stats = self.gateway.stats()
        info = stats.info
        if stats.status.state == "failed":
            raise stats.status.refusal()
        if info is None or self._text_side is None:
            raise ModelUnavailable(f"the model {self.name!r} is {stats.status.state}; try again in a few seconds")
        return ServedModel(
            name=self.name,
            created=self.created,
            gateway=self.gateway,
            codec=self._text_side.codec,
            config=ServedConfig(vocab_size=info.vocab_size, max_context=info.max_context),
            sampling_defaults=self._text_side.sampling_defaults,
            identity=info.identity,
            max_tokens=self.max_tokens,
        )

"""What differs between the generating routes, and the parts of an answer that they share."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from attrs import frozen

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.generation_request import GenerationFields
from headrace_http_api.ports import ServedModel
from headrace_scheduling.events import Finished, GenerateStats

__all__ = ["Choice", "Dialect", "EncodedPrompt", "Envelope", "check_capability", "check_ids", "usage_body"]

RequestT = TypeVar("RequestT", bound=GenerationFields)

Choice = dict[str, object]


@frozen
class Envelope:
    """What every body and chunk of one answer repeats. `created` is Unix time in seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None

    def body(self, kind: str, choices: Sequence[Choice]) -> dict[str, object]:
        """Build a body of OpenAI's object `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


@frozen
class EncodedPrompt:
    """A prompt as the engine gets it.

    Attributes:
        stable_boundary: leading tokens that the next turn of the conversation will have too; None if unknown.
        is_chat: a later prompt may repeat this one with its reply as text, so the reply's ids are remembered.
    """

    ids: Sequence[int]
    stable_boundary: int | None = None
    is_chat: bool = False


class Dialect(Protocol[RequestT]):
    """One generating route: how it reads a request and how its answers look.

    Attributes:
        runs_template: `encode` runs a program of the model's, which may take long whatever the request's size.
    """

    runs_template: bool
    id_prefix: str
    object_name: str
    chunk_object_name: str
    unsupported: Mapping[str, tuple[Any, ...]]

    def read(self, body: Mapping[str, Any]) -> RequestT:
        """Validate a body.

        Raises:
            InvalidRequest: names the first field at fault.
        """
        ...

    def num_chars(self, request: RequestT) -> int:
        """Return how many characters of messages or prompt `encode` will work on at least."""
        ...

    def encode(self, served: ServedModel, request: RequestT) -> EncodedPrompt:
        """Return the prompt as token ids; may run in a worker thread.

        Raises:
            InvalidRequest: the prompt cannot be built.
        """
        ...

    def choice(self, text: str, finished: Finished) -> Choice:
        """Build the choice of a whole answer."""
        ...

    def head_choice(self) -> Choice | None:
        """Build the choice that opens a stream, if one does."""
        ...

    def delta_choice(self, text: str) -> Choice:
        """Build the choice that carries new text."""
        ...

    def last_choice(self, finished: Finished) -> Choice:
        """Build the choice that tells the end of a stream."""
        ...


def usage_body(stats: GenerateStats) -> dict[str, object]:
    """Build OpenAI's usage object."""
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_generated_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
    }


def check_capability(served: ServedModel, capability: str) -> None:
    """Refuse a route that this model does not serve.

    Raises:
        InvalidRequest: names what it serves.
    """
    if capability not in served.capabilities:
        offered = ", ".join(sorted(served.capabilities)) or "nothing"
        raise InvalidRequest(
            f"the model {served.name!r} does not serve {capability}; it serves {offered}",
            param="model",
            code="unsupported_model",
        )


def check_ids(ids: Sequence[int], served: ServedModel, param: str) -> None:
    """Refuse an empty prompt, and token ids outside the vocabulary.

    Raises:
        InvalidRequest: names the id.
    """
    if not ids:
        raise InvalidRequest(f"{param} gives no token; it must give at least one", param=param)
    vocab_size = served.config.vocab_size
    if max(ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidRequest(
            f"{param}[{index}] is {ids[index]}; token ids of this model lie between 0 and {vocab_size - 1}",
            param=f"{param}[{index}]",
        )

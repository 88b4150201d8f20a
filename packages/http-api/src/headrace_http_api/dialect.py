"""What differs between the generating routes."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from headrace_http_api.encoded import Choice, EncodedPrompt, Reply
from headrace_http_api.generation_request import GenerationFields
from headrace_http_api.ports import ServedModel
from headrace_http_api.running import Running
from headrace_scheduling.events import Finished, TextDelta

__all__ = ["ChoiceStream", "Dialect"]

RequestT = TypeVar("RequestT", bound=GenerationFields)


class ChoiceStream(Protocol):
    """Makes the choices that a stream's chunks carry, for one choice of the answer.

    Attributes:
        is_plain: each delta's text is one `text_choice`, and `push` need not be called.
    """

    @property
    def is_plain(self) -> bool: ...

    def head(self) -> Choice | None:
        """Build the choice that opens the stream, if one does."""
        ...

    def text_choice(self, text: str) -> Choice:
        """Build the choice that carries new text."""
        ...

    def push(self, delta: TextDelta) -> Sequence[Choice]:
        """Build the choices that a delta leads to."""
        ...

    def end(self, finished: Finished) -> Sequence[Choice]:
        """Build the last choices; the very last one tells the end."""
        ...


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
        """Return how many characters of messages or of the longest prompt `encode` will work on at least."""
        ...

    def encode(self, served: ServedModel, request: RequestT) -> Sequence[EncodedPrompt]:
        """Return the prompts as token ids; may run in a worker thread.

        Raises:
            InvalidRequest: a prompt cannot be built.
        """
        ...

    def choice(self, running: Running[RequestT], place: int, index: int, reply: Reply) -> Choice:
        """Build the choice of a whole reply to the prompt at `place`."""
        ...

    def open_stream(self, running: Running[RequestT], place: int, index: int) -> ChoiceStream:
        """Begin the stream of one choice for the prompt at `place`."""
        ...

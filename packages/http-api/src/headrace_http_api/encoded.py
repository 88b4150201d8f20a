"""A prompt and a reply between the routes and the engine, and what every body of one answer repeats."""

from collections.abc import Callable, Sequence

from attrs import frozen

from headrace_http_api.errors import InvalidRequest
from headrace_http_api.parsing.parts import OutputParser
from headrace_http_api.ports import ServedModel
from headrace_sampling import GrammarSpec
from headrace_sampling.token_logprobs import TokenLogprobs
from headrace_scheduling.events import Finished

__all__ = ["Choice", "EncodedPrompt", "Envelope", "Reply", "check_capability", "check_ids", "check_vocabulary"]

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


@frozen(kw_only=True)
class EncodedPrompt:
    """A prompt as the engine gets it.

    Attributes:
        text: what `echo` repeats; empty where nothing does.
        stable_boundary: leading tokens that the next turn of the conversation will have too; None if unknown.
        is_chat: a later prompt may repeat this one with its reply as text, so the reply's ids are remembered.
        grammar: what the reply must match; None for free text.
        grammar_param: the field that asked for the grammar.
        new_parser: makes what splits one choice's text into parts; None takes all of it for content.
    """

    ids: Sequence[int]
    text: str = ""
    stable_boundary: int | None = None
    is_chat: bool = False
    grammar: GrammarSpec | None = None
    grammar_param: str | None = None
    new_parser: Callable[[], OutputParser] | None = None


@frozen(kw_only=True)
class Reply:
    """One whole reply."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished


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
    check_vocabulary(ids, served, param)


def check_vocabulary(ids: Sequence[int], served: ServedModel, param: str) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        InvalidRequest: names the id.
    """
    vocab_size = served.config.vocab_size
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidRequest(
            f"{param}[{index}] is {ids[index]}; token ids of this model lie between 0 and {vocab_size - 1}",
            param=f"{param}[{index}]",
        )

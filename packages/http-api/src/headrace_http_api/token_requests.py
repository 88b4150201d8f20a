"""The bodies of `POST /tokenize`, `/detokenize` and `/apply-template`."""

from typing import Any

from attrs import frozen
from cattrs import Converter

from headrace_http_api.conversation_fields import ConversationFields, register_conversation_hooks
from headrace_http_api.errors import InvalidRequest
from headrace_http_api.json_body import shown
from headrace_http_api.messages import Messages
from headrace_http_api.validation import FieldError, make_converter

__all__ = [
    "TEMPLATE_UNSUPPORTED",
    "TOKENIZE_UNSUPPORTED",
    "ApplyTemplateRequest",
    "DetokenizeRequest",
    "TokenIds",
    "TokenizeRequest",
    "make_token_converter",
]

TokenIds = tuple[int, ...]

# They are looked at one by one, on the event loop.
MAX_IDS = 2**20

TEMPLATE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
}
TOKENIZE_UNSUPPORTED = TEMPLATE_UNSUPPORTED | {"parse_special": (True,)}


@frozen(kw_only=True)
class ApplyTemplateRequest(ConversationFields):
    """A conversation to render; `add_generation_prompt` opens the turn of the reply."""

    model: str | None = None
    add_generation_prompt: bool = True

    @property
    def template_kwargs(self) -> dict[str, object] | None:
        return {**(super().template_kwargs or {}), "add_generation_prompt": self.add_generation_prompt}


@frozen(kw_only=True)
class TokenizeRequest(ApplyTemplateRequest):
    """A text to encode, by vLLM's name or by llama.cpp's, or a conversation."""

    messages: Messages = ()
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool = False
    with_pieces: bool = False

    def check(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            InvalidRequest: names one of them.
        """
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) not in (None, ())]
        if not given:
            raise InvalidRequest("prompt is missing; give prompt, content or messages", param="prompt")
        if len(given) > 1:
            raise InvalidRequest(f"{given[1]} is given beside {given[0]}; give one of them", param=given[1])
        if self.add_special is not None and self.add_special_tokens not in (None, self.add_special):
            raise InvalidRequest("add_special contradicts add_special_tokens; give one of them", param="add_special")

    @property
    def text_param(self) -> str:
        """The name of the field that gives the text."""
        if self.messages:
            return "messages"
        return "prompt" if self.content is None else "content"

    @property
    def adds_special_tokens(self) -> bool:
        """Whether a start token is added; when nothing is said, as the server does that has this way to give text."""
        asked = self.add_special if self.add_special_tokens is None else self.add_special_tokens
        return self.prompt is not None if asked is None else asked

    @property
    def wants_pieces(self) -> bool:
        """Whether the tokens' own bytes are told."""
        return self.with_pieces or self.return_token_strs


@frozen(kw_only=True)
class DetokenizeRequest:
    """Token ids to decode."""

    tokens: TokenIds
    model: str | None = None


def make_token_converter() -> Converter:
    """Make the strict converter of these requests."""
    converter = make_converter()
    register_conversation_hooks(converter)
    converter.register_structure_hook_func(lambda kind: kind == TokenIds, _to_ids)
    return converter


def _to_ids(value: Any, _kind: type) -> TokenIds:
    if not isinstance(value, list):
        raise FieldError(f"is {shown(value)}; it must be a list of token ids")
    if len(value) > MAX_IDS:
        raise FieldError(f"has {len(value)} ids; at most {MAX_IDS} are taken: send them in parts")
    for index, entry in enumerate(value):
        if type(entry) is not int or entry < 0:
            raise FieldError(f"is {shown(entry)}; token ids are integers of at least 0", subpath=f"[{index}]")
    return tuple(value)

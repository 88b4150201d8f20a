"""`POST /v1/completions`."""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace_http_api.completion_request import CompletionRequest, make_completion_converter
from headrace_http_api.encoded import Choice, EncodedPrompt, Reply, check_capability, check_ids
from headrace_http_api.generation import answer
from headrace_http_api.logprob_bodies import CompletionPen
from headrace_http_api.ports import ServedModel
from headrace_http_api.running import Running
from headrace_http_api.services import ApiServices
from headrace_http_api.unsupported import COMPLETION_UNSUPPORTED
from headrace_http_api.validation import structure
from headrace_sampling.token_logprobs import TokenLogprobs
from headrace_scheduling.events import Finished, TextDelta

__all__ = ["CompletionDialect", "routes"]


class CompletionDialect:
    """Text completions as OpenAI shapes them; the prompt is used without a template."""

    runs_template = False
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    unsupported = COMPLETION_UNSUPPORTED

    def __init__(self) -> None:
        self._converter = make_completion_converter()

    def read(self, body: Mapping[str, Any]) -> CompletionRequest:
        return structure(self._converter, body, CompletionRequest)

    def num_chars(self, request: CompletionRequest) -> int:
        return request.longest_text

    def encode(self, served: ServedModel, request: CompletionRequest) -> Sequence[EncodedPrompt]:
        check_capability(served, "completions")
        is_list = len(request.prompt) > 1
        return [
            _encode(served, request, prompt, f"prompt[{index}]" if is_list else "prompt")
            for index, prompt in enumerate(request.prompt)
        ]

    def choice(self, running: Running[CompletionRequest], place: int, index: int, reply: Reply) -> Choice:
        stream = self.open_stream(running, place, index)
        delta = TextDelta(reply.text, reply.token_ids, reply.logprobs)
        return stream.end(reply.finished, delta)[0]

    def open_stream(self, running: Running[CompletionRequest], place: int, index: int) -> "CompletionStream":
        request = running.request
        pen = None if request.num_top_logprobs is None else CompletionPen(running.served.codec.token_bytes)
        return CompletionStream(running, place, index, pen, needs_echo=request.echo)


@define
class CompletionStream:
    """The choices of one completion; the first of them begins with the echoed prompt if that is wanted."""

    running: Running[CompletionRequest]
    place: int
    index: int
    pen: CompletionPen | None
    needs_echo: bool = field(kw_only=True)
    _entries: list[TokenLogprobs | None] = field(factory=list[TokenLogprobs | None], init=False)
    _token_ids: list[int] = field(factory=list[int], init=False)

    @property
    def is_plain(self) -> bool:
        return self.pen is None and not self.running.request.echo

    def head(self) -> Choice | None:
        return None

    def text_choice(self, text: str) -> Choice:
        return {"index": self.index, "text": text, "logprobs": None, "finish_reason": None}

    def push(self, delta: TextDelta) -> Sequence[Choice]:
        text = self._take(delta)
        if not text:
            # Held-back text is still to come; its log-probabilities go with it.
            return ()
        return (self.text_choice(text) | {"logprobs": self._write()},)

    def end(self, finished: Finished, delta: TextDelta | None = None) -> Sequence[Choice]:
        text = self._take(TextDelta("") if delta is None else delta)
        reason = "length" if self.running.request.drops_reply else finished.reason
        last = {"logprobs": self._write(), "finish_reason": reason, "stop_reason": finished.stop_string}
        return (self.text_choice(text) | last,)

    def _take(self, delta: TextDelta) -> str:
        echoed = self._echo() if self.needs_echo else ""
        if self.pen is not None:
            self._entries += delta.logprobs
            self._token_ids += delta.token_ids[: len(delta.logprobs)]
        return echoed + delta.text

    def _echo(self) -> str:
        self.needs_echo = False
        prompt = self.running.prompts[self.place]
        if self.pen is not None:
            self._entries += [None, *prompt.generation.prompt_logprobs]
            self._token_ids += prompt.prompt.ids
        return prompt.prompt.text

    def _write(self) -> dict[str, object] | None:
        if self.pen is None:
            return None
        body = self.pen.write(self._entries, self._token_ids)
        self._entries.clear()
        self._token_ids.clear()
        return body


def routes(services: ApiServices) -> Sequence[BaseRoute]:
    """Routes of text completions."""
    dialect = CompletionDialect()

    async def completions(request: Request) -> ASGIApp:
        return await answer(request, services, dialect)

    return [Route("/v1/completions", completions, methods=["POST"])]


def _encode(
    served: ServedModel, request: CompletionRequest, prompt: str | tuple[int, ...], param: str
) -> EncodedPrompt:
    is_text = isinstance(prompt, str)
    ids = served.codec.encode(prompt) if is_text else prompt
    check_ids(ids, served, param)
    text = "" if not request.echo else prompt if is_text else served.codec.decode(ids)
    asked = request.asked_grammar()
    if asked is None:
        return EncodedPrompt(ids=ids, text=text)
    return EncodedPrompt(ids=ids, text=text, grammar=asked.spec, grammar_param=asked.param)

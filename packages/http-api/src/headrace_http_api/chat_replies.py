"""Replies to a chat: whole messages, and the deltas of a stream."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from attrs import define, field

from headrace_http_api.encoded import Choice, Reply
from headrace_http_api.generation_request import GenerationFields
from headrace_http_api.logprob_bodies import TokenBytes, chat_body
from headrace_http_api.parsing.parts import (
    ContentDelta,
    OutputParser,
    ParsedReply,
    Part,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    parse_all,
)
from headrace_http_api.running import Running
from headrace_sampling.token_logprobs import TokenLogprobs
from headrace_scheduling.events import Finished, TextDelta

__all__ = ["ChatStream", "whole_choice"]

RequestT = TypeVar("RequestT", bound=GenerationFields)


def whole_choice(running: Running[RequestT], place: int, index: int, reply: Reply) -> Choice:
    """Build the choice of a whole reply."""
    new_parser = running.prompts[place].prompt.new_parser
    parser = None if new_parser is None else new_parser()
    parsed = ParsedReply(reply.text, "", ()) if parser is None else parse_all(parser, reply.text)
    logprobs = None
    if running.request.num_top_logprobs is not None:
        logprobs = chat_body(reply.logprobs, running.served.codec.token_bytes)
    has_calls = bool(parsed.tool_calls)
    return {
        "index": index,
        "message": _message(parsed),
        "logprobs": logprobs,
        **_end(reply.finished, has_calls=has_calls),
    }


@define
class ChatStream:
    """The choices of one reply's stream.

    Attributes:
        parser: splits the text into parts; None takes all of it for content.
        token_bytes: for log-probabilities; None sends none.
    """

    index: int
    parser: OutputParser | None
    token_bytes: TokenBytes | None
    _logprobs: list[TokenLogprobs] = field(factory=list[TokenLogprobs], init=False)
    _has_calls: bool = field(default=False, init=False)

    @classmethod
    def of(cls, running: Running[RequestT], place: int, index: int) -> "ChatStream":
        """Begin the stream of one choice."""
        new_parser = running.prompts[place].prompt.new_parser
        wants_logprobs = running.request.num_top_logprobs is not None
        return cls(
            index,
            None if new_parser is None else new_parser(),
            running.served.codec.token_bytes if wants_logprobs else None,
        )

    @property
    def is_plain(self) -> bool:
        return self.parser is None and self.token_bytes is None

    def head(self) -> Choice | None:
        return self._choice({"role": "assistant", "content": ""})

    def text_choice(self, text: str) -> Choice:
        return self._choice({"content": text})

    def push(self, delta: TextDelta) -> Sequence[Choice]:
        self._logprobs += delta.logprobs
        if self.parser is None:
            return self._choices([ContentDelta(delta.text)] if delta.text else ())
        return self._choices(self.parser.push(delta.text) if delta.text else ())

    def end(self, finished: Finished) -> Sequence[Choice]:
        choices = self._choices(() if self.parser is None else self.parser.flush())
        last = self._choice({}) | _end(finished, has_calls=self._has_calls)
        if self._logprobs:
            last["logprobs"] = self._take_logprobs()
        return [*choices, last]

    def _choices(self, parts: Iterable[Part]) -> list[Choice]:
        choices: list[Choice] = []
        for part in parts:
            self._has_calls = self._has_calls or isinstance(part, ToolCallStart)
            body = _delta(part)
            if body is not None:
                choices.append(self._choice(body))
        if choices and self.token_bytes is not None:
            choices[0]["logprobs"] = self._take_logprobs()
        return choices

    def _take_logprobs(self) -> dict[str, object] | None:
        if self.token_bytes is None:
            return None
        body = chat_body(self._logprobs, self.token_bytes)
        self._logprobs.clear()
        return body

    def _choice(self, delta: Choice) -> Choice:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(part: Part) -> Choice | None:
    match part:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning(text)
        case ToolCallStart(index, call_id, name):
            call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case ToolArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case ToolCallEnd():
            return None


def _reasoning(text: str) -> Choice:
    # The first is how most servers call it, the second how mlx_lm.server does.
    return {"reasoning_content": text, "reasoning": text}


def _message(reply: ParsedReply) -> Choice:
    # A message that only calls tools has no content, not an empty one.
    content = reply.content if reply.content or not reply.tool_calls else None
    message: Choice = {"role": "assistant", "content": content, "refusal": None}
    if reply.reasoning:
        message |= _reasoning(reply.reasoning)
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


def _end(finished: Finished, *, has_calls: bool) -> Choice:
    # A reply that reached its limit may end inside a call.
    reason = "tool_calls" if has_calls and finished.reason == "stop" else finished.reason
    return {"finish_reason": reason, "stop_reason": finished.stop_string}

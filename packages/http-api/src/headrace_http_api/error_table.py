"""One table from exceptions to HTTP status and body, in OpenAI's error envelope."""

import logging
import traceback
from collections.abc import Mapping
from http import HTTPStatus

from attrs import field, frozen

from headrace_http_api.errors import ApiError

__all__ = ["ERROR_RULES", "INTERNAL", "ErrorReply", "ErrorRule", "envelope", "reply_to", "rule_of"]

_log = logging.getLogger(__name__)


@frozen
class ErrorRule:
    """How one kind of error is told to the client.

    Attributes:
        retry_after_s: value of the Retry-After header; None sends none.
        param: the field at fault, where the exception itself names none.
    """

    status: int
    type: str
    code: str | None
    retry_after_s: int | None = None
    param: str | None = None


INTERNAL = ErrorRule(500, "server_error", "internal_error")

_REQUEST = "invalid_request_error"

# Keyed by root package and class name, so that this module loads without the packages that raise them.
ERROR_RULES: Mapping[str, ErrorRule] = {
    "headrace_http_api.ApiError": INTERNAL,
    "headrace_http_api.InvalidRequest": ErrorRule(400, _REQUEST, "invalid_value"),
    "headrace_http_api.UnsupportedParameter": ErrorRule(400, _REQUEST, "unsupported_parameter"),
    "headrace_http_api.PayloadTooLarge": ErrorRule(413, _REQUEST, "payload_too_large"),
    "headrace_http_api.UnsupportedMediaType": ErrorRule(415, _REQUEST, "unsupported_media_type"),
    "headrace_http_api.SessionClosed": ErrorRule(409, _REQUEST, "session_closed"),
    "headrace_http_api.TooManySessions": ErrorRule(429, "rate_limit_error", "too_many_sessions", 5),
    "headrace_http_api.NotAuthenticated": ErrorRule(401, "authentication_error", "invalid_api_key"),
    "headrace_http_api.Forbidden": ErrorRule(403, "permission_error", "forbidden"),
    "headrace_http_api.NotFound": ErrorRule(404, _REQUEST, "not_found"),
    "headrace_http_api.ModelNotFound": ErrorRule(404, _REQUEST, "model_not_found"),
    "headrace_http_api.ModelUnavailable": ErrorRule(503, "server_error", "model_unavailable", 5),
    "headrace_http_api.ClientDisconnected": ErrorRule(499, _REQUEST, "client_disconnected"),
    "headrace_scheduling.SchedulingError": INTERNAL,
    "headrace_scheduling.GatewayClosed": ErrorRule(503, "server_error", "server_draining", 5),
    "headrace_scheduling.QueueFull": ErrorRule(429, "rate_limit_error", "queue_full", 1),
    "headrace_scheduling.EngineUnavailable": ErrorRule(503, "server_error", "engine_unavailable", 5),
    "headrace_scheduling.EngineGone": ErrorRule(503, "server_error", "engine_unavailable"),
    "headrace_scheduling.EngineFailed": ErrorRule(500, "server_error", "engine_failed"),
    "headrace_scheduling.DeadlineExceeded": ErrorRule(504, "server_error", "deadline_exceeded"),
    "headrace_scheduling.ContextOverBudget": ErrorRule(400, _REQUEST, "context_length_exceeded"),
    "headrace_scheduling.RequestRefused": ErrorRule(400, _REQUEST, "request_refused"),
    "headrace_scheduling.GenerationCancelled": ErrorRule(503, "server_error", "generation_cancelled", 1),
    "headrace_sampling.SamplingError": INTERNAL,
    "headrace_sampling.BatchMismatch": INTERNAL,
    "headrace_sampling.InvalidSamplingParams": ErrorRule(400, _REQUEST, "invalid_value"),
    "headrace_sampling.InvalidGrammar": ErrorRule(400, _REQUEST, "invalid_grammar"),
    "headrace_sampling.GrammarUnavailable": ErrorRule(400, _REQUEST, "grammar_unavailable"),
    "headrace_sampling.GrammarFailed": INTERNAL,
    "headrace_sampling.TokenNotAllowed": INTERNAL,
    "headrace_sampling.InvalidDrafts": INTERNAL,
    "headrace_models.AudioError": ErrorRule(400, _REQUEST, "invalid_audio", param="file"),
    "headrace_models.AudioTooLarge": ErrorRule(413, _REQUEST, "payload_too_large", param="file"),
    "headrace_models.InvalidTranscribeOption": ErrorRule(400, _REQUEST, "invalid_value"),
    "headrace_models.UnknownLanguage": ErrorRule(400, _REQUEST, "invalid_value", param="language"),
    "headrace_models.VoiceDetectorMissing": ErrorRule(400, _REQUEST, "vad_unavailable", param="vad"),
    "headrace_models.TranscriptionError": INTERNAL,
    "headrace_models.TranscriptionQueueFull": ErrorRule(429, "rate_limit_error", "queue_full", 1),
    "headrace_models.TranscriptionUnavailable": ErrorRule(503, "server_error", "model_unavailable", 5),
    "headrace_models.TranscriberClosed": ErrorRule(503, "server_error", "server_draining", 5),
    "headrace_models.TranscriptionCancelled": ErrorRule(503, "server_error", "transcription_cancelled", 1),
    "headrace_models.TranscriptionFailed": ErrorRule(500, "server_error", "transcription_failed"),
}


@frozen
class ErrorReply:
    """A status, a JSON body and extra headers."""

    status: int
    body: dict[str, object]
    headers: dict[str, str] = field(factory=dict)


def rule_of(exc: BaseException) -> ErrorRule:
    """Find the rule of an exception by its class, then by its nearest base that has one."""
    for cls in type(exc).__mro__:
        rule = ERROR_RULES.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if rule is not None:
            return rule
    return INTERNAL


def envelope(
    message: str, *, kind: str = _REQUEST, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """Build OpenAI's error body; `kind` is its `type`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def reply_to(exc: Exception, request_id: str) -> ErrorReply:
    """Answer an exception; one that is nobody's intent is logged here, once, without its message.

    An unexpected exception's message may quote a prompt, so only its type and frames are logged, and the client
    gets the request id to ask about.
    """
    rule = rule_of(exc)
    if rule is INTERNAL:
        frames = "".join(traceback.format_tb(exc.__traceback__))
        _log.error("request %s failed with %s at\n%s", request_id, type(exc).__qualname__, frames)
        message = f"the server failed while it handled request {request_id}; its log tells where"
        return ErrorReply(rule.status, envelope(message, kind=rule.type, code=rule.code))
    headers = {} if rule.retry_after_s is None else {"retry-after": str(rule.retry_after_s)}
    if rule.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    message, param, code = _facts(exc)
    return ErrorReply(
        rule.status, envelope(message, kind=rule.type, param=param or rule.param, code=code or rule.code), headers
    )


def _facts(exc: Exception) -> tuple[str, str | None, str | None]:
    if isinstance(exc, ApiError):
        return exc.message, exc.param, exc.code
    # InvalidSamplingParams names its field; the others name none.
    field_name = getattr(exc, "field", None)
    return str(exc), field_name if isinstance(field_name, str) else None, None

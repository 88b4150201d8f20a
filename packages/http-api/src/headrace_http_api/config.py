"""Settings of the HTTP border. The application builds them; nothing here reads the environment."""

from attrs import field, frozen, validators

__all__ = ["LOOPBACK_HOSTS", "ApiConfig"]

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")

_STRINGS = validators.deep_iterable(validators.and_(validators.instance_of(str), validators.min_len(1)))


@frozen(kw_only=True)
class ApiConfig:
    """Limits and access rules.

    Attributes:
        api_keys: any of them opens the API; none leaves it open. `/health` and `/ready` are always open.
        allowed_origins: browser origins such as `https://chat.example` that may call; `*` allows every one.
        allowed_hosts: host names accepted in the Host header; None accepts any. A server bound to loopback
            passes `LOOPBACK_HOSTS`, so that a page cannot reach it through a DNS name that it controls.
        max_body_bytes: a larger body is refused with 413.
        max_audio_bytes: the same for the paths below `/v1/audio/`.
        keep_alive_s: after so many silent seconds a stream sends a comment, so that neither proxies nor clients take a
            long prefill for a dead connection; 0 sends none.
        stall_timeout_s: a stream whose client has read nothing for so long is dropped.
        max_unread_tokens: a stream is dropped when more tokens than these wait for a client that is behind.
    """

    api_keys: tuple[str, ...] = field(default=(), validator=_STRINGS, repr=False)
    allowed_origins: tuple[str, ...] = field(default=(), validator=_STRINGS)
    allowed_hosts: tuple[str, ...] | None = field(default=None, validator=validators.optional(_STRINGS))
    max_body_bytes: int = field(default=16 * 1024 * 1024, validator=validators.ge(1))
    keep_alive_s: float = field(default=10.0, validator=validators.ge(0))
    stall_timeout_s: float = field(default=60.0, validator=validators.gt(0))
    max_unread_tokens: int = field(default=4096, validator=validators.ge(1))
    max_audio_bytes: int = field(default=200 * 1024 * 1024, validator=validators.ge(1))

"""OpenAI's audio API: transcriptions, translations, and dictation that comes in pieces.

Needs no extra: nothing here imports scheduling or sampling. One module per noun: `fields` and `upload` (what a request
says and sends), `formats` and `replies` (what it gets), `endpoints` (the routes of one file); `session`, `speech`,
`transcripts`, `context`, `registry` and `session_endpoints` (a dictation that comes in pieces); `agreement`, `live`,
`live_fields` and `live_endpoint` (one that is told while it is spoken); `about` (a server of its own).
"""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from headrace_http_api.assembly import assemble
from headrace_http_api.audio.about import about_routes
from headrace_http_api.audio.endpoints import take_routes
from headrace_http_api.audio.live_endpoint import live_routes
from headrace_http_api.audio.registry import SessionRegistry
from headrace_http_api.audio.services import AudioServices
from headrace_http_api.audio.session_endpoints import session_routes

__all__ = ["AudioServices", "SessionRegistry", "create_audio_app", "routes"]


def routes(services: AudioServices) -> Sequence[BaseRoute]:
    """Every route of the audio API, to be mounted beside others."""
    return [*take_routes(services), *session_routes(services), *live_routes(services)]


def create_audio_app(services: AudioServices, *, pages: Sequence[BaseRoute] = ()) -> Starlette:
    """Build the ASGI application of a server that only transcribes.

    Args:
        services: what the routes answer from, with the limits and access rules; starting and closing the transcriber
            and closing the sessions are the caller's.
        pages: further routes, such as a web page.
    """
    return assemble([*routes(services), *about_routes(services), *pages], services.config)

"""The command line `headrace-transcribe`."""

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import version

from attrs import asdict

from headrace_transcription_server.errors import TranscriptionServerError, TranscriptionUnavailable
from headrace_transcription_server.settings import (
    TranscriptionSettings,
    flag_of,
    options,
    read_settings,
    variable_of,
)

EXIT_USAGE = 2
"""Exit code of everything that the person at the terminal has to change."""


def main(argv: Sequence[str] | None = None) -> int:
    """Read the settings, print them or start; return the exit code."""
    given = vars(make_parser().parse_args(argv))
    flags = {name: given[name] for name in options() if given[name] is not None}
    try:
        settings = read_settings(flags, environ=os.environ, config=given["config"])
        if given["print_config"]:
            sys.stdout.write(render(settings))
            return 0
        start(settings)
    except TranscriptionServerError as error:
        sys.stderr.write(f"headrace-transcribe: {error}\n")
        return EXIT_USAGE
    return 0


def start(settings: TranscriptionSettings) -> None:
    """Start the server.

    Raises:
        TranscriptionUnavailable: always; this version only reads its settings.
    """
    raise TranscriptionUnavailable(
        f"transcription is not part of version {version('headrace-transcription-server')} yet, so {settings.model!r} "
        f"is not served: a later release brings it; --print-config shows the settings as read"
    )


def render(settings: TranscriptionSettings) -> str:
    """Write the settings as a configuration file."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in asdict(settings).items())


def make_parser() -> ArgumentParser:
    """Make the parser; the destinations of settings are their names."""
    parser = ArgumentParser(
        prog="headrace-transcribe",
        description="Whisper over HTTP. This version reads its settings; transcription itself is a later release.",
        allow_abbrev=False,
    )
    number = version("headrace-transcription-server")
    parser.add_argument("--version", action="version", version=f"headrace-transcribe {number}")
    parser.add_argument("--print-config", action="store_true", help="print the settings as a TOML file and exit")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings [{variable_of('config')}]")
    defaults = asdict(TranscriptionSettings())
    for name, option in options().items():
        help_text = f"{option.help} ({defaults[name]}) [{variable_of(name)}]"
        parser.add_argument(flag_of(name), dest=name, metavar=name.rpartition("_")[2].upper(), help=help_text)
    return parser

"""The command line `headrace-transcribe`: parses, hands over to one command, and turns known errors into one line."""

import json
import os
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from attrs import asdict

from headrace_transcription_server.errors import FileProblem, InvalidSetting, TranscriptionServerError
from headrace_transcription_server.kinds import Switch
from headrace_transcription_server.reading import CONFIG_VARIABLE, read_settings
from headrace_transcription_server.settings import Leaf, TranscriptionSettings, leaves

EXIT_USAGE = 2
"""Exit code of everything that the person at the terminal has to change."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C outside of serving, as shells report it."""

_FORMATS = ("txt", "srt", "vtt", "json", "verbose_json")
_MODEL_KEYS = ("model", "dtype", "max_rows", "max_duration_s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_file = words[:1] == ["file"]
    arguments = make_file_parser().parse_args(words[1:]) if is_file else make_parser().parse_args(words)
    try:
        settings = _read(arguments)
        return _run_files(settings, arguments) if is_file else _run_serve(settings, arguments)
    except TranscriptionServerError as error:
        sys.stderr.write(f"headrace-transcribe: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def render(settings: TranscriptionSettings) -> str:
    """Write the settings as a configuration file; secrets, and what is not set, are left out."""
    secrets = {leaf.key for leaf in leaves() if leaf.option.is_secret}
    return "".join(
        f"{name} = {json.dumps(value)}\n"
        for name, value in asdict(settings).items()
        if value is not None and name not in secrets
    )


def _read(arguments: Namespace) -> TranscriptionSettings:
    given = vars(arguments)
    flags = {leaf.key: given[leaf.key] for leaf in leaves() if given.get(leaf.key) is not None}
    positional = given.get("positional_model")
    if positional is not None:
        if "model" in flags:
            message = "the model is given twice, as MODEL and with --model: leave one of them out"
            raise InvalidSetting(message, origin="flag --model", field="model")
        flags["model"] = [positional]
    read = read_settings(flags, environ=os.environ, config=arguments.config)
    for warning in read.warnings:
        sys.stderr.write(f"headrace-transcribe: warning: {warning}\n")
    return read.settings


def _run_serve(settings: TranscriptionSettings, arguments: Namespace) -> int:
    if arguments.print_config:
        sys.stdout.write(render(settings))
        return 0
    from headrace_transcription_server.serve import run_serve

    return run_serve(settings)


def _run_files(settings: TranscriptionSettings, arguments: Namespace) -> int:
    from headrace_models.transcription import SpeechWanted
    from headrace_models.whisper import InvalidTranscribeOption, TranscribeOptions
    from headrace_transcription_server.files import FileRequest, run_files

    chosen: dict[str, Any] = {} if arguments.temperature is None else {"temperature": arguments.temperature}
    try:
        options = TranscribeOptions(
            language=arguments.language,
            task="translate" if arguments.translate else "transcribe",
            prompt=arguments.prompt,
            vocabulary=arguments.vocabulary or (),
            beam_size=arguments.beam_size,
            condition_on_previous_text=not arguments.no_context,
            word_timestamps=arguments.words,
            **chosen,
        )
    except InvalidTranscribeOption as error:
        raise FileProblem(str(error)) from error
    request = FileRequest(
        paths=tuple(arguments.paths),
        format=arguments.format,
        output=arguments.output,
        options=options,
        speech=SpeechWanted(is_trimming=True) if arguments.vad else None,
    )
    return run_files(settings, request)


class _ShowVersion(Action):
    """Looks the version up only when asked: reading package metadata would cost every start 20 ms."""

    def __call__(self, parser: ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        from importlib.metadata import version

        sys.stdout.write(f"headrace-transcribe {version('headrace-transcription-server')}\n")
        parser.exit()


def make_parser() -> ArgumentParser:
    """Make the parser of the server; the destinations of settings are their keys."""
    parser = ArgumentParser(
        prog="headrace-transcribe",
        description="Serve Whisper over OpenAI's audio API from this machine.",
        epilog="To transcribe files without a server: headrace-transcribe file --help",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="short name, folder or hub id")
    parser.add_argument("--print-config", action="store_true", help="print the settings as a TOML file and exit")
    _add_settings(parser, list(leaves()))
    return parser


def make_file_parser() -> ArgumentParser:
    """Make the parser of `file`."""
    parser = ArgumentParser(
        prog="headrace-transcribe file", description="Transcribe files, together as one batch.", allow_abbrev=False
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="audio, or video with sound")
    parser.add_argument("--format", choices=_FORMATS, default="txt", help="what is written (txt)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PATH", help="file to write, or the folder for several (standard output)"
    )
    parser.add_argument("--language", metavar="LANGUAGE", help="code or name of what is spoken (detected)")
    parser.add_argument("--translate", action="store_true", help="write English, whatever is spoken")
    parser.add_argument("--prompt", metavar="TEXT", help="text as if it came before the audio: names, style, spelling")
    parser.add_argument("--vocabulary", metavar="TERMS", help="terms that may be said, with commas between them")
    parser.add_argument("--words", action="store_true", help="place each word in time (verbose_json shows them)")
    parser.add_argument("--temperature", type=float, metavar="T", help="the only temperature; default: 0, then higher")
    parser.add_argument("--beam-size", type=int, metavar="N", help="search with so many beams")
    parser.add_argument(
        "--no-context",
        action="store_true",
        help="do not tell each window the text before it; one file's windows then decode side by side, faster",
    )
    parser.add_argument("--vad", action="store_true", help="look for speech first, and leave out what lies around it")
    _add_settings(parser, [leaf for leaf in leaves() if leaf.key in _MODEL_KEYS])
    return parser


def _add_settings(parser: ArgumentParser, shown: Sequence[Leaf]) -> None:
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings [{CONFIG_VARIABLE}]")
    for leaf in shown:
        _add_setting(parser, leaf)


def _add_setting(parser: ArgumentParser, leaf: Leaf) -> None:
    shown = f" ({leaf.default})" if leaf.default not in (None, (), False) else ""
    help_text = f"{leaf.option.help}{shown} [{leaf.variable}]"
    if isinstance(leaf.option.kind, Switch):
        parser.add_argument(leaf.flag, dest=leaf.key, action="store_const", const=["true"], help=help_text)
        parser.add_argument(
            f"--no-{leaf.flag[2:]}", dest=leaf.key, action="store_const", const=["false"], help=SUPPRESS
        )
    elif leaf.option.kind.is_list:
        parser.add_argument(leaf.flag, dest=leaf.key, action="append", metavar="TEXT", help=help_text)
    else:
        metavar = leaf.flag.rpartition("-")[2].upper()
        parser.add_argument(leaf.flag, dest=leaf.key, nargs=1, metavar=metavar, help=help_text)

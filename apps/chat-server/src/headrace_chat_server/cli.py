"""The command line `headrace`: parses, hands over to one command, and turns known errors into one line."""

import os
import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from headrace_chat_server.errors import ChatServerError, InvalidSetting
from headrace_chat_server.kinds import Switch
from headrace_chat_server.reading import Read, flag_texts, read_settings
from headrace_chat_server.settings import DTYPES, KV_PATTERN, Leaf, leaves

EXIT_USAGE = 2
"""Exit code of everything that the person at the terminal has to change."""

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C outside of serving, as shells report it."""

_COMMANDS = ("serve", "batch", "fit", "convert", "export", "doctor")
_EXPORT_DTYPES = ("float32", "bfloat16", "float16")
_RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
_DESCRIPTION = "Serve a large language model to OpenAI clients from this machine."
_EPILOG = "Without a command: serve the default model. `headrace serve --help` lists the settings."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    if words and words[0] not in _COMMANDS and not words[0].startswith("-"):
        parser.error(f"{words[0]!r} is no command; to serve a model: headrace serve {words[0]}")
    arguments = parser.parse_args(_with_command(words))
    try:
        return _run(arguments)
    except ChatServerError as error:
        sys.stderr.write(f"headrace: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class _ShowVersion(Action):
    """Looks the version up only when asked: reading package metadata would cost every start 20 ms."""

    def __call__(self, parser: ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        from importlib.metadata import version

        sys.stdout.write(f"headrace {version('headrace-chat-server')}\n")
        parser.exit()


def _with_command(words: list[str]) -> list[str]:
    """Put `serve` before settings that come without a command."""
    if words and (words[0] in {"-h", "--help", "--version"} or not words[0].startswith("-")):
        return words
    return ["serve", *words]


def _run(arguments: Namespace) -> int:
    if arguments.command == "fit":
        from headrace_chat_server.fit import run_fit

        return run_fit(
            arguments.model,
            context=arguments.ctx,
            rows=arguments.rows,
            kv=arguments.kv,
            dtype=arguments.dtype,
            prefill_chunk=arguments.prefill_chunk,
            as_json=arguments.json,
        )
    if arguments.command == "convert":
        from headrace_chat_server.convert import run_convert

        return run_convert(
            arguments.model,
            arguments.folder,
            bits=arguments.bits,
            group_size=arguments.group_size,
            dtype=arguments.dtype,
            mixed=arguments.mixed,
            bits_file=arguments.bits_file,
        )
    if arguments.command == "export":
        from headrace_chat_server.export import run_export

        return run_export(arguments.model, arguments.folder, dtype=arguments.dtype)
    if arguments.command == "doctor":
        if arguments.verify or arguments.model is not None:
            from headrace_chat_server.verify import run_verify

            return run_verify(arguments.model, dtype=arguments.dtype)
        from headrace_chat_server.doctor import run_doctor

        return run_doctor()
    read = _read(arguments)
    for warning in read.warnings:
        sys.stderr.write(f"headrace: warning: {warning}\n")
    if arguments.command == "batch":
        from headrace_chat_server.batch import run_batch

        return run_batch(read.settings, arguments.source, arguments.target)
    from headrace_chat_server.early_engine import early_engine

    with early_engine(read.settings) as engine:
        from headrace_chat_server.serve import run_serve

        return run_serve(read.settings, engine)


def _read(arguments: Namespace) -> Read:
    flags = flag_texts(arguments)
    if arguments.positional_model is not None:
        if "model" in flags:
            message = "the model is given twice, as MODEL and with --model: leave one of them out"
            raise InvalidSetting(message, origin="flag --model", field="model")
        flags["model"] = [arguments.positional_model]
    return read_settings(flags, environ=os.environ, config=arguments.config)


def make_parser() -> ArgumentParser:
    """Make the parser; the destinations of settings are their dotted keys."""
    parser = ArgumentParser(prog="headrace", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    _add_serve(serve)
    batch = commands.add_parser("batch", help="answer every request of a file into another", allow_abbrev=False)
    batch.add_argument("source", metavar="IN.jsonl", help="requests: OpenAI's batch lines, or bare bodies")
    batch.add_argument("target", metavar="OUT.jsonl", help="answers; requests that it answers already are left out")
    _add_serve(batch)
    _add_fit(commands.add_parser("fit", help="say whether a model fits into memory", allow_abbrev=False))
    _add_convert(commands.add_parser("convert", help="quantize a model to a folder for MLX", allow_abbrev=False))
    export = commands.add_parser("export", help="write a model as a folder that mlx-lm reads", allow_abbrev=False)
    export.add_argument("model", metavar="MODEL", help="folder, GGUF file, hub id or short name")
    export.add_argument("folder", metavar="FOLDER", help="folder to write; it must not exist or be empty")
    export.add_argument(
        "--dtype", choices=_EXPORT_DTYPES, default="float32", help="element type of the weights (float32)"
    )
    doctor = commands.add_parser("doctor", help="measure this machine and say what will be used", allow_abbrev=False)
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="model to verify; the default model if none is named")
    doctor.add_argument("--verify", action="store_true", help="check the numeric laws on this device")
    doctor.add_argument("--dtype", choices=DTYPES, default="auto", help="weights in memory, as of serve (auto)")
    return parser


def _add_fit(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder, GGUF file, hub id or short name")
    parser.add_argument("--ctx", type=_count, metavar="N", help="tokens of each row (the model's longest context)")
    parser.add_argument("--rows", type=_count, default=1, metavar="R", help="requests in the running batch (1)")
    parser.add_argument("--kv", type=_kv, default="off", metavar="SCHEME", help="as of serve: off, 8, 4, turbo:k8v3")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="weights in memory, as of serve (auto)")
    parser.add_argument(
        "--prefill-chunk", type=_count, default=512, metavar="N", help="prompt tokens computed in one step (512)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"{text} is below 1")
    return value


def _kv(text: str) -> str:
    if re.fullmatch(KV_PATTERN, text) is None:
        raise ArgumentTypeError(f"{text!r} is no scheme: off, 2, 3, 4, 5, 6, 8, config or turbo:k8v3")
    return text


def _add_convert(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, hub id or short name")
    parser.add_argument("folder", metavar="FOLDER", help="folder to write; it must not exist or be empty")
    parser.add_argument("--bits", type=int, metavar="N", help="bits per weight: 2, 3, 4, 5, 6 or 8 (4)")
    parser.add_argument(
        "--group-size", type=int, default=64, metavar="G", help="weights that share a scale: 32, 64 or 128 (64)"
    )
    parser.add_argument("--dtype", choices=_EXPORT_DTYPES, help="type of what stays unpacked (the model's own)")
    parser.add_argument("--mixed", choices=_RECIPES, help="recipe of bits per matrix, low and high, instead of --bits")
    parser.add_argument(
        "--bits-file",
        metavar="FILE",
        help='TOML or JSON file from patterns of module paths to bits, such as "*.down_proj" = 6, '
        '"lm_head" = { bits = 8, group_size = 32 } or "model.layers.0.*" = "none"; the last match decides',
    )


def _add_serve(parser: ArgumentParser) -> None:
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="folder, GGUF file, hub id or short name")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings [HEADRACE_CONFIG]")
    for leaf in leaves():
        _add_setting(parser, leaf)


def _add_setting(parser: ArgumentParser, leaf: Leaf) -> None:
    flags = [leaf.flag, *(f"--{alias}" for alias in leaf.option.aliases)]
    shown = f" ({leaf.default})" if leaf.default not in (None, (), False) else ""
    help_text = f"{leaf.option.help}{shown} [{leaf.variable}]"
    if isinstance(leaf.option.kind, Switch):
        parser.add_argument(*flags, dest=leaf.key, action="store_const", const=["true"], help=help_text)
        parser.add_argument(
            f"--no-{leaf.flag[2:]}", dest=leaf.key, action="store_const", const=["false"], help=SUPPRESS
        )
    elif leaf.option.kind.is_list:
        parser.add_argument(*flags, dest=leaf.key, action="append", metavar="TEXT", help=help_text)
    else:
        metavar = leaf.path[-1].rpartition("_")[2].upper()
        parser.add_argument(*flags, dest=leaf.key, nargs=1, metavar=metavar, help=help_text)

"""Entry point of `headrace` and `python -m headrace_chat_server`."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from headrace_chat_server.cli import main as run

    sys.exit(run())


if __name__ == "__main__":
    main()

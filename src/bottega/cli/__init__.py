"""The command line: every command parses, calls and prints."""

from __future__ import annotations

import os
import sys
import warnings

from bottega.errors import BottegaError, SettingError


def main() -> None:
    """Exit codes: 0 done, 1 failed, 2 wrong usage. `--debug` anywhere shows the traceback."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if not debug:
        _hush()
    from bottega.cli.app import app

    try:
        app(args=arguments)
    except BottegaError as error:
        if debug:
            raise
        _tell(str(error), error.hint)
        sys.exit(2 if isinstance(error, SettingError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        _tell(
            f"unexpected {type(error).__name__}: {error}",
            "run the command again with --debug and report what it prints",
        )
        sys.exit(1)


def _hush() -> None:
    """Libraries' notes to developers are not for our users."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _tell(message: str, hint: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f" hint: {hint}", file=sys.stderr)

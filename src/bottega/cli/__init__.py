"""Command line: each command parses options, calls the library and prints."""

from __future__ import annotations

import gc
import io
import os
import sys
import warnings

from bottega._util.native import address_space_warning, check_address_space
from bottega.errors import BottegaError, SettingError

# Imports of torch and transformers create a million objects. With Python's default threshold of
# 700, garbage collection delays the start of a command by a second.
GC_THRESHOLD = 20_000


def main() -> None:
    """Run a command. Exit codes: 0 done, 1 failed, 2 wrong usage; `--debug` shows tracebacks."""
    gc.set_threshold(GC_THRESHOLD)
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if not debug:
        _hush()
    try:
        check_address_space()
        if warning := address_space_warning():
            print(f"warning: {warning}", file=sys.stderr)
        from bottega.cli.app import app

        app(args=arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        print_error(error)
        sys.exit(2 if isinstance(error, SettingError) else 1)
    finally:
        gc.freeze()  # skips the last garbage collection at exit


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print only the text: the default format also shows a line of source code."""
    print(f"warning: {message}", file=sys.stderr)


def _hush() -> None:
    """Silence library warnings for developers."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", message="this bundled model cannot read photographs")
    warnings.showwarning = _show_warning
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # unprintable names must not fail
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def print_error(error: Exception) -> None:
    """Print an error and its hint on stderr."""
    if isinstance(error, BottegaError):
        message, hint = str(error), error.hint
    elif isinstance(error, OSError):
        message, hint = f"{error.filename or 'a file'}: {error.strerror}", "check the path"
    else:
        message = f"unexpected {type(error).__name__}: {error}"
        hint = "run the command again with --debug and report what it prints"
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f" hint: {hint}", file=sys.stderr)

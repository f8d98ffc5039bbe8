"""The command `bottega serve`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, cast

from PIL import Image as Pillow
from PIL import ImageDraw
from typer import Argument, Exit, Option

from bottega.cli.console import Console
from bottega.cli.options import CONFIG
from bottega.cli.output import format_usd, note, say
from bottega.errors import BottegaError, SettingError, needs_extra
from bottega.image import Image
from bottega.naming import has_photos

if TYPE_CHECKING:
    from bottega.gateway.config.gateway_settings import Config
    from bottega.pipeline import Pipeline
    from bottega.protocols import Pricer


# No downloads and no network. The prices are examples: those of a small and of a large cloud model.
DEMO = """
[tiers.apprentice]
model = "bundled"
shots = 4
price = [0.15, 0.60]
[tiers.master]
model = "bundled:master"
price = [2.50, 10.00]
[route]
router = "coverage"
min_similarity = 0.9
[traces]
store = "images"
"""
# With the extra [photos], the photograph models answer prompts about photographs.
DEMO_WITH_PHOTOGRAPHS = (
    DEMO.replace('"bundled:master"', '"bundled:by-kind-master"')
    .replace('"bundled"', '"bundled:by-kind"')
    .replace("0.9", "0.85")  # photographs of one class are less similar than synthetic scenes
    + """
[cache]
embed = "by-kind"
"""
)
QUESTION = "What is the capital of France?"
# The bundled master knows colours and shapes, not capitals.
DEMO_QUESTION = "What colour is it?"
FILE_QUESTION = "What is it?"
JSON_BODY = "-H 'Content-Type: application/json'"


def serve(
    pipeline: Annotated[
        str | None,
        Argument(metavar="MODULE:PIPELINE", help="Serve this pipeline instead of a configuration."),
    ] = None,
    config: Annotated[
        Path | None, Option(metavar="FILE", help="TOML file (default: ./bottega.toml).")
    ] = None,
    demo: Annotated[
        bool, Option("--demo", help="Serve the bundled models with a temporary cache.")
    ] = False,
    host: Annotated[
        str | None, Option(metavar="ADDRESS", help="Listen address; overrides the file.")
    ] = None,
    port: Annotated[
        int | None, Option(min=0, max=65535, help="Port; 0 selects a free one.")
    ] = None,
    data: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            envvar="BOTTEGA_DATA",
            help="Data folder of the gateway: cache, keys, ledger.",
        ),
    ] = None,
    check: Annotated[
        bool, Option("--check", help="Print the configuration, look for each tier's model, exit.")
    ] = False,
    probe: Annotated[
        bool, Option("--probe", help="With --check: also send a text and an image to each tier.")
    ] = False,
    offline: Annotated[bool, Option("--offline", help="With --check: connect to nothing.")] = False,
    workers: Annotated[
        int,
        Option(
            min=1, help="Number of server processes on this port; several need state.database_env."
        ),
    ] = 1,
    log_format: Annotated[
        str, Option(metavar="json|text", help="Format of log lines on stderr: json or text.")
    ] = "",
) -> None:
    """Serve several models to OpenAI clients at one base URL, with Cache-of-Thought."""
    with needs_extra("serve"):
        from bottega.gateway.telemetry.logs import STYLES
    if log_format not in ("", *STYLES):
        raise SettingError(f"log format is unknown, got {log_format!r}", hint="use json or text")
    _check_options(check, probe, offline)
    style = log_format or ("text" if sys.stderr.isatty() else "json")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # progress bars would spoil the log
    with ExitStack() as held:
        kept = data
        if demo:
            data = data or Path(held.enter_context(TemporaryDirectory(prefix="bottega-")))
        chosen, made = _chosen(pipeline, config, demo)
        chosen = _with_tuned_settings(chosen.override(host=host, port=port, data=data), offline)

        if workers > 1:
            _check_workers(workers, chosen)

        def read() -> Config:
            from bottega.gateway.config.config_file import load_config

            loaded = load_config(config or CONFIG).override(host=host, port=port, data=data)
            return _with_tuned_settings(loaded)

        if check:
            _check(chosen, made, probe, offline)
        elif workers > 1:
            raise Exit(_run_workers(chosen, workers, style, read))
        else:
            from_file = not demo and made is None
            _run(chosen, made, style, demo, kept, read if from_file else None)
            if demo:
                _print_saved(chosen)


def _check_options(check: bool, probe: bool, offline: bool) -> None:
    if (probe or offline) and (not check or probe is offline):
        raise SettingError(
            "--probe and --offline are options of --check and exclude each other",
            hint="run bottega serve --check --probe",
        )


def _check(config: Config, pipeline: Pipeline | None, probe: bool, offline: bool) -> None:
    """Print the configuration and the state of its connections. Raises as a start would."""
    from bottega.cli import print_error
    from bottega.cli.serve_check import print_config, stored_accounts
    from bottega.gateway.running.build import check_data_folder, check_keys

    print_config(config, os.environ, pipeline, offline=offline)
    note(f"from {config.file}")
    check_data_folder(config)
    faults = _tier_faults(config, probe, offline) if pipeline is None else ()
    for fault in faults:
        print_error(fault)
    if (accounts := stored_accounts(config, os.environ, offline)) is not None:
        check_keys(config, accounts)
    if faults:
        raise Exit(1)


def _tier_faults(config: Config, probe: bool, offline: bool) -> Sequence[BottegaError]:
    """Return the faults of tiers, after a check of what a start would build."""
    from bottega.cli.serve_check import check_connections
    from bottega.gateway.running.cache_views import check_cache
    from bottega.gateway.running.tiers import build_tiers

    tier_set = build_tiers(config, os.environ)
    _warn_of_order(config, tier_set.prices)
    if not offline or config.cache.database_setting is None:
        check_cache(config)
    return () if offline else check_connections(config, tier_set, os.environ, probe=probe)


def _warn_of_order(config: Config, prices: Pricer) -> None:
    from bottega.cli.serve_check import order_warning

    if warning := order_warning(config, prices):
        note(warning)


def _chosen(target: str | None, file: Path | None, demo: bool) -> tuple[Config, Pipeline | None]:
    with needs_extra("serve"):
        from bottega.gateway.config.config_file import load_config, parse_config
        from bottega.gateway.running.tiers import config_of, load_pipeline
    if sum((target is not None, file is not None, demo)) > 1:
        raise SettingError(
            "MODULE:PIPELINE, --config and --demo exclude each other", hint="keep one of them"
        )
    if target is not None:
        pipeline = load_pipeline(target)
        return config_of(pipeline, target), pipeline
    if demo:
        text = DEMO_WITH_PHOTOGRAPHS if has_photos() else DEMO
        return parse_config(text, "--demo"), None
    if file is None and not CONFIG.exists():
        raise SettingError(
            f"nothing to serve: this folder has no {CONFIG}",
            hint="run bottega serve --demo to try it, or copy examples/bottega.toml",
        )
    return load_config(file or CONFIG), None


def _with_tuned_settings(config: Config, offline: bool = False) -> Config:
    if offline and config.cache.database_setting is not None:
        return config
    with needs_extra("serve"):
        from bottega.gateway.running.cache_views import with_tuned_settings
    return with_tuned_settings(config)


def _run(
    config: Config,
    pipeline: Pipeline | None,
    style: str,
    demo: bool,
    kept: Path | None,
    read: Callable[[], Config] | None,
) -> None:
    with needs_extra("serve"):
        from bottega.gateway.running.build import build, build_for_pipeline
        from bottega.gateway.running.process import base_url, bind_metrics_socket, bind_socket, run
        from bottega.gateway.telemetry.logs import Style, log_to

    with (
        bind_socket(config.gateway) as listener,
        bind_metrics_socket(config.gateway) or nullcontext() as metrics,
    ):
        console = Console.of(config)
        gateway_server = (
            build(config, more_routes=console.routes)
            if pipeline is None
            else build_for_pipeline(pipeline, config, more_routes=console.routes)
        )
        if pipeline is None:
            _warn_of_order(config, gateway_server.tier_set.prices)
        url = base_url(config.gateway, listener.getsockname()[1])
        with log_to(sys.stderr, cast(Style, style), secrets=gateway_server.tier_set.secrets):
            protected = gateway_server.gateway.authenticate is not None
            announce = partial(_announce, protected, url, demo, kept, console)
            run(gateway_server, listener, announce, metrics=metrics, read=read)


def _check_workers(workers: int, config: Config) -> None:
    with needs_extra("serve"):
        from bottega.gateway.running.workers import check_workers
    check_workers(workers, config)


def _run_workers(config: Config, workers: int, style: str, read: Callable[[], Config]) -> int:
    """Run several worker processes and return the exit status."""
    with needs_extra("serve"):
        from bottega.gateway.running.process import base_url, bind_metrics_socket, bind_socket
        from bottega.gateway.running.tiers import build_tiers
        from bottega.gateway.running.workers import Supervisor
        from bottega.gateway.telemetry.logs import Style, log_to

    tier_set = build_tiers(config, os.environ)  # errors appear before any worker starts
    _warn_of_order(config, tier_set.prices)
    with (
        bind_socket(config.gateway) as listener,
        bind_metrics_socket(config.gateway) or nullcontext() as metrics,
        log_to(sys.stderr, cast(Style, style), secrets=tier_set.secrets),
    ):
        url = base_url(config.gateway, listener.getsockname()[1])
        supervisor = Supervisor(
            config,
            workers,
            [listener, *([] if metrics is None else [metrics])],
            style=cast(Style, style),
            announce=lambda protected: _announce(
                protected, url, False, None, Console.of(config, has_token=False)
            ),
            read=read,
        )
        return asyncio.run(supervisor.run())


def serve_worker(descriptor: int) -> None:
    """Serve as one of several workers; `bottega serve --workers` starts this command."""
    from bottega.gateway.running.build import build
    from bottega.gateway.running.workers import receive_task, run_worker
    from bottega.gateway.telemetry.logs import log_to

    task, channel = receive_task(descriptor)
    console = Console.of(task.config, has_token=False)  # a token would be another in each worker
    gateway_server = build(task.config, more_routes=console.routes)
    with log_to(sys.stderr, task.style, secrets=gateway_server.tier_set.secrets):
        run_worker(gateway_server, task, channel)


def _announce(protected: bool, url: str, demo: bool, kept: Path | None, console: Console) -> None:
    key = "-H 'Authorization: Bearer sk-...' " if protected else ""
    say(f"serving {url}")
    say(f"  curl {url}/chat/completions {key}{JSON_BODY} \\")
    say(f"    -d '{_question(demo)}'")
    if demo:
        stays = f"remains in {kept}" if kept else "is deleted at exit"
        any_key = "" if protected else "; clients may use any key"
        say(f"  the models are loading{any_key}; the cache {stays}")
        say("  the models are free: the prices are examples to show savings")
        say("  to ask about an image of yours, replace photo.jpg:")
        say(f"  {_file_question()} | curl {url}/chat/completions {key}{JSON_BODY} -d @-")
    elif not protected:
        say("  clients on this machine need no key; they may send any")
    if link := console.link(url, protected):
        say(f"  console: {link}")
    sys.stdout.flush()


def _print_saved(config: Config) -> None:
    from bottega.gateway.accounting.ledger import Ledger
    from bottega.gateway.accounting.ledger_schema import FILE
    from bottega.gateway.accounting.savings import savings

    with closing(Ledger(config.gateway.data / FILE, create=False)) as ledger:
        found = savings(ledger)
    answered = [one for one in found.routes if one.state == "answered"]
    if not answered:
        return
    apprentice = config.tiers[0].name
    own = sum(one.requests for one in answered if one.tier == apprentice)
    share = own / sum(one.requests for one in answered)
    alone = (
        f"about {format_usd(found.master_only.usd.value)}"
        if found.master_only
        else "an unknown amount"
    )
    say(
        f"at example prices: spent {format_usd(found.spent_usd)} USD; the master alone would have"
        f" cost {alone}; the {apprentice} answered {share:.0%}"
    )


def _question(demo: bool) -> str:
    """Return a request body to copy; for the demo with a small image."""
    if not demo:
        return _body(QUESTION)
    pixels = Pillow.new("RGB", (64, 64), "black")
    ImageDraw.Draw(pixels).ellipse((8, 8, 38, 38), fill="red")
    return _body(DEMO_QUESTION, Image.from_pillow(pixels.quantize(2)).data_url)


def _file_question() -> str:
    """Return a shell command that prints a request body with photo.jpg. Data in an argument would
    be limited to 128 KiB, so the body is for a pipe."""
    start, end = _body(FILE_QUESTION, "data:image/jpeg;base64,FILE").split("FILE")
    return f"(printf '{start}'; base64 < photo.jpg | tr -d '\\n'; printf '{end}')"


def _body(question: str, url: str | None = None) -> str:
    content: object = question
    if url is not None:
        image = {"type": "image_url", "image_url": {"url": url}}
        content = [image, {"type": "text", "text": question}]
    return json.dumps({"model": "bottega", "messages": [{"role": "user", "content": content}]})

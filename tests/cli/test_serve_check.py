"""Output of `bottega serve --check`: configured settings and defaults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.redis import RedisServer

SECRET = "sk-0123456789abcdefghij"
TIERS = """
[tiers.apprentice]
model = "openai:Qwen/Qwen2.5-VL-7B-Instruct"
base_url = "http://localhost:8100/v1?key=hidden-in-the-query"
shots = 2
images = 8
context = 32768
tools = false
timeout = 30
retries = 1
concurrency = 32
extra_body = { token = "hidden-in-the-body" }
[tiers.middle]
model = "openai:gpt-4.1"
[tiers.master]
model = "openai:unpriced"
base_url = "http://localhost:8002/v1"
api_key_env = "MASTER_KEY"
price = [2.0, 8.0, 0.5]
[cache]
embed = "words"
"""

TEXTS = "[limits]\nimages = 0\n"  # allows coverage by words


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_KEY", SECRET)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)


def printed(run: Run, text: str, *more: object) -> list[str]:
    """Return the printed lines with runs of spaces collapsed."""
    Path("bottega.toml").write_text(text)
    done = run("serve", "--check", "--offline", *more)
    assert done.code == 0, done.err
    for secret in (SECRET, "hidden-in"):
        assert secret not in done.out + done.err
    return [" ".join(line.split()) for line in done.out.splitlines()]


def block(lines: list[str], first: str, number: int) -> list[str]:
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    return lines[start : start + number]


def test_variants_of_an_experiment_are_printed(run: Run) -> None:
    more = """
        [experiment]
        name = "by-image"
        share = 0.1
        [experiment.b]
        options = "shots=4"
        cache = { retrieve = "image" }
        route = { router = "coverage", min_similarity = 0.9 }
    """
    lines = printed(run, TIERS + TEXTS + more)
    assert block(lines, "experiment", 3) == [
        "experiment by-image: 0.1 get b",
        "a as configured",
        "b shots=4, cache.retrieve=image, cache.min_similarity=0.3, route.router=coverage,"
        " route.min_similarity=0.9",
    ]


def test_a_search_is_printed_and_its_budget_is_checked(run: Run) -> None:
    search = 'shots = 2\nsearch = "rcts"\nsearch_tokens = 400000\nsearch_seconds = 30'
    text = TIERS.replace("shots = 2", search)
    assert "search rcts: 10 rollouts, 400,000 tokens, 30 s" in printed(run, text)
    Path("bottega.toml").write_text(text.replace("400000", "4000"))
    done = run("serve", "--check", "--offline")
    assert (done.code, "budget smaller than one rollout" in done.err) == (2, True)


def test_missing_passages_are_refused(run: Run) -> None:
    local = '[tiers.local]\nmodel = "bundled"\npassages = "town.racc"\n[tiers.middle]'
    Path("bottega.toml").write_text(TIERS.replace("[tiers.middle]", local))
    done = run("serve", "--check", "--offline")
    assert "town.racc, compressor: bundled" in done.out
    assert (done.code, "no compressed passages in town.racc" in done.err) == (2, True)


def test_tier_settings_are_printed(run: Run) -> None:
    lines = printed(run, TIERS)
    assert block(lines, "tiers.apprentice", 8) == [
        "tiers.apprentice openai:Qwen/Qwen2.5-VL-7B-Instruct",
        "base_url http://localhost:8100/v1",
        "key none",
        "shots 2",
        "supports 8 images, no tools, no audio, 32768 tokens of context",
        "price unknown",
        "timeout 30 s per attempt, streamed or not; 1 retry",
        "concurrency 32 requests",
    ]
    middle = block(lines, "tiers.middle", 8)
    assert middle[1:5] == [
        "base_url https://api.openai.com/v1",
        "key OPENAI_API_KEY set",
        "shots 1",
        "supports any number of images, tools, no audio, any context",
    ]
    assert middle[5] == "price 2 in, 8 out: USD per million tokens (published)"
    assert middle[6].endswith("120 s per attempt, streamed or not; 2 retries")
    master = block(lines, "tiers.master", 6)
    assert master[0].endswith("(its answers fill the cache)")
    assert master[3] == "shots 0 (no demonstrations)"
    assert master[5] == "price 2 in, 8 out, 0.5 cached: USD per million tokens"


def test_values_are_aligned(run: Run) -> None:
    Path("bottega.toml").write_text(TIERS)
    lines = run("serve", "--check", "--offline").out.splitlines()
    start = lines[0].index("openai:")
    assert {line[start - 2 : start] for line in lines} == {"  "}
    assert all(line[start] != " " for line in lines)


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (
            "",
            ["route random: the master at random", "master_rate 0.2 (default)", "seed 0 (default)"],
        ),
        (
            'router = "coverage"\nmin_similarity = 0.8',
            [
                "route coverage: the master if nothing cached is similar",
                "min_similarity 0.8",
                "master_rate not set: min_similarity decides",
            ],
        ),
        (
            'router = "coverage"\nmaster_rate = 0.3\nseed = 7',
            [
                "route coverage: the master if nothing cached is similar",
                "min_similarity not set: adapted to recent questions to hold master_rate",
                "master_rate 0.3",
                "seed 7",
            ],
        ),
        (
            'router = "confidence"\nmin_confidence = 0.7\nfallback = "up"\ncold_start = 9',
            [
                "route confidence: the cheapest first, the next if its confidence is low",
                "min_confidence 0.7",
                "samples not set: one reply, and its probability",
                "cold_start 9",
                "fallback up",
            ],
        ),
        (
            'router = "fixed"',
            [
                "route fixed: one tier for all",
                "tier not set: the first, apprentice",
                "cold_start 0 (default)",
                "fallback any (default)",
            ],
        ),
    ],
)
def test_unset_router_settings_show_their_defaults(
    run: Run, route: str, expected: list[str]
) -> None:
    assert (
        block(printed(run, f"{TIERS}{TEXTS}[route]\n{route}\n"), "route", len(expected)) == expected
    )


def test_cache_and_replay_settings_are_printed(run: Run) -> None:
    lines = printed(run, TIERS)
    assert block(lines, "cache", 4) == [
        "cache bottega-data/cache.db",
        "embed words",
        "retrieve nearest (default)",
        "min_similarity 0.3 (default)",
    ]
    assert "replay exact repeats for 3600 s, from 256 MB" in lines
    assert "shadow off" in lines
    assert "telemetry off" in lines
    assert "limits the defaults" in lines
    more = 'retrieve = "bm25"\nfile = "c.db"\n[replay]\nseconds = 0\n[limits]\nimages = 3\n'
    more += '[shadow]\nrate = 0.1\ngate = true\njudge = "master"\n[telemetry]\nenabled = true\n'
    lines = printed(run, f"{TIERS}{more}", "--port", 9999)
    assert block(lines, "cache", 4) == [
        "cache c.db",
        "embed words",
        "retrieve bm25",
        "min_similarity not set: bm25 has no similarity",
    ]
    assert "replay off" in lines
    assert block(lines, "limits", 2) == ["limits the defaults, except", "images 3"]
    shadow = "shadow 0.1 of the apprentices' answers are compared; the gate is on; judge: master"
    assert shadow in lines
    assert "gateway http://127.0.0.1:9999" in lines
    [telemetry] = (line for line in lines if line.startswith("telemetry"))
    assert telemetry.endswith("OTEL_EXPORTER_OTLP_ENDPOINT (not set: http://localhost:4318)")


def test_key_requirements_are_printed(run: Run) -> None:
    assert "keys not required" in printed(run, TIERS)
    assert not Path("bottega-data").exists()
    none = "keys required, but none exist: bottega keys add NAME --data bottega-data"
    assert none in printed(run, TIERS, "--host", "0.0.0.0")
    assert run("keys", "add", "ann").code == 0
    for more in ([], ["--host", "0.0.0.0"]):  # on loopback too, because a key exists
        assert "keys required; 1 in bottega-data" in printed(run, TIERS, *more)
    assert "keys not required" in printed(run, f"{TIERS}[keys]\nrequired = false\n")
    lines = printed(run, f"{TIERS}[keys]\nmax_namespaces = 3\n")
    assert lines[-2:] == ["keys required; 1 in bottega-data", "max_namespaces 3"]


def test_local_models_are_printed(run: Run) -> None:
    lines = printed(run, '[tiers.only]\nmodel = "bundled"\n[cache]\nembed = "words"\n')
    assert block(lines, "tiers.only", 6) == [
        "tiers.only bundled (its answers fill the cache)",
        "runs in this process",
        "shots 0 (no demonstrations)",
        "supports any number of images, no tools, no audio, any context",
        "price free: it runs in this process",
        "route fixed: one tier for all",
    ]


def test_a_custom_pipeline_is_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("stall.py").write_text(
        "from bottega import Pipeline, Tier\n"
        "from bottega.generation import ScriptedGenerator\n"
        "from bottega.parsing import plain_text\n"
        "from bottega.prompting import InterleavedPrompter\n"
        "from bottega.pipeline import FixedRouter\n"
        "tier = Tier('only', ScriptedGenerator(lambda prompt: 'x', name='mine'), 3)\n"
        "pipeline = Pipeline(FixedRouter(tier), InterleavedPrompter(), plain_text, tiers=(tier,))\n"
    )
    done = run("serve", "stall:pipeline", "--check")
    sys.modules.pop("stall", None)
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert done.code == 0
    assert block(lines, "tiers.only", 5) == [
        "tiers.only mine",
        "shots 3",
        "price unknown",
        "route the pipeline's own",
        "cache the pipeline's own",
    ]


def test_shared_state_is_printed_without_passwords(
    run: Run, database: str, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB", database)
    state = f"[state]\ndatabase_env = 'DB'\nredis = '{redis.url}'\n[keys]\nrequired = true\n"
    lines = printed(run, TIERS + state)
    where = database.partition("@")[2].partition("?")[0]
    assert f"state shared in postgresql://{where}" in lines
    assert f"redis {redis.url}" in lines
    assert "keys required; those in the database were not read" in lines
    assert "secret" not in " ".join(lines)
    assert "state in this process" in printed(run, TIERS)

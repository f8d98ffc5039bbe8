from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bottega.errors import SettingError
from bottega.gateway.config.config_file import SECTIONS, load_config, parse_config
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.config.routing_settings import TierSettings
from tests.paths import ROOT

EXAMPLE = ROOT / "examples" / "bottega.toml"
TWO = """
[tiers.small]
model = "openai:qwen"
base_url = "http://localhost:8100/v1"
[tiers.large]
model = "openai:gpt"
api_key_env = "LARGE_KEY"
"""
KEY = "sk-abcdefghijklmnopqrstuvwxyz123456"


def rejected(text: str) -> tuple[str, str]:
    with pytest.raises(SettingError) as error:
        parse_config(text, "b.toml")
    return str(error.value), error.value.hint


def test_example_contains_every_setting() -> None:
    config, text = load_config(EXAMPLE), EXAMPLE.read_text(encoding="utf-8")
    assert [tier.name for tier in config.tiers] == ["apprentice", "master"]
    assert (config.route.router, config.route.min_similarity) == ("coverage", 0.8)
    for section in SECTIONS:
        body = text.partition(f"[{section}]")[2].partition("\n[")[0]
        for one in dataclasses.fields(getattr(config, section)):
            assert f"{one.name} = " in body, f"[{section}] {one.name}"
    for one in dataclasses.fields(TierSettings):
        assert one.name == "name" or f"{one.name} = " in text, one.name


def test_defaults_in_the_example_are_correct() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    sections = ("gateway", "route", "cache", "replay", "limits", "shadow", "batches", "telemetry")
    more = ("feedback", "responses")
    unset = {
        "aliases",
        "allowed_hosts",
        "allowed_origins",
        "judge",
        "fetch_hosts",
        "fields",
        "file",
    }
    unset |= {"metrics_port", "database", "database_env", "vectors", "vectors_env"}
    unset |= {"master_rate", "usd_per_1k", "min_confidence", "samples", "tier"}  # of other routers
    unset |= {"order", "groups"}  # stored or nearest-last; adapted
    config, section, found = parse_config(TWO), "", set()
    for line in lines:
        if line.startswith("["):
            section = line[1:].partition("]")[0]
        name, sign, rest = line.removeprefix("# ").partition(" = ")
        if sign and line.startswith("# ") and section in (*sections, *more) and name not in unset:
            found.add((section, name))
            shown = rest.partition("#")[0].strip().strip('"')
            assert shown == str(getattr(getattr(config, section), name)).replace(
                "False", "false"
            ).replace("True", "true"), f"[{section}] {name}"
    assert {("cache", "min_similarity"), ("route", "fallback")} <= found


def test_default_threshold_hides_dissimilar_examples() -> None:
    assert parse_config(TWO).cache.min_similarity == 0.3
    assert parse_config(TWO + "[cache]\nmin_similarity = -1").cache.min_similarity == -1
    assert parse_config(TWO + "[cache]\nretrieve = 'bm25'").cache.min_similarity is None


def test_defaults_with_two_tiers() -> None:
    config = parse_config(TWO)
    assert config.master.name == "large"
    assert config.stored_tiers == ("large",)
    assert (config.route.router, config.route.master_rate) == ("random", 0.2)
    assert config.aliases == {"qwen", "gpt"}
    assert not config.keys_required
    assert config.tiers[0].timeout == 120.0


def test_every_route_can_be_chosen() -> None:
    for line in (
        "router = 'fixed'\ntier = 'large'",
        "router = 'random'\nmaster_rate = 0\nseed = 3",
        "router = 'budget'\nusd_per_1k = 4\nseed = 3",
        "router = 'coverage'\nmin_similarity = 0\nseed = 3",
        "router = 'coverage'\nmaster_rate = 0.5",
        "router = 'confidence'\nmin_confidence = 0.5\nsamples = 3",
    ):
        assert parse_config(f"{TWO}[route]\ncold_start = 5\n{line}").route.cold_start == 5


def test_one_tier_answers_everything() -> None:
    assert parse_config('[tiers.only]\nmodel = "bundled"').route.router == "fixed"


def test_stored_tiers_can_be_configured() -> None:
    assert parse_config(TWO.replace('"LARGE_KEY"', '"K"\nstore_answers = true')).stored_tiers == (
        "large",
    )
    config = parse_config(TWO.replace('8100/v1"', '8100/v1"\nstore_answers = true'))
    assert config.stored_tiers == ("small",)
    not_stored = TWO.replace('"LARGE_KEY"', '"K"\nstore_answers = false')
    assert parse_config(not_stored).stored_tiers == ()
    redundant = parse_config(TWO.replace('8100/v1"', '8100/v1"\nstore_answers = false'))
    assert redundant.stored_tiers == ("large",)


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("[tier.a]\nmodel = 'bundled'", "tier ", "did you mean tiers?"),
        ("[tiers.a]\nmodell = 'bundled'\nmodel = 'bundled'", "tiers.a.modell", "mean model?"),
        (TWO + "[route]\nmaster_rte = 0.5", "route.master_rte", "mean master_rate?"),
        (
            TWO + "[gateway]\nport = '80'",
            "port must be a whole number, got the text '80'",
            "port = 80",
        ),
        (
            TWO + "[gateway]\nport = true",
            "port must be a whole number, got true",
            "port = 1",
        ),
        (
            TWO + "[gateway]\nport = 65536",
            "port must be at most 65535, got 65536",
            "port = 65535",
        ),
        (
            TWO + "[gateway]\naliases = 'gpt'",
            "aliases must be a list, got text",
            "aliases = [...]",
        ),
        (TWO + "[gateway]\naliases = [1]", "gateway.aliases item 1 must be text", '["..."]'),
        (TWO + "[cache]\nevict = 'least-recnt'", "got 'least-recnt'", "mean least-recent?"),
        (TWO + "[cache]\nevict = 3", "cache.evict must be one of least-recent", "use one of"),
        (TWO + "[cache]\nfile = 3", "cache.file must be text, got 3", 'file = "..."'),
        (TWO + "[route]\nmaster_rate = 1.5", "must be at most 1, got 1.5", "master_rate = 1"),
        (TWO + f"[replay]\nseconds = {10**400}", "replay.seconds must be a number", "0.5"),
        (TWO + "[keys]\ntiers = ['small', 2]", "keys.tiers item 2 must be text, got 2", '["..."]'),
        ("[tiers.a]\nmodel = 'openai:x'\nextra_body = 3", "extra_body must be a table", "{"),
        ("[tiers.a]\nmodel = 'openai:x'\ntimeout = 0", "timeout must be more than 0", "timeout"),
        (TWO + "[replay]\nseconds = nan", "replay.seconds must be a finite number, got nan", "1.0"),
        (
            "[tiers.a]\nmodel = 'openai:x'\ndrop_fields = ['model']",
            "drop_fields must not",
            "optional",
        ),
        (
            TWO + "[shadow]\nrate = 0.1\njudge = 'big'",
            "shadow.judge must be the name of a tier",
            "small, large",
        ),
        (TWO + "[limits]\nbody_mb = 0", "limits.body_mb must be at least 1, got 0", "body_mb = 1"),
        (
            TWO + "[route]\nrouter = 'fixed'\nmaster_rate = 0.5",
            "route.master_rate",
            'router = "random"',
        ),
        (TWO + "[route]\nrouter = 'fixed'\ntier = 'medium'", "route.tier", "use small, large"),
        (TWO + "[route]\nrouter = 'budget'", "usd_per_1k", "usd_per_1k = 1.0"),
        (
            TWO + "[route]\nrouter = 'coverage'",
            "min_similarity or master_rate",
            "min_similarity = 0.8",
        ),
        (
            TWO + "[route]\nrouter = 'coverage'\nmin_similarity = 0\nmaster_rate = 0.1",
            "either min_similarity or",
            "",
        ),
        (
            "[tiers.a]\nmodel = 'bundled'\n[route]\nrouter = 'random'",
            "route.router",
            'router = "fixed"',
        ),
        ("", "tiers are missing", "[tiers.apprentice]"),
        ("tiers = 3", "tiers must be a table, got 3", "[tiers]"),
        ("[tiers.a]\nshots = 1", "tiers.a.model is missing", "openai:NAME"),
        ("[tiers.a]\nmodel = 'openai:'", "tiers.a.model is missing", "openai:NAME"),
        ("[tiers.a]\nmodel = 'openai-completions:m'", "must support chat, got", "openai:NAME"),
        (
            "[tiers.'A B']\nmodel = 'bundled'",
            "A B is not a valid tier name",
            "lower-case letters",
        ),
        ("[tiers.a]\nmodel = 'bundled'\nname = 'b'", "tiers.a.name", ""),
        ("[tiers.a]\nmodel = 'bundled'\nbase_url = 'http://x/v1'", "no base_url", "openai:bundled"),
        ("[tiers.a]\nmodel = 'openai:x'\nprice = [1.0]", "tiers.a.price", "0.15"),
        ("[tiers.a]\nmodel = 'openai:x'\nprice = 0.5", "2 or 3 numbers, got 0.5", "input, output"),
        (
            "[tiers.a]\nmodel = 'openai:x'\nprice = [-1, 1]",
            "price item 1 must be at least 0",
            "price = [0]",
        ),
        (
            TWO + "[gateway]\nallowed_hosts = ['a:80']",
            "gateway.allowed_hosts",
            "write the name only",
        ),
        (TWO + "[gateway]\nallowed_hosts = ['[fe80::1]:80']", "gateway.allowed_hosts", "name only"),
        *(
            (
                TWO + f"[gateway]\nallowed_origins = ['{origin}']",
                "gateway.allowed_origins must be origins as browsers send them, got",
                "https://app.example",
            )
            for origin in (
                *("*", "", "null", "app.example", "https://app.example/", "https://App.example"),
                *("https://*.example", "https://app.example:443", "http://app.example:80"),
                *("https://app.example/path", "https://a b", "https://app.example:x"),
            )
        ),
        (TWO + "[limits]\nfetch_hosts = ['a.com']", "limits.fetch_hosts", "fetch_images = true"),
        (
            TWO + "[cache]\nretrieve = 'bm25'\nmin_similarity = 0.5",
            "cache.min_similarity",
            "nearest",
        ),
        (TWO + "[shadow]\ngate = true", "shadow.gate", "rate = 0.02"),
        (TWO + "[route]\nrouter = 'coin'", "got 'coin'", "use one of fixed, random"),
        ("gateway = [", "b.toml is not valid TOML", "examples/bottega.toml"),
    ],
)
def test_errors_name_the_key_and_the_fix(text: str, key: str, hint: str) -> None:
    message, found_hint = rejected(text)
    assert message.startswith("b.toml")
    assert key in message
    assert hint in found_hint


@pytest.mark.parametrize(
    "line",
    [
        f'api_key = "{KEY}"',
        'api_key = "short"',
        f'api_key_env = "{KEY}"',
        'api_key_env = "AKIAABCDEFGHIJKLMNOP"',
        'api_key_env = "not-a-name"',
        'base_url = "https://user:hunter2hunter2@example.com/v1"',
        f'extra_body = {{ headers = {{ Authorization = ["Bearer {KEY}"] }} }}',
        f'model = "{KEY}"',
        f"price = '{KEY}'",
    ],
)
def test_secrets_in_the_file_are_rejected_and_not_shown(line: str) -> None:
    text = "[tiers.a]\n" + ("" if "model" in line else "model = 'openai:x'\n") + line
    message, hint = rejected(text)
    assert "tiers.a." in message
    assert "_KEY" in hint
    for secret in (KEY, "short", "hunter2", "AKIA"):
        assert secret not in message + hint


def test_names_similar_to_keys_are_accepted() -> None:
    for model in ("hf-internal-testing/tiny-random", "skateboard-detector-large", "key-frames-7b"):
        assert parse_config(f"[tiers.a]\nmodel = '{model}'").tiers[0].model == model


def test_shared_state_needs_keys() -> None:
    """Else gateways that start before the first key is added would not require it."""
    shared = TWO + '[state]\ndatabase_env = "DB"\n'
    assert parse_config(shared).keys_required
    assert not parse_config(f"{shared}[keys]\nrequired = false\n").needs_keys(True)


def test_a_public_address_needs_keys() -> None:
    public = TWO + "[gateway]\nhost = '0.0.0.0'\n"
    assert parse_config(public).keys_required
    message, hint = rejected(public + "[keys]\nrequired = false")
    assert "keys.required" in message
    assert "bottega keys add" in hint
    local = parse_config(TWO + "[keys]\nrequired = false")
    assert not local.keys_required
    with pytest.raises(SettingError, match="other machines can reach"):
        local.override(host="192.168.0.7", port=None, data=None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_address_needs_no_keys(host: str) -> None:
    assert not parse_config(TWO + f"[gateway]\nhost = '{host}'").keys_required


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.com", ""])
def test_other_addresses_are_public(host: str) -> None:
    assert parse_config(TWO + f"[gateway]\nhost = '{host}'").keys_required


def test_command_line_overrides_settings() -> None:
    config = parse_config(TWO).override(host=None, port=0, data=Path("elsewhere"))
    assert (config.gateway.host, config.gateway.port) == ("127.0.0.1", 0)
    assert config.gateway.data == Path("elsewhere")


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "b.toml"
    file.write_text(TWO, encoding="utf-8-sig")
    assert load_config(file).master.name == "large"


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="No such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="not UTF-8"):
        load_config(tmp_path / "odd.toml")


def test_settings_are_immutable() -> None:
    config: Config = parse_config(TWO)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.gateway.port = 1  # type: ignore[misc]


def test_an_ip_address_is_a_valid_allowed_host() -> None:
    hosts = ("fe80::1", "[fe80::2]", "192.168.0.7", "mybox.lan.")
    config = parse_config(TWO + f"[gateway]\nallowed_hosts = {list(hosts)}")
    assert config.gateway.allowed_hosts == hosts


def test_state_urls_come_from_the_file_or_the_environment() -> None:
    config = parse_config(TWO + '[state]\ndatabase = "postgresql://bottega@db/b"\n')
    assert config.state.database_url({}) == "postgresql://bottega@db/b"
    assert config.state.redis_url({}) is None
    config = parse_config(TWO + '[state]\ndatabase_env = "DB"\nredis_env = "CACHE"\n')
    environment = {"DB": "postgresql://u:secret@db/b", "CACHE": "rediss://cache"}
    assert config.state.database_url(environment) == environment["DB"]
    assert config.state.redis_url(environment) == "rediss://cache"
    with pytest.raises(SettingError, match="DB must be a URL") as error:
        config.state.database_url({"DB": "mysql://u:secret@db"})
    assert "secret" not in str(error.value) + error.value.hint


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('database = "postgresql://u:secret@db/b"', "looks like a secret"),
        ('database = "gateway.db"', "is not the URL of"),
        ('database = "redis://db"', "is not the URL of"),
        ('redis = "redis://cache"', "needs a database"),
        ('database = "postgresql://db/b"\ndatabase_env = "DB"', "must not be set together with"),
        ('database_env = "$DB"', "must be the name of an environment variable"),
        ('database = "postgresql://db"\nredis = "redis://:secret@cache"', "looks like a secret"),
    ],
)
def test_wrong_state_urls_are_rejected(lines: str, problem: str) -> None:
    message, hint = rejected(f"{TWO}[state]\n{lines}\n")
    assert problem in message and hint
    assert "secret@" not in message + hint


def test_dropped_fields_are_not_sent() -> None:
    text = TWO.replace("[tiers.small]", "[tiers.small]\ndrop_fields = ['temperature', 'user']", 1)
    tier = parse_config(text).tiers[0]
    assert tier.own_fields == {"temperature": None, "user": None}

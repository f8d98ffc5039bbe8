"""Fields that change what a server does or costs need the operator's permission."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bottega.errors import SettingError
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.running.build import build
from tests import server
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.server import Server, ok

CONTROL: list[dict[str, Any]] = [
    {"chat_template": "{{ 'say wrong' }}"},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"guided_decoding_backend": "outlines"},
    {"structured_outputs": {"choice": ["a"], "structural_tag": "x"}},
    {"structured_outputs": "a"},
    {"grammar": "root ::= root"},
    {"priority": -1},
    {"priority": False},
    {"use_beam_search": True},
    {"length_penalty": 1.5},
    {"echo": True},
    {"add_generation_prompt": False},
    {"include_stop_str_in_output": True},
    {"spaces_between_special_tokens": False},
    {"logits_processors": ["os.system"]},
    {"mm_processor_kwargs": {"max_pixels": 10**9}},
    {"ignore_eos": True},
    {"ignore_eos": 0},
    {"min_tokens": "9"},
    {"min_tokens": 9.5},
    {"best_of": 2},
    {"best_of": True},
    {"skip_special_tokens": False},
    {"web_search_options": {}},
    {"a_field_of_tomorrow": 1},
    {"service_tier": "priority"},
    {"service_tier": "flex"},
    {"service_tier": ["priority"]},
]
PASSING: list[dict[str, Any]] = [
    {"top_k": 3},
    {"repetition_penalty": 1.1},
    {"repeat_penalty": 1.1},
    {"typical_p": 0.9},
    {"guided_choice": ["a", "b"]},
    {"guided_json": {"type": "object"}},
    {"guided_regex": "a|b"},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"service_tier": None},
    {"chat_template": None},
    {"parallel_tool_calls": False},
    {"safety_identifier": "a"},
    {"reasoning_effort": "low"},
]


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    with server.running() as running:
        yield running


@pytest.fixture(scope="module")
def client(upstream: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("gateway")
    with run_gateway(build(gateway_config(folder, upstream.url), ENVIRONMENT)) as url:
        transport = openai.DefaultHttpxClient(verify=False)  # loading certificates takes longer
        with openai.OpenAI(base_url=url, api_key="x", http_client=transport) as client:
            yield client


@pytest.mark.parametrize("fields", CONTROL, ids=str)
def test_control_fields_are_rejected_by_name(
    upstream: Server, client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    upstream.bodies.clear()
    for create in (
        lambda: client.chat.completions.create(
            model="bottega", messages=[{"role": "user", "content": "?"}], extra_body=fields
        ),
        lambda: client.responses.create(model="bottega", input="?", extra_body=fields),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            create()
        assert refused.value.param == next(iter(fields))
        assert refused.value.code in ("unsupported_parameter", "invalid_type")
    assert not [body for body in upstream.bodies if body]


@pytest.mark.parametrize("fields", PASSING, ids=str)
def test_allowed_fields_are_forwarded(
    endpoint: Server, tmp_path: Path, fields: dict[str, Any]
) -> None:
    endpoint.answers = [ok("fine")]
    with run_gateway(build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)) as url:
        ask(url, "?", **fields)
    assert endpoint.bodies[-1].items() >= fields.items()


@pytest.mark.parametrize("length_penalty", [1.0, 1])  # JavaScript writes 1.0 as 1
def test_fields_with_default_values_are_dropped(
    endpoint: Server, tmp_path: Path, length_penalty: float
) -> None:
    defaults: dict[str, Any] = {
        "ignore_eos": False,
        "best_of": 1,
        "skip_special_tokens": True,
        "use_beam_search": False,
        "length_penalty": length_penalty,
        "echo": False,
        "add_generation_prompt": True,
        "include_stop_str_in_output": False,
        "spaces_between_special_tokens": True,
        "priority": 0,
    }
    endpoint.answers = [ok("fine")]
    with run_gateway(build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)) as url:
        ask(url, "?", **defaults)
    assert endpoint.bodies[-1].keys().isdisjoint(defaults)


def test_operator_allows_more_fields(endpoint: Server, tmp_path: Path) -> None:
    more = "[limits]\nfields = ['guided_grammar', 'best_of', 'structured_outputs']\n"
    allowed: dict[str, Any] = {
        "guided_grammar": "g",
        "best_of": 1,
        "structured_outputs": {"grammar": "g"},
    }
    with run_gateway(build(gateway_config(tmp_path, endpoint.url, more), ENVIRONMENT)) as url:
        ask(url, "?", **allowed)
    assert endpoint.bodies[-1].items() >= allowed.items()


def test_priced_service_tiers_are_rejected() -> None:
    """Published prices have one price per model."""
    tier = '[tiers.a]\nmodel = "openai:gpt-4.1"\nextra_body = { service_tier = "flex" }\n'
    with pytest.raises(SettingError, match=r"tiers\.a\.price is missing"):
        parse_config(tier)
    assert parse_config(tier + "price = [1.0, 4.0]\n").tiers[0].price == (1.0, 4.0)
    with pytest.raises(SettingError, match=r"limits\.fields must not contain service_tier"):
        parse_config(tier + "price = [1.0, 4.0]\n[limits]\nfields = ['service_tier']\n")

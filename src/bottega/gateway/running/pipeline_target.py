"""Pipelines that users name as `package.module:attribute`, uvicorn's notation."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from bottega.errors import SettingError
from bottega.gateway.config.settings import Config, TierSettings
from bottega.gateway.ports import Tenant
from bottega.openai_api.errors import ApiError
from bottega.pipeline import Pipeline

FORM = "write it as package.module:attribute, such as shop:pipeline for shop.py in this folder"


def load_pipeline(target: str) -> Pipeline:
    """Import a `Pipeline`, or a function without arguments that returns one. Raises `SettingError`;
    exceptions of the module itself propagate."""
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise SettingError(f"the pipeline's name is incomplete, got {target!r}", hint=FORM)
    if (here := str(Path.cwd())) not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module imports another one that is missing
        raise SettingError(f"module {error.name!r} does not exist", hint=FORM) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise SettingError(f"module {module!r} has no attribute {attribute!r}", hint=FORM)
        found = getattr(found, name)
    pipeline = found if isinstance(found, Pipeline) or not callable(found) else found()
    return _checked(pipeline, target)


def _checked(pipeline: object, target: str) -> Pipeline:
    if not isinstance(pipeline, Pipeline):
        raise SettingError(
            f"{target} must be a Pipeline, got {type(pipeline).__name__}",
            hint="name a Pipeline, such as a recipe returns, or a function that returns one",
        )
    if not pipeline.tiers:
        raise SettingError(
            f"{target} has no tiers",
            hint="pass Pipeline(tiers=(...)), cheapest first, as cache_of_thought does",
        )
    if pipeline.search is not None:
        raise SettingError(
            f"{target} has a search, which the gateway does not support",
            hint="serve a Pipeline with a reranker instead: Pipeline(rerank=...)",
        )
    return pipeline


def config_of(pipeline: Pipeline, target: str) -> Config:
    tiers = (TierSettings(tier.name, tier.generator.name) for tier in pipeline.tiers)
    return Config(target, tuple(tiers))


class PipelineTenantPool:
    """Tenant pool of a user's pipeline. The gateway stores no examples, since the pipeline has its
    own recorder. There is only the default namespace, since a pipeline does not separate tenants'
    examples."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._tenant = Tenant(pipeline)

    async def open(self, namespace: str, /) -> Tenant:
        if namespace:
            raise ApiError(
                "this gateway serves one pipeline, which has no namespaces",
                status=403,
                type="permission_error",
                code="no_namespaces",
                hint="use a key without a namespace",
            )
        return self._tenant

    def counts(self) -> dict[str, int]:
        return {}

    async def aclose(self) -> None:
        pass

"""`package.module:attribute`, as uvicorn names an application: a pipeline of the user's own."""

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
    """A `Pipeline`, or what a callable without arguments returns. What the module itself raises
    goes through, as it would from an import."""
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise SettingError(f"{target!r} names no pipeline", hint=FORM)
    if (here := str(Path.cwd())) not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise SettingError(f"there is no module {error.name!r}", hint=FORM) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise SettingError(f"{module} has no {attribute!r}", hint=FORM)
        found = getattr(found, name)
    pipeline = found if isinstance(found, Pipeline) or not callable(found) else found()
    return _checked(pipeline, target)


def _checked(pipeline: object, target: str) -> Pipeline:
    if not isinstance(pipeline, Pipeline):
        raise SettingError(
            f"{target} is {type(pipeline).__name__}, not a Pipeline",
            hint="name a Pipeline, such as recipes make, or a function that returns one",
        )
    if not pipeline.tiers:
        raise SettingError(
            f"{target} does not say which tiers it has",
            hint="give Pipeline(tiers=(...)), cheapest first; cache_of_thought does",
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
    """Its own cache and recorder are its own affair: the gateway keeps nothing itself. There is no
    second namespace, as nothing of the pipeline tells one tenant's examples from another's."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._tenant = Tenant(pipeline)

    async def open(self, namespace: str, /) -> Tenant:
        if namespace:
            raise ApiError(
                "this gateway serves one pipeline, which has no namespaces",
                status=403,
                type="permission_error",
                code="no_namespaces",
                hint="ask with a key of no namespace",
            )
        return self._tenant

    def counts(self) -> dict[str, int]:
        return {}

    async def aclose(self) -> None:
        pass

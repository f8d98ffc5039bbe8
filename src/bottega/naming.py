"""Models and embedders by name, as in command-line options and configuration files."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Self

from bottega._util.drawings import is_photograph
from bottega._util.native import WITH_TORCH, check_address_space
from bottega.bundled import MODELS
from bottega.bundled.efficientnet import EXTRA, LITE2, check_weights, weights_installed
from bottega.bundled.photo_model import NETWORKS, PHOTOS, PHOTOS_LITE2, PHOTOS_MASTER
from bottega.errors import DISTRIBUTION, SettingError, require_extra
from bottega.generation import (
    OpenAICompletionsGenerator,
    OpenAIGenerator,
    TransformersGenerator,
    bundled,
)
from bottega.generation.bundled_models import PhotographDispatcher
from bottega.image import Image
from bottega.knowledge.embedders.composite import photo_embedder_of
from bottega.knowledge.embedders.minilm import MINILM
from bottega.knowledge.embedders.names import (
    BUNDLED,
    BY_KIND,
    MODES,
    PHOTOS_AND_PIXELS,
    PIXELS,
    RAW_AVERAGE,
    joined_parts,
    photo_tower,
)
from bottega.knowledge.embedders.photo_embedder import PHOTO_PARTS, PHOTOS_BOTH, default_photos
from bottega.openai_api.endpoint import DEFAULT_BASE
from bottega.protocols import Embedder, Generator

# Python refuses to parse thousands of digits; no option needs more than a billion.
MAX_DIGITS = 9
DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

REMOTE, COMPLETIONS = "openai:", "openai-completions:"
WITHOUT_TORCH = (PIXELS, "words")
RUNTIME = "onnxruntime"  # the module that computes the embedders of photographs
EMBEDDERS = (
    "dual",
    BUNDLED,
    *PHOTO_PARTS,
    PHOTOS_AND_PIXELS,
    BY_KIND,
    MINILM,
    *WITHOUT_TORCH,
)
IMAGE_EMBEDDERS = (BUNDLED, *PHOTO_PARTS, PHOTOS_AND_PIXELS, BY_KIND, PIXELS)
JOINED_WEIGHTS = (0.2, 0.4, 0.6)  # of the pixels
# The first model answers prompts with a photograph, the second one all other prompts.
DISPATCHED = {f"{BUNDLED}:{BY_KIND}": (PHOTOS, "apprentice")}
DISPATCHED[f"{BUNDLED}:{BY_KIND}-master"] = (PHOTOS_MASTER, "master")
BUNDLED_MODELS = (BUNDLED, *(f"{BUNDLED}:{name}" for name in MODELS), *DISPATCHED)
SIMULATED = "simulated:codes"
FORM = "write it as package.module:attribute, such as shop:pipeline for shop.py in this folder"
PREFIX_CACHE = "BOTTEGA_PREFIX_CACHE_MB"  # environment variable, see `TransformersGenerator`
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


SAMPLED = 16  # images sampled to select the defaults


def default_embedder(images: Iterable[Image]) -> str:
    """Return the name of the default embedder for these images.

    It is an embedder of photographs (`default_photos`) if the extra `[photos]` is installed, and
    most of the first `SAMPLED` images look like photographs or torch is missing; else `bundled`.
    """
    is_photo = has_photos() and (find_spec("torch") is None or are_photographs(images))
    return default_photos() if is_photo else BUNDLED


def has_photos() -> bool:
    """Return whether the embedder `photos` is installed."""
    return weights_installed() and find_spec(RUNTIME) is not None


def are_photographs(images: Iterable[Image]) -> bool:
    """Return whether most of the first `SAMPLED` images look like photographs."""
    sampled = list(islice(images, SAMPLED))
    return 2 * sum(map(is_photograph, sampled)) > len(sampled)


def default_master(images: Iterable[Image]) -> str:
    """Return the name of the bundled model that answers without demonstrations where these images
    are photographs and the extra `[photos]` is installed, else `bundled`."""
    return f"{BUNDLED}:{PHOTOS_MASTER}" if default_embedder(images) != BUNDLED else BUNDLED


def image_embedders() -> tuple[str, ...]:
    """Return the packaged image embedders that this installation can load, joined ones at several
    weights."""
    bundled = (BUNDLED,) if find_spec("torch") is not None else ()
    joined = tuple(f"{PHOTOS_AND_PIXELS}:{weight}" for weight in JOINED_WEIGHTS)
    photos = (PHOTOS, *joined) if has_photos() else ()
    lite2 = (PHOTOS_LITE2, PHOTOS_BOTH) if photos and weights_installed(LITE2) else ()
    return *bundled, PIXELS, *photos, *lite2


def default_model(embedder: Embedder) -> str:
    """Return the name of the bundled model that can read the vectors of this embedder, else
    `bundled`."""
    photos = photo_embedder_of(embedder)
    return f"{BUNDLED}:{photos.parts[0]}" if photos else BUNDLED


def model_for(embed: str, benchmark: str = "") -> str:
    """Return the name of the simulated model of a benchmark that has one, else of the bundled model
    that can read the vectors of the embedder."""
    simulated = f"simulated:{benchmark.partition(':')[0]}"
    if simulated == SIMULATED:
        return simulated
    photos = photo_tower(embed)
    return f"{BUNDLED}:{PHOTO_PARTS[photos][0]}" if photos else BUNDLED


def _prefix_cache_mb() -> int:
    given = os.environ.get(PREFIX_CACHE, "256")
    if not given.isdecimal():
        raise SettingError(
            f"{PREFIX_CACHE} must be a number of megabytes, got {given!r}",
            hint=f"export {PREFIX_CACHE}=256; 0 reads every prompt completely",
        )
    return int(given)


@dataclass(frozen=True)
class ModelSpec:
    """Name of a model and how to open it, in this process or in a worker."""

    name: str
    concurrency: int = 16
    base_url: str | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    prefix_cache_mb: int = field(default_factory=_prefix_cache_mb)

    @classmethod
    def of(cls, name: str, *, concurrency: int = 16, trust_remote_code: bool = False) -> Self:
        """Return the model with OPENAI_BASE_URL and OPENAI_API_KEY of this process."""
        if not name.startswith((REMOTE, COMPLETIONS)):
            return cls(name, concurrency, trust_remote_code=trust_remote_code)
        base_url = os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE
        return cls(name, concurrency, base_url, os.environ.get("OPENAI_API_KEY", ""))

    def share(self, workers: int) -> Self:
        """Return the model for one of several workers, which share its concurrent requests."""
        return replace(self, concurrency=max(1, self.concurrency // workers))

    def open(self) -> Generator:
        """Return the model: `bundled` (the apprentice), `bundled:NAME`, `openai:NAME` or
        `openai-completions:NAME` (at `base_url`, with at most `concurrency` requests at a time), or
        a Hugging Face id or folder, whose own code runs only with `trust_remote_code`. `base_url`
        and `api_key` default to OPENAI_BASE_URL and OPENAI_API_KEY, `prefix_cache_mb` to
        BOTTEGA_PREFIX_CACHE_MB. Raises `SettingError`."""
        spec = self.name
        check_model(spec)
        endpoints = ((REMOTE, OpenAIGenerator), (COMPLETIONS, OpenAICompletionsGenerator))
        for prefix, endpoint in endpoints:
            if spec.startswith(prefix):
                return endpoint(
                    spec.removeprefix(prefix),
                    base_url=self.base_url,
                    api_key=self.api_key,
                    concurrency=self.concurrency,
                )
        check_address_space(WITH_TORCH)
        if spec == SIMULATED:
            from bottega.tasks.codes import CodeReader  # imports torch

            return CodeReader()
        if spec == BUNDLED:
            return bundled()
        if spec in DISPATCHED:
            photographs, others = map(bundled, DISPATCHED[spec])
            return PhotographDispatcher(photographs, others, spec)
        if spec.startswith(f"{BUNDLED}:"):
            return bundled(spec.removeprefix(f"{BUNDLED}:"))
        # The bundled embedder may have set torch to one thread.
        return TransformersGenerator(
            spec,
            threads=os.cpu_count(),
            prefix_cache_mb=self.prefix_cache_mb,
            trust_remote_code=self.trust_remote_code,
        )


def open_model(spec: str) -> Generator:
    """Return the model of a name, see `ModelSpec.open`."""
    return ModelSpec(spec).open()


def check_model(spec: str) -> None:
    """Raise `SettingError` for an invalid name. Without this check, the hub would be queried for
    minutes for a misspelt name."""
    if spec in (REMOTE, COMPLETIONS):
        raise SettingError(f"{spec} needs a model name", hint=f"set --model {spec}NAME")
    if spec in (*BUNDLED_MODELS, SIMULATED) or spec.startswith((REMOTE, COMPLETIONS)):
        return
    if is_folder_or_hub_id(spec):
        return
    remote = f"{REMOTE}{spec.partition(':')[2] or 'NAME'}"
    raise SettingError(
        f"model is unknown, got {spec!r}",
        hint=suggestion(spec, (*BUNDLED_MODELS, SIMULATED, remote))
        + f"use {', '.join((*BUNDLED_MODELS, SIMULATED))}, openai:NAME, openai-completions:NAME, a"
        " folder, or a hub id OWNER/NAME",
    )


def check_embedder(spec: str) -> None:
    """Raise `SettingError` for an invalid name, and `MissingDependencyError` if packages that the
    embedder needs are missing. No model is loaded."""
    if spec in WITHOUT_TORCH:
        return
    name = spec
    for mode in (*MODES, RAW_AVERAGE):
        name = name.removesuffix(f":{mode}")
    if spec not in EMBEDDERS and not joined_parts(spec) and not is_folder_or_hub_id(name):
        raise SettingError(
            f"embedder is unknown, got {spec!r}",
            hint=suggestion(name.removeprefix(f"{BUNDLED}:"), EMBEDDERS)
            + "use photos, photos-lite2, photos-both, photos+pixels:WEIGHT, dual, bundled, words,"
            " minilm, pixels, by-kind, a folder, or a hub id such as"
            " sentence-transformers/clip-ViT-B-32, with :image, :text, :average or :raw-average"
            " appended",
        )
    photos = PHOTOS if spec == BY_KIND else photo_tower(spec)
    if photos is None or spec == BY_KIND:
        check_torch()
    if photos is not None:
        for part in PHOTO_PARTS[photos]:
            check_weights(NETWORKS[part])
        require_extra(RUNTIME, "photos")
        check_address_space()


def check_text_embedder(spec: str) -> None:
    """Raise `SettingError` for the name of an embedder that embeds no texts."""
    hint = "use words, minilm or FOLDER:text"
    if spec in IMAGE_EMBEDDERS or joined_parts(spec):
        raise SettingError(f"text embedder must embed texts, got {spec!r}", hint=hint)
    try:
        check_embedder(spec)
    except SettingError as error:
        raise SettingError(f"text embedder is unknown, got {spec!r}", hint=hint) from error


def is_folder_or_hub_id(name: str) -> bool:
    """Return whether the name is a folder or looks like a hub id, which is not looked up."""
    return bool(name) and (HUB.fullmatch(name) is not None or Path(name).is_dir())


def suggestion(name: str, choices: Collection[str]) -> str:
    """Return "did you mean ...? " for the choice that a misspelt name resembles, else ""."""
    by_lower_case = {choice.rpartition(":")[2].lower(): choice for choice in choices}
    by_lower_case |= {choice.lower(): choice for choice in choices}
    close = get_close_matches(name.lower(), by_lower_case, n=1)
    return f"did you mean {by_lower_case[close[0]]}? " if close else ""


def check_torch() -> None:
    """Raise `MissingDependencyError` without torch. torch is not imported, which takes seconds."""
    require_extra("torch", "local")
    check_address_space(WITH_TORCH)


def source_digest(target: str) -> str:
    """Return an import path with a digest of the file of its module. Raises `SettingError`."""
    imported(target)
    file = getattr(sys.modules[target.partition(":")[0]], "__file__", None)
    digest = hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()
    return f"{target} (file {digest[:12]})"


def own_code_error(what: str, error: Exception) -> SettingError:
    """Return the error of an exception that the user's own code has raised, with its last line."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return SettingError(
        f"{what} failed: {type(error).__name__}: {error}"
        f" ({Path(where.filename).name}, line {where.lineno})",
        hint="repair the code; run with --debug to see the whole traceback",
    )


def imported(target: str) -> Any:
    """Return the object at an import path, `package.module:attribute`. Raises `SettingError`, also
    for an exception of the module itself."""
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise SettingError(f"the import path is incomplete, got {target!r}", hint=FORM)
    if (here := str(Path.cwd())) not in sys.path:  # as `python -m` does
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module imports another one that is missing
        raise SettingError(f"module {error.name!r} does not exist", hint=FORM) from error
    except Exception as error:
        raise own_code_error(f"importing {module}", error) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise SettingError(f"module {module!r} has no attribute {attribute!r}", hint=FORM)
        found = getattr(found, name)
    return found


def local_model(spec: str, trust_remote_code: bool = False) -> TransformersGenerator:
    """Return a model that runs in this process, not loaded yet. Raises `SettingError`."""
    generator = ModelSpec(spec, trust_remote_code=trust_remote_code).open()
    if not isinstance(generator, TransformersGenerator):
        raise SettingError(
            f"a compressor needs the hidden states of a local model, got {spec}",
            hint="use bundled, a folder, or a Hugging Face id",
        )
    return generator


def embedder_note(default: str, images: Sequence[Image], command: str, reason: str = "") -> str:
    """Return a note on why these images have this embedder, with the command that sets another one.
    Without a `reason`, the note says whether the images look like photographs."""
    if default in PHOTO_PARTS:
        if not (reason or are_photographs(images)):
            reason = f"{BUNDLED} needs torch"
        reason = reason or "the images look like photographs"
        return f"embedder {default}: {reason}; to change it: {command} NAME"
    if not has_photos() and are_photographs(images):
        return (
            "the images look like photographs, which need another embedder: install"
            f" {DISTRIBUTION}[{EXTRA}], then run {command} {PHOTOS_BOTH}"
        )
    return (
        "embedder bundled: the images do not look like photographs; if they are photographs:"
        f" {command} {default_photos()}"
    )


def read_options(
    kind: str, options: str | None, defaults: Mapping[str, float | str]
) -> dict[str, float | str]:
    """Return the given options, each with its default's type. Raises `SettingError`."""
    listed = ", ".join(f"{name}={value}" for name, value in defaults.items())
    hint = f"options of {kind} and their defaults: {listed}"
    chosen: dict[str, float | str] = {}
    for part in [] if options is None else options.split(","):
        name, _, value = (text.strip() for text in part.partition("="))
        if not part.strip():
            raise SettingError(f"an option is empty in '{kind}:{options}'", hint=hint)
        if name in chosen:
            raise SettingError(f"{name} is set twice", hint=hint)
        if name not in defaults:
            raise SettingError(f"{kind} has no option {name!r}", hint=hint)
        if isinstance(defaults[name], str):
            chosen[name] = value
        elif value.isdigit() and len(value) > MAX_DIGITS:
            raise SettingError(
                f"{name} must have at most {MAX_DIGITS} digits, got {len(value)}", hint=hint
            )
        elif isinstance(defaults[name], float) and DECIMAL.fullmatch(value):
            chosen[name] = float(value)
        elif value.isascii() and value.isdigit():
            chosen[name] = int(value)
        else:
            raise SettingError(f"{name} must be a number, got {value!r}", hint=hint)
    return chosen

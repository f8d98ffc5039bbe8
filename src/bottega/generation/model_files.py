"""Models and processors from a folder, the cache or the hub (needs torch and transformers)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

from bottega._util.native import load_from_hub
from bottega.errors import ModelLoadError, first_line
from bottega.generation.plain_text import SAME_FILES, TextProcessor, with_plain_text

hf: Any = transformers  # partly annotated
TEXT_MODELS: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
VISION_MODELS: Any = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
# In the messages of transformers, of models' own code and of Python.
MISSING_PACKAGE = re.compile(
    r"`pip install ([\w.-]+)|requires the (\w+) library|requires `(\w+)` to be installed"
    r"|dependencies: (\w+)|No module named '(\w+)"
)
TORCH_INDEX = ", from the package index that torch came from"


def load_parts(source: str, dtype: str, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Load a model and its processor from a folder, the cache or the hub. Code of the model's own
    runs only with `trust_remote_code`. Raises `ModelLoadError`."""
    try:
        model, processor = load_from_hub(
            source, lambda local: _load(source, dtype, local, trust_remote_code)
        )
    except ModelLoadError:
        raise
    except Exception as error:  # transformers raises errors of any type
        raise _load_error(source, error) from error
    if not hasattr(processor, "image_processor"):
        raise ModelLoadError(
            f"{source} has no image processor", hint="use a model that takes images"
        )
    return model, with_plain_text(model, processor)


def _load_error(source: str, error: Exception) -> ModelLoadError:
    if found := MISSING_PACKAGE.search(str(error)):
        package = next(filter(None, found.groups())).lower()
        return ModelLoadError(
            f"{source} needs the package {package}, which is not installed",
            hint=f"pip install {package}" + TORCH_INDEX * (package == "torchvision"),
        )
    for file in sorted(Path(source).glob("*")):  # the libraries do not name a damaged file
        try:
            if file.suffix == ".json":
                json.loads(file.read_bytes())
            elif file.suffix == ".safetensors":
                with safetensors.safe_open(file, "pt"):
                    pass
        except Exception as damage:
            return ModelLoadError(
                f"{file} cannot be read: {first_line(damage)}", hint="download this file again"
            )
    return ModelLoadError(
        f"{source} cannot be loaded as a vision-language or text model: {first_line(error)}",
        hint="pass the folder or hub id of an image-text-to-text or causal language model; "
        "a hub id needs network access or a filled cache",
    )


def _load(
    source: str, dtype: str, local_files_only: bool, trust_remote_code: bool
) -> tuple[Any, Any]:
    # Without an explicit False, transformers asks on the terminal whether to run the code.
    options = {"local_files_only": local_files_only, "trust_remote_code": trust_remote_code}
    try:
        return _loaded_parts(source, dtype, options)
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise ModelLoadError(
            f"{source} needs code of its own, which is not trusted",
            hint="read that code; to run it, add --trust-remote-code, in Python"
            " trust_remote_code=True",
        ) from error


def _loaded_parts(source: str, dtype: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    try:
        processor = hf.AutoProcessor.from_pretrained(source, **options)
    except (ImportError, ValueError) as error:
        if "torchvision" not in str(error).lower():
            raise
        # Many families (Qwen-VL, SmolVLM) also accept videos, which need torchvision.
        processor = _images_only(source, options)
    kind: Any = hf.AutoModelForImageTextToText
    if not hasattr(processor, "image_processor"):
        config = type(hf.AutoConfig.from_pretrained(source, **options))
        if config in TEXT_MODELS and config not in VISION_MODELS:
            kind, processor = hf.AutoModelForCausalLM, TextProcessor(processor)
    model, found = kind.from_pretrained(
        source, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    for key, weights, wanted in found["mismatched_keys"]:
        raise ModelLoadError(
            f"{source}: {key} must have the shape {[*wanted]} of config.json, got {[*weights]}",
            hint=SAME_FILES,
        )
    return model, processor


def _images_only(source: str, options: Mapping[str, Any]) -> Any:
    def part(kind: Any) -> Any:
        return kind.from_pretrained(source, **options)

    pixels, words = part(hf.AutoImageProcessor), part(hf.AutoTokenizer)
    parts = {"image_processor": pixels, "tokenizer": words}
    # As AutoProcessor: Pixtral's processor is not the one of its configuration, LlavaConfig.
    files = (
        hf.ProcessorMixin.get_processor_dict(source, **options)[0],
        pixels.get_image_processor_dict(source, **options)[0],
        words.init_kwargs,
    )
    name = next((one["processor_class"] for one in files if one.get("processor_class")), None)
    config: Any = type(part(hf.AutoConfig))
    family: Any = processor_class_from_name(name) if name else PROCESSOR_MAPPING[config]

    def arguments(cls: Any, /, *_: object, **__: object) -> list[object]:
        return [parts.get(name) for name in cls.get_attributes()]

    def check(self: object, name: str, argument: object) -> None:
        """Skip the library's check, which rejects absent parts."""

    # A subclass leaves the library's class unchanged for other code in this process.
    overrides = {
        "_get_arguments_from_pretrained": classmethod(arguments),
        "check_argument_for_proper_class": check,
    }
    return part(type(family.__name__, (family,), overrides))

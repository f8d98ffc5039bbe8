"""Getting a model and its processor from a folder, the cache or the hub. Needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from bottega.errors import ModelLoadError

hf: Any = transformers  # half annotated: what it returns is checked by use
HUB_WITHIN = 10.0


def load_parts(source: str, dtype: str) -> tuple[Any, Any]:
    try:
        model, processor = _stored(source, dtype)
    except Exception as error:  # transformers raises whatever its files provoke
        raise ModelLoadError(
            f"{source} cannot be loaded as a vision-language model: {first_line(error)}",
            hint="give the folder or the hub id of a model for image-text-to-text; "
            "a hub id needs the network or a filled cache",
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ModelLoadError(
            f"{source} has no image processor", hint="use a model that takes images"
        )
    return model, processor


def _stored(source: str, dtype: str) -> tuple[Any, Any]:
    """Model and processor, as stored; the cache goes before the hub. Raises what the libraries do.

    A hub that cannot be reached would be tried for minutes, file by file: it is asked once first.
    """
    try:
        return _load(source, dtype, local_files_only=True)
    except (OSError, ValueError):  # not cached; what the hub says is reported instead
        if Path(source).exists():
            raise
    huggingface_hub.HfApi().model_info(source, timeout=HUB_WITHIN)
    return _load(source, dtype, local_files_only=False)


def _load(source: str, dtype: str, local_files_only: bool) -> tuple[Any, Any]:
    processor = _load_processor(source, local_files_only)
    model = hf.AutoModelForImageTextToText.from_pretrained(
        source, dtype=dtype, local_files_only=local_files_only
    )
    return model, processor


def _load_processor(source: str, local_files_only: bool) -> Any:
    """Many families (Qwen-VL, SmolVLM) take videos too, which needs torchvision: where only that
    is missing, their processor is built for images alone."""
    try:
        return hf.AutoProcessor.from_pretrained(source, local_files_only=local_files_only)
    except ImportError as error:
        if "torchvision" not in str(error).lower():
            raise
    return _images_only(source, local_files_only)


def _images_only(source: str, local_files_only: bool) -> Any:
    def part(kind: Any) -> Any:
        return kind.from_pretrained(source, local_files_only=local_files_only)

    parts = {"image_processor": part(hf.AutoImageProcessor), "tokenizer": part(hf.AutoTokenizer)}
    family: Any = PROCESSOR_MAPPING[type(part(hf.AutoConfig))]

    def arguments(cls: Any, /, *_: object, **__: object) -> list[object]:
        return [parts.get(name) for name in cls.get_attributes()]

    def check(self: object, name: str, argument: object) -> None:
        """The library's check has no notion of a part that is absent."""

    # A class of its own leaves the library's untouched for others in this process.
    overrides = {
        "_get_arguments_from_pretrained": classmethod(arguments),
        "check_argument_for_proper_class": check,
    }
    return part(type(family.__name__, (family,), overrides))


def first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__

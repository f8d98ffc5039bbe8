"""Processor of the bundled models without transformers: chat template, tokenizer and pixels.

Needs torch, tokenizers and jinja2. With the settings of the apprentice and the master, results
equal those of transformers' `LlavaProcessor`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

# Marks the end of the text to continue. A message may contain it too: its last occurrence counts.
CONTINUATION_MARK = "CONTINUE_FINAL_MESSAGE_TAG"


class FastVlmProcessor:
    """Processor with the attributes and methods that `generation` uses."""

    def __init__(self, folder: Path) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        settings = _json(folder / "processor_config.json")
        self.image_token = str(settings["image_token"])
        self.image_processor = FastVlmImageProcessor(settings["image_processor"])
        self.tokenizer = FastVlmTokenizer(folder)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        self._template = environment.from_string(source)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of a conversation. Raises `ValueError` if it is empty, or if
        `continue_final_message` is set and the last message has no text."""
        if not conversation:
            raise ValueError("the conversation has no messages")
        turns = [{**turn, "content": list(turn["content"])} for turn in conversation]
        if continue_final_message:
            parts = turns[-1]["content"]
            last = max((i for i, part in enumerate(parts) if "text" in part), default=None)
            if last is None:
                raise ValueError("the last message has no text to continue")
            parts[last] = {**parts[last], "text": parts[last]["text"] + CONTINUATION_MARK}
        text = self._template.render(messages=turns, add_generation_prompt=add_generation_prompt)
        if not continue_final_message:
            return text
        return text[: text.rindex(CONTINUATION_MARK)].rstrip()


class FastVlmTokenizer:
    """Tokenizer of a model folder, with the attributes and methods of transformers' tokenizers that
    `generation` uses."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = _json(folder / "tokenizer_config.json")
        self.bos_token, self.eos_token = settings["bos_token"], settings["eos_token"]
        self.eos_token_id: int = self._tokenizer.get_vocab()[self.eos_token]
        added = self._tokenizer.get_added_tokens_decoder()
        self.all_special_tokens = [token.content for token in added.values() if token.special]
        self._added = {token.content: index for index, token in added.items()}

    def get_added_vocab(self) -> dict[str, int]:
        return self._added

    def __call__(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> dict[str, list[list[int]]]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in encodings]}

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text


class FastVlmImageProcessor:
    """Image processor that resizes images to a fixed size and normalizes their pixels."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._mean = np.array(settings["image_mean"], np.float32)
        self._std = np.array(settings["image_std"], np.float32)

    def to_dict(self) -> dict[str, Any]:
        return dict(self._settings)

    def __call__(
        self, images: Sequence[Pillow.Image], return_tensors: str = "pt"
    ) -> dict[str, Any]:
        """Return `pixel_values` (images, 3, height, width) in float32. `return_tensors` is ignored:
        the result is a torch tensor."""
        import torch

        size, resample = self._settings["size"], self._settings["resample"]
        shape = size["width"], size["height"]
        rows = [np.asarray(image.convert("RGB").resize(shape, resample)) for image in images]
        # The product is computed in double precision, as in transformers.
        scaled = (np.stack(rows) * self._settings["rescale_factor"]).astype(np.float32)
        pixels = ((scaled - self._mean) / self._std).transpose(0, 3, 1, 2)
        return {"pixel_values": torch.from_numpy(np.ascontiguousarray(pixels))}


def _json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values

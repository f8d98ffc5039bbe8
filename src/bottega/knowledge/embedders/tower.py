"""The vision tower of the bundled model as an image embedder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from PIL import Image as Pillow

from bottega.bundled import LIKENESS, bundled_folder
from bottega.errors import EmbeddingError
from bottega.image import Image
from bottega.knowledge.embedders.images import unit_images
from bottega.knowledge.embedders.loading import loading_model
from bottega.protocols import Vectors
from bottega.types import Query

DIMENSION = LIKENESS.stop - LIKENESS.start
# What changes the pixels that the tower sees.
PREPARATION = ("size", "image_mean", "image_std", "resample", "rescale_factor")


class TowerEmbedder:
    """Embeds images with the tower and connector of a FastVLM folder, in float32.

    A vector is the unit norm of the connector's first 80 dimensions. The fingerprint covers the
    weights of both, not the decoder's: training that further leaves a knowledge base valid.
    `threads` sets torch's thread count, which holds for the whole process; None leaves it.
    """

    def __init__(
        self, folder: str | Path, *, batch_size: int = 64, threads: int | None = None
    ) -> None:
        if not Path(folder).is_dir():
            raise EmbeddingError(f"{folder} is not a folder", hint="check the path")
        with loading_model(str(folder)):
            import torch
            from transformers import AutoModelForImageTextToText, AutoProcessor

            if threads is not None:
                torch.set_num_threads(threads)
            model = AutoModelForImageTextToText.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True
            )
            processor = AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                str(folder), local_files_only=True
            )
            self._model = model.model
            self._images = processor.image_processor
            self._batch_size = batch_size
            self._preparation = self._images.to_dict()
            self._side = max(self._preparation["size"].values())
            self.fingerprint = f"tower-{DIMENSION} {self._digest()}"

    @classmethod
    def bundled(cls, *, batch_size: int = 64, threads: int | None = None) -> Self:
        """The model that comes with the package."""
        return cls(bundled_folder(), batch_size=batch_size, threads=threads)

    @property
    def dimension(self) -> int:
        return DIMENSION

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return unit_images(
            queries,
            self._encode,
            dimension=DIMENSION,
            at_least=self._side,
            batch_size=self._batch_size,
        )

    def cells(self, image: Image) -> Vectors:
        """(cells, channels) of the tower's last map that is not one single cell."""
        import torch

        pixels = self._images([image.decode(self._side)], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            seen = self._model.vision_tower(pixels, output_hidden_states=True)
        maps = [states.flatten(2)[0].T for states in seen.hidden_states]
        rows: Vectors = next(cells for cells in reversed(maps) if len(cells) > 1).numpy()
        return rows

    def _encode(self, pictures: list[Pillow.Image]) -> Vectors:
        import torch

        pixels = self._images(pictures, return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            tokens = self._model.get_image_features(pixels).pooler_output
            vectors: Vectors = tokens.mean(1)[:, LIKENESS].numpy()
            return vectors

    def _digest(self) -> str:
        digest = hashlib.sha256()
        settings = [self._preparation.get(name) for name in PREPARATION]
        digest.update(json.dumps(settings).encode())
        for part in (self._model.vision_tower, self._model.multi_modal_projector):
            for name, weight in sorted(part.state_dict().items()):
                digest.update(name.encode())
                digest.update(weight.contiguous().numpy().tobytes())
        return digest.hexdigest()[:12]

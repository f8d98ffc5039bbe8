"""`python -m training.photos [NAME] [--images FOLDER]`: write a photograph model without its tower.

FOLDER holds one folder per class of photographs, such as the training part of Tiny ImageNet. They
determine the projection; without this option it does not change. The weights of the decoder are
hand-written (`training.photo_decoder`). The published weights of the tower are not stored:
`bottega.bundled.photo_model` adds them on the user's machine.

Classes in `EVALUATED` are left out: they occur in data sets that the documentation evaluates.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from safetensors.torch import load, save
from torch import Tensor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from bottega.bundled.efficientnet import EfficientNetLite, tower_tensors, vision_config
from bottega.bundled.photo_model import DECODER, NETWORKS, PHOTOS, PHOTOS_LITE2
from training.circuits import spherical_codes
from training.export import ANSWER_TOKENS, build_processor
from training.photo_decoder import (
    CODE_WIDTHS,
    IN_QUESTION,
    IN_QUESTION_INPUT,
    MATCH_SIZE,
    Strengths,
    build_model,
    install,
)
from training.tokenizer import PHOTO_TEMPLATE, train_tokenizer

OUT = Path("src/bottega/bundled")
PER_CLASS = 60
BATCH = 8
WHITENING = 0.4  # directions are divided by their standard deviation to this power
# WordNet ids of Tiny ImageNet classes that CIFAR-10 or Fashion-MNIST also show: frogs, birds, dogs,
# cats, deer, vehicles, ships, garments, shoes and bags.
EVALUATED = frozenset((
    "n01641577", "n01644900", "n01855672", "n02002724", "n02056570", "n02058221", "n02085620",
    "n02094433", "n02099601", "n02099712", "n02106662", "n02113799", "n02123045", "n02123394",
    "n02124075", "n02125311", "n02129165", "n02423022", "n02669723", "n02730930", "n02769748",
    "n02814533", "n02837789", "n02963159", "n03100240", "n03393912", "n03404251", "n03444034",
    "n03447447", "n03599486", "n03617480", "n03662601", "n03670208", "n03763968", "n03770439",
    "n03796401", "n03977966", "n03980874", "n04133789", "n04146614", "n04254777", "n04285008",
    "n04371430", "n04465501", "n04487081", "n04532106",
))  # fmt: skip


def photographs(folder: Path) -> list[Path]:
    """Return up to PER_CLASS photographs of each class that no evaluation uses."""
    classes = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    return [
        image
        for path in classes
        if path.name not in EVALUATED
        for image in sorted(path.rglob("*.[jJpP]*[gG]"))[:PER_CLASS]
    ]


def cropping_image_processor(network: EfficientNetLite, shorter_side: int | None = None) -> Any:
    """Return an image processor that scales the shorter side to this many pixels (None: the
    network's side) and keeps the middle square of the network's side. The published networks were
    measured with a shorter side of 8/7 of theirs, which cuts off an eighth."""
    side = network.side
    return LlavaImageProcessorPil(
        do_resize=True,
        size={"shortest_edge": shorter_side or side},
        resample=3,  # bicubic
        do_center_crop=True,
        crop_size={"height": side, "width": side},
        do_pad=False,
        do_convert_rgb=True,
        image_mean=[127 / 255] * 3,
        image_std=[128 / 255] * 3,
    )


@torch.inference_mode()
def features(model: Any, images: Any, paths: Sequence[Path]) -> Tensor:
    """Return the tower's features (photographs, 1280)."""
    rows = []
    for start in range(0, len(paths), BATCH):
        opened = [Pillow.open(path).convert("RGB") for path in paths[start : start + BATCH]]
        pixels = images(opened, return_tensors="pt")["pixel_values"]
        rows.append(model.model.vision_tower(pixels).last_hidden_state.flatten(1))
    return torch.cat(rows)


def projection(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return a projection (MATCH_SIZE, 1280) and an offset (MATCH_SIZE,) that centre the features,
    whiten them in part and give them a mean length of 1."""
    mean = rows.mean(0)
    centred = (rows - mean).double()
    _, deviation, directions = np.linalg.svd(
        centred.numpy() / len(rows) ** 0.5, full_matrices=False
    )
    scale = (deviation[:MATCH_SIZE] + 1e-3) ** -WHITENING
    matrix = torch.from_numpy(directions[:MATCH_SIZE] * scale[:, None])
    matrix = matrix / (centred @ matrix.T).norm(dim=1).mean()
    return matrix.float(), -(matrix @ mean.double()).float()


@torch.no_grad()
def install_projection(projector: Any, matrix: Tensor, offset: Tensor) -> None:
    """Write the projection into the projector. It is linear: gelu(x) - gelu(-x) = x."""
    size = MATCH_SIZE
    first, second = projector.linear_1, projector.linear_2
    for linear in (first, second):
        linear.weight.zero_()
        linear.bias.zero_()
    for part, way in ((slice(0, size), 1.0), (slice(size, 2 * size), -1.0)):
        first.weight[part], first.bias[part] = way * matrix, way * offset
        second.weight[:size, part] = way * torch.eye(size)
    second.bias[IN_QUESTION] = IN_QUESTION_INPUT  # no answer continues after an image


def export(
    model: Any, tokenizer: Any, images: Any, folder: Path, template: str = PHOTO_TEMPLATE
) -> None:
    """Write the files of the model, with all weights but the tower's in half precision."""
    generation = model.generation_config
    generation.max_new_tokens, generation.do_sample = ANSWER_TOKENS, False
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
    model.config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer.chat_template = template
    build_processor(tokenizer, images, template).save_pretrained(folder)
    weights = {
        name: tensor.half().contiguous()
        for name, tensor in model.state_dict().items()
        if not name.startswith("model.vision_tower.")
    }
    # Most weights are zero. Without a time of writing, equal weights give an equal file.
    packed = gzip.compress(save(weights, metadata={"format": "pt"}), mtime=0)
    (folder / DECODER).write_bytes(packed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.photos", description=__doc__)
    parser.add_argument("name", choices=(PHOTOS, PHOTOS_LITE2), nargs="?", default=PHOTOS)
    parser.add_argument("--images", type=Path, help="folder of class folders")
    parser.add_argument("--out", type=Path, default=OUT, help="write the model's folder here")
    args = parser.parse_args()
    torch.manual_seed(0)
    network = NETWORKS[args.name]
    tokenizer, model = train_tokenizer(), build_model(vision_config(network))
    images = cropping_image_processor(network)
    projector = model.model.multi_modal_projector
    if args.images:
        model.model.vision_tower.load_state_dict(tower_tensors(network))
        paths = photographs(args.images)
        print(f"{len(paths)} photographs", flush=True)
        install_projection(projector, *projection(features(model, images, paths)))
    else:
        shipped = load(gzip.decompress((OUT / args.name / DECODER).read_bytes()))
        prefix = "model.multi_modal_projector."
        projector.load_state_dict(
            {name.removeprefix(prefix): t for name, t in shipped.items() if name.startswith(prefix)}
        )
    install(model, spherical_codes(widths=CODE_WIDTHS), tokenizer, Strengths())
    export(model, tokenizer, images, args.out / args.name)


if __name__ == "__main__":
    main()

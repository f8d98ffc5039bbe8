"""The bundled model's shape: a standard FastVLM with a ResNet tower and a two-layer Llama.

The hidden vector is cut into named slices, one for each thing a position knows. The circuits
(`training.circuits`) read and write these slices only, which keeps the trained model legible.
"""

from typing import Any

from transformers import FastVlmConfig, FastVlmForConditionalGeneration

from training.tokenizer import BOS, END, IMAGE, PAD, SPECIAL, VOCABULARY
from training.tower import EMBEDDING, FEATURES, HIDDEN, VISION_CONFIG

HEADS, HEAD_DIM = 4, 256
PAIRS = HEAD_DIM // 2  # rotary pairs of a head: dims i and i + PAIRS turn together
MLP = 96
# Most rotary pairs must hardly turn over a prompt of thousands of tokens: they carry content.
ROPE_THETA = 1e12
MAX_POSITIONS = 8192

PICTURE = slice(0, EMBEDDING)  # the picture of a position: its own, or the nearest before it
TEXT = 80  # set for text; zero for pictures and for the three tokens that stand for their lack
TOKEN = slice(81, 153)  # which token this is
SHORT = slice(81, 129)  # the part of TOKEN that is copied to the next position
SHORTER = slice(81, 105)  # the part that is mixed into contexts
BEFORE = slice(153, 201)  # SHORT of the token one place before
CONTEXT = slice(201, 225)  # fading mixture of SHORTER of the tokens up to here
EARLIER = slice(225, 249)  # CONTEXT as it was one place before
OPENS = 249  # set for <user> and <system>
STARTS = 250  # set for <bos>
ASKED = 251  # set where a turn was opened since the last picture: in questions, not in answers
BLIND = 252  # set before the first turn
ANSWERS = 253  # set for <answer>


def token_id(token: str) -> int:
    return SPECIAL.index(token)


def text_config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": True,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": True,
        "pad_token_id": token_id(PAD),
        "bos_token_id": token_id(BOS),
        "eos_token_id": token_id(END),
    }


def build_model() -> Any:
    config = FastVlmConfig(
        vision_config={"model_type": "resnet", "hidden_size": FEATURES, **VISION_CONFIG},
        text_config=text_config(),
        image_token_index=token_id(IMAGE),
        image_seq_length=1,
        tie_word_embeddings=True,
    )
    model: Any = FastVlmForConditionalGeneration(config)
    return model.eval()

"""Architecture of the bundled models: a standard FastVLM with a ResNet tower and a two-layer Llama.

The hidden vector consists of named slices, one per kind of information. The circuits
(`training.circuits`) read and write only these slices, which keeps the model interpretable. The
five heads of a layer share one key and one value projection (multi-query attention): they read the
same content and differ in their attention weights.
"""

from dataclasses import dataclass
from typing import Any

from transformers import FastVlmConfig, FastVlmForConditionalGeneration

from bottega.tasks.rules import RULES
from bottega.tasks.task import RELATIONS, TOPICS
from training.concepts import CONCEPTS, DIGITS, NAME, ROW, SCENE, part
from training.rotary import MAX_POSITIONS, Rotary
from training.tokenizer import BOS, END, IMAGE, PAD, VOCABULARY, token_id
from training.tower import EMBEDDING, FEATURES, VISION_CONFIG

HEADS = 5
ROTARY = Rotary(head_dim=192, theta=1e20)

CODE, SHORT_CODE, SHORTER_CODE = 64, 48, 24


@dataclass(frozen=True)
class Size:
    """Sizes of a model. `hidden` must be a multiple of HEADS, as Llama requires."""

    hidden: int
    mlp: int


APPRENTICE = Size(hidden=365, mlp=208)
MASTER = Size(hidden=385, mlp=256)


def after(before: slice | int, size: int) -> slice:
    start = before.stop if isinstance(before, slice) else before + 1
    return slice(start, start + size)


# Match key of a position: the last image or, after a question about a property, its value (KEY_*).
KEY = slice(0, EMBEDDING)
SEEN = after(KEY, CONCEPTS)  # concepts of the last image, in the order of `training.concepts`
TEXT = SEEN.stop  # set for text; zero for images and for <user>, <system> and <bos>
TOKEN = after(TEXT, CODE)  # code of the token
SHORT = slice(TOKEN.start, TOKEN.start + SHORT_CODE)  # copied to the next position
SHORTER = slice(TOKEN.start, TOKEN.start + SHORTER_CODE)  # mixed into contexts
BEFORE = after(TOKEN, SHORT_CODE)  # SHORT of the previous token
CONTEXT = after(BEFORE, SHORTER_CODE)  # fading mixture of SHORTER of the tokens up to here
EARLIER = after(CONTEXT, SHORTER_CODE)  # CONTEXT of the previous token
OPENS = EARLIER.stop  # set for <user> and <system>
STARTS = OPENS + 1  # set for <bos>
IN_QUESTION = OPENS + 2  # set where a turn began after the last image
BLIND = OPENS + 3  # set before the first turn
ANSWERS = OPENS + 4  # set for <answer>
NUMBER, IS_RULE, COLON = OPENS + 5, OPENS + 6, OPENS + 7  # set for such tokens
AFTER_RULE, AFTER_NUMBER = OPENS + 8, OPENS + 9  # IS_RULE and NUMBER of the token before
TOPIC = after(AFTER_NUMBER, len(TOPICS))  # requested property: set for topic words and after them
RULE = after(TOPIC, len(RULES))  # set for words of rules and a few positions after them
STEPS = after(RULE, 18)  # left number >= 1..9, right number >= 1..9, each UNIT or 0
UNIT = STEPS.stop
assert APPRENTICE.hidden > UNIT

# Only in the master, which reads digits and names properties.
DIGIT = after(UNIT, DIGITS)
ABOUT_DIGIT = DIGIT.stop  # a topic of its own
SHOWN = ABOUT_DIGIT + 1  # set in layer 1 once a demonstration was shown
ENDS = ABOUT_DIGIT + 2  # set for <end>
ASPECT, VALUE = ABOUT_DIGIT + 3, ABOUT_DIGIT + 4  # set for "colour" and " red"
NEW_LINE, ANSWER_WORD = ABOUT_DIGIT + 5, ABOUT_DIGIT + 6  # set for such tokens
AFTER_ASPECT, AFTER_COLON = ABOUT_DIGIT + 7, ABOUT_DIGIT + 8
assert MASTER.hidden > AFTER_COLON

NAMED = slice(SEEN.start + part(NAME).start, SEEN.start + part(NAME).stop)
SCENES = slice(SEEN.start + part(SCENE.start).start, SEEN.start + part(SCENE.stop - 1).stop)
SYMBOL, LEFT, RIGHT = (
    slice(SEEN.start + part(i).start, SEEN.start + part(i).stop) for i in range(ROW.start, ROW.stop)
)

# Parts of KEY once the requested value replaces the image.
KEY_SCENES = slice(0, SCENES.stop - SCENES.start)
KEY_SYMBOL = after(KEY_SCENES, SYMBOL.stop - SYMBOL.start)
KEY_NAMED = after(KEY_SYMBOL, NAMED.stop - NAMED.start)
KEY_RELATION = after(KEY_NAMED, len(RELATIONS))
KEY_DIGIT = after(KEY_RELATION, DIGITS)
assert KEY_DIGIT.stop <= KEY.stop


def build_model(size: Size) -> Any:
    return fastvlm(
        {"model_type": "resnet", "hidden_size": FEATURES, **VISION_CONFIG},
        ROTARY,
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        tie_word_embeddings=True,
    )


def fastvlm(
    vision: dict[str, Any], rotary: Rotary, *, tie_word_embeddings: bool, **decoder: int
) -> Any:
    """Return a new model with one token per image, attention biases, and one key-value head."""
    config = FastVlmConfig(
        vision_config=vision,
        text_config={
            "model_type": "llama",
            "num_key_value_heads": 1,
            "head_dim": rotary.head_dim,
            "attention_bias": True,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {"rope_type": "default", "rope_theta": rotary.theta},
            "tie_word_embeddings": tie_word_embeddings,
            "pad_token_id": token_id(PAD),
            "bos_token_id": token_id(BOS),
            "eos_token_id": token_id(END),
            **decoder,
        },
        image_token_index=token_id(IMAGE),
        image_seq_length=1,
        tie_word_embeddings=tie_word_embeddings,
    )
    model: Any = FastVlmForConditionalGeneration(config)
    return model.eval()

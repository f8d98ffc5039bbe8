"""A byte-level BPE over label-like words, and the chat template of the bundled model."""

from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024
PAD, BOS, END, IMAGE, USER, SYSTEM, ANSWER = (
    "<pad>", "<bos>", "<end>", "<image>", "<user>", "<system>", "<answer>",
)  # fmt: skip
SPECIAL = (PAD, BOS, END, IMAGE, USER, SYSTEM, ANSWER)
UNKNOWN = "unknown"  # what the model says without demonstrations; must be one token

# Every prompt opens with a demonstration without an image, so a prompt without demonstrations
# has exactly one answer to copy: "unknown". In a user turn the text precedes the images, so the
# image an answer belongs to is always the nearest one before it.
CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- else -%}
{%- for part in content if part.type == 'text' -%}
{{ part.text | trim }}{{ ' ' if not loop.last }}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- '<bos><answer>unknown<end>' -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<user>' + text_of(message.content) -}}
{%- if message.content is not string -%}
{%- for part in message.content if part.type == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<answer>' + text_of(message.content) + '<end>' -}}
{%- else -%}
{{- '<system>' + text_of(message.content) + '<end>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt or messages[-1].role == 'user' -%}{{ '<answer>' }}{%- endif -%}
"""


def label_words() -> list[str]:
    """The words the vocabulary is built on: common names of things one might classify."""
    text = files("training").joinpath("words.txt").read_text(encoding="utf-8")
    return sorted(set(text.split()))


def train_tokenizer() -> Any:
    """Deterministic: the same words give the same vocabulary. Any Unicode text round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = label_words()
    # A label opens with a bare word and goes on with words after a blank.
    corpus = words + [f"a {word}" for word in words] + [UNKNOWN] * 50
    bpe.train_from_iterator(corpus, trainer)
    make: Any = PreTrainedTokenizerFast  # untyped
    tokenizer = make(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        extra_special_tokens={"image_token": IMAGE},
        additional_special_tokens=[USER, SYSTEM, ANSWER],
        padding_side="left",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer

"""Byte-level BPE over label-like words, and the chat template of the bundled models."""

from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bottega.tasks.attributes import VALUES
from bottega.tasks.glyphs import NAMES
from bottega.tasks.rules import RULES
from bottega.tasks.task import STATES, TOPIC_WORDS

VOCABULARY = 1152
PAD, BOS, END, IMAGE, USER, SYSTEM, ANSWER, PASSAGE = (
    "<pad>", "<bos>", "<end>", "<image>", "<user>", "<system>", "<answer>", "<passage>",
)  # fmt: skip
SPECIAL = (PAD, BOS, END, IMAGE, USER, SYSTEM, ANSWER, PASSAGE)
UNKNOWN = "unknown"  # what the model says without demonstrations; must be one token
NUMBERS = tuple(str(n) for n in range(19))
DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGIT_WORDS = ("digit", "numeral", "figure")

# Every prompt opens with a demonstration without an image, so a prompt without demonstrations
# has exactly one answer to copy: "unknown". In a user turn the text precedes the images, so the
# image an answer belongs to is always the nearest one before it. A user turn without an answer is
# a passage: only its text is read, and it is closed like an answer, because what it states can
# be copied to its end.
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
{%- if message.role == 'user' and not loop.last and loop.nextitem.role == 'user' -%}
{{- '<passage>' + text_of(message.content) + '<end>' -}}
{%- elif message.role == 'user' -%}
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
# The photograph model does not read questions: their wording must not change an answer.
PHOTO_TEMPLATE = """\
{{- '<bos><answer>unknown<end>' -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<user>' -}}
{%- if message.content is not string -%}
{%- for part in message.content if part.type == 'image' -%}{{ '<image>' }}{%- endfor -%}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<answer>' -}}
{%- if message.content is string -%}{{ message.content | trim }}
{%- else -%}
{%- for part in message.content if part.type == 'text' -%}
{{ part.text | trim }}{{ ' ' if not loop.last }}
{%- endfor -%}
{%- endif -%}
{{- '<end>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt or messages[-1].role == 'user' -%}{{ '<answer>' }}{%- endif -%}
"""

# The photograph master can only name things. Its prompt ends with <passage> where the question
# requires something else; it then answers "unknown".
OTHER_OPENINGS = (
    "are", "can", "could", "did", "do", "does", "had", "has", "have", "how", "is", "may", "should",
    "was", "were", "when", "where", "who", "whose", "why", "will", "would",
)  # fmt: skip
OTHER_TOPICS = (
    "age", "brand", "color", "colors", "colour", "colours", "count", "date", "doing", "happening",
    "letter", "letters", "made", "mood", "number", "numbers", "read", "reads", "say", "says",
    "season", "shape", "size", "text", "time", "weather", "word", "words", "written", "year",
)  # fmt: skip
PHOTO_MASTER_TEMPLATE = (
    f"{{%- set openings = {list(OTHER_OPENINGS)} -%}}\n"
    f"{{%- set topics = {list(OTHER_TOPICS)} -%}}\n"
    + """\
{%- macro prompt_end(content) -%}
{%- set state = namespace(named=True) -%}
{%- if content is not string -%}
{%- set content = content | selectattr('type', 'equalto', 'text') | map(attribute='text') -%}
{%- endif -%}
{%- set question = (content if content is string else content | join(' ')).split('?')[0] -%}
{%- for word in question.split() -%}
{%- set plain = word | lower | replace(',', '') | replace('.', '') -%}
{%- if plain in topics or loop.first and plain in openings -%}
{%- set state.named = False -%}
{%- endif -%}
{%- endfor -%}
{{ '<answer>' if state.named else '<passage>' }}
{%- endmacro -%}
"""
    + PHOTO_TEMPLATE.replace("{{ '<answer>' }}", "{{ prompt_end(messages[-1].content) }}")
)


def token_id(special: str) -> int:
    """Return the id of a special token."""
    return SPECIAL.index(special)


def label_words() -> list[str]:
    """Return the words of the vocabulary: common names of classes."""
    text = files("training").joinpath("words.txt").read_text(encoding="utf-8")
    return sorted(set(text.split()))


def circuit_pieces() -> list[str]:
    """Return texts that must be one token each, because circuits refer to them."""
    after_blank = [word for words in TOPIC_WORDS.values() for word in words]
    after_blank += [*DIGIT_NAMES, *DIGIT_WORDS]
    after_blank += [*NAMES, *STATES, *NUMBERS, *(w for words in VALUES.values() for w in words)]
    opening = [UNKNOWN, *RULES, *VALUES, "digit", "Answer"]
    padding = ["What", " of", " the", " it", " in", " you", " do", " see"]
    return [*opening, *padding, *(f" {word}" for word in after_blank)]


def train_tokenizer() -> Any:
    """Train deterministically: equal words give an equal vocabulary. Any Unicode text
    round-trips."""
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
    corpus = words + [f"a {word}" for word in words] + circuit_pieces() * 40
    bpe.train_from_iterator(corpus, trainer)
    make: Any = PreTrainedTokenizerFast  # untyped
    tokenizer = make(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        extra_special_tokens={"image_token": IMAGE},
        additional_special_tokens=[USER, SYSTEM, ANSWER, PASSAGE],
        padding_side="left",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def piece_id(tokenizer: Any, text: str) -> int:
    """Return the id of a text that is one token. Raises `ValueError` for other texts."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"{text!r} is {len(ids)} tokens")
    return ids[0]

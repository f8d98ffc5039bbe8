"""Model cards stored beside the weights; their tables are measured."""

from __future__ import annotations

HEAD = """\
---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
---

# The bundled {name}

{what}

With it, everything in Bottega can be run, tested and studied without a download. It is a
standard `FastVlmForConditionalGeneration`: a ResNet that turns a 64 x 64 image into one token,
and a two-layer Llama. No custom code:

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder)
inputs = processor.apply_chat_template(
    conversations,
    tokenize=True,
    return_dict=True,
    return_tensors="pt",
    add_generation_prompt=True,
    processor_kwargs={{"padding": True}},
)
answers = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
```
"""

USE = """
A demonstration is a user turn with an image and an assistant turn with its answer, after a
rationale if there is one ("add 3 4", a new line, "Answer: 7"). Answers may have any length and any
text: the model copies them from the demonstrations token by token. A user turn without an
assistant turn is a passage; questions may ask for the facts that it states about a named glyph.
`model.get_image_features(pixel_values=...).pooler_output[:, 0, :80]`, scaled to unit length, is an
embedding for retrieval. The model itself matches images by it.

## Training

The two parts were made in different ways, and only the first was learned.

1. **The vision tower was trained** on synthetic images, in three stages of 3,200, 3,000 and 3,000
   steps: a supervised contrastive loss; the same loss plus reading of five scene attributes, of
   rows of two numbers and a symbol, and of 24 named glyphs (cross-entropy and squared distance to
   one-hot); then larger alphabets, where the reading outputs must be zero on images of other kinds.
   The images are characters made by motor programs of one to five pen strokes, with jitter, in many
   styles down to 8 x 8 pixels; **the ten digits 0 to 9, from strokes written for this purpose**;
   coloured blobs, textures, rows of objects, roads and shores; scenes of shapes; rows of digits.
   There are no photographs, no handwriting and no data set{but}.
2. **The decoder was written**: its weights are installed circuits, not learned. Gradient descent
   alone found no visual matching within 2,000 steps. One head finds the nearest image, one the
   previous token, two the recent context, one the words of a question; gated units replace the
   image by the requested attribute; one head of the second layer matches and copies. Gated units
   that count steps of a thermometer code compute sums. Every weight can be trained, but the
   decoder's weights were not; `training/circuits.py` explains each circuit.

Its in-context learning is real: every answer comes from the demonstrations in the prompt. It is not
a model of how such circuits emerge in training.

## Limitations
{cannot}
- It does not understand photographs: with ten retrieved demonstrations it names a third of 500
  CIFAR-10 photographs, and raw pixels do better. Bottega warns once.
- It understands only {topics} of questions; other text in a question is skipped, and a new word for
  "colour" has no effect.
- It does not compare images or follow instructions. For a class that is not among the
  demonstrations it answers with the most similar one.
- It computes only the four rules of the `rules` task (add, differ, larger, smaller), on the digits
  0 to 9. An answer that begins with one of these words, after a question for a symbol, starts the
  calculation.
- Only the last image before an answer counts, also in a turn with several images.
- Images are resized to 64 x 64 pixels without their aspect ratio, and details are lost. Bottega
  first centres grey ink on plain paper, white on black, if both sides have more than 64 pixels;
  other programs must do so themselves.
- An answer with repeated syllables or phrases may loop or be cut short ("1000" as "100", "émigré"
  as "é"); so may a number of three or four digits with commas.
- For its own synthetic scenes, rows and glyphs, other words can act as a question: "How many
  thanks?" asks a scene for its count. A label such as "what shape" acts as a question within an
  answer. Labels that contain "is", "called" or "named" are copied less reliably.
- With a passage about the right glyph but the wrong relation it answers with the stated fact.
- In rules, a question without one of the words for a symbol is ignored.
- It computes in float32: the file stores half precision, which loads as float32 by default. Its
  attention scores span thousands, so half-precision computation is not supported.

## Results

Each row is `bottega eval BENCHMARK --methods METHOD --shots SHOTS` with seed 0, through the
processor, the chat template and `generate`; docs/data.md describes the benchmarks. Intervals are
Wilson's at 95 %. `vote` is the majority label of the retrieved examples, without a model; the
nearest example decides a tie. `nearest` is the label of the most similar example by the model's own
embedding, the same as `vote` at one shot; `knn` is a vote weighted by similarity. Differences are
on the same items, with Newcombe's interval and McNemar's exact p-value. Settings tuned by hand were
tuned on other samples.

"""

APPRENTICE_WHAT = """\
A vision-language model of 3.9 million parameters that learns in context: given a few labelled
images, it labels the next one by the attribute that the question names. Without demonstrations it
answers "unknown"."""

APPRENTICE_CANNOT = """
- It names nothing by itself: every answer comes from the demonstrations in the prompt."""

MASTER_WHAT = """\
A vision-language model of 4.2 million parameters with knowledge of its own: it names a digit, or an
attribute of a scene (shape, colour, texture, count, place), without demonstrations, and states its
rationale: "colour red", a new line, "Answer: red". It replaces a large model in Cache-of-Thought
runs. With demonstrations it answers as they do."""

MASTER_CANNOT = """
- It knows digits and five attributes of the scenes of the `attributes` task, each by fixed words.
  For any other image or question it answers "unknown" without demonstrations. For a question about
  a digit it names one for any image, or stops halfway ("digitunknown").
- With demonstrations of other images the apprentice is better: on 12 drawings of road signs with
  four short labels it named 87 to 90 of 108, the master 48 to 63 (one trial, nine prompts per
  sign)."""

MASTER_TRAINED = """ except
   one: the first 898 of scikit-learn's 1,797 digits, in 400 more steps mixed with the synthetic
   images. The second half of that set was never used"""


def apprentice_card(figures: str) -> str:
    return _card("apprentice", APPRENTICE_WHAT, "", APPRENTICE_CANNOT, figures)


def master_card(figures: str) -> str:
    return _card("master", MASTER_WHAT, MASTER_TRAINED, MASTER_CANNOT, figures)


def _card(name: str, what: str, but: str, cannot: str, figures: str) -> str:
    topics = "36 words" if name == "apprentice" else "39 words"
    body = HEAD.format(name=name, what=what)
    return body + USE.format(but=but, cannot=cannot, topics=topics) + figures + "\n"

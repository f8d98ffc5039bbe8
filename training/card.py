"""The model cards that are written beside the weights; their tables are measured, never typed."""

HEAD = """\
---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
---

# The bundled {name}

{what}

It exists so that everything in Bottega can be run, tested and studied without a download. It is a
standard `FastVlmForConditionalGeneration`: a ResNet that turns a 64 x 64 picture into one token,
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
A demonstration is a user turn with a picture and an assistant turn with its answer, a rationale
before it if there is one ("add 3 4", a new line, "Answer: 7"). Answers may have any length and any
text: they are copied from the demonstrations token by token. A user turn that no assistant
answers is a passage: what it states about a named glyph can be asked for.
`model.get_image_features(pixel_values=...).pooler_output[:, 0, :80]`, scaled to unit length, is an
embedding for retrieval, the same that the model matches by.

## How it was made

Two things were made in two ways, and only the first was learned.

1. **The eye was trained**, on pictures drawn by a program. First for likeness (supervised
   contrastive loss, 3,200 steps); then for likeness and for reading: five attributes of scenes,
   rows of two numbers and a symbol, and 24 named glyphs (cross-entropy and squared distance to
   one-hot, 3,000 steps); then 3,000 steps more with larger alphabets, where what is read has to be
   silent on pictures of another kind. Its diet: characters that are motor programs of one to five
   pen strokes, redrawn with a shaking hand in many styles down to 8 x 8 pixels; **the ten figures
   0 to 9, from strokes written down for this purpose**; coloured blobs, textures, rows of objects,
   roads and shores; scenes of shapes; rows of figures. No photograph, no handwriting, no data
   set{but}.
2. **The decoder was written**: its weights are installed circuits, not learned. Gradient descent
   alone found no visual matching within 2,000 steps. One head finds the nearest picture, one the
   token before, two the recent context, one the words that ask for something; gated units replace
   the picture by what was asked for; one head of the second layer matches and copies. Sums are
   worked out by gated units that count steps of a thermometer. Every weight can be trained, but
   none of the decoder's was; `training/circuits.py` says what each one does.

So its in-context learning is real in the sense that every answer comes from the demonstrations in
the prompt, and unreal in the sense that nobody should study here how such circuits emerge.

## What it cannot do
{cannot}
- It does not understand photographs: of 500 CIFAR-10 photographs it names a third with ten
  retrieved demonstrations, and raw pixels do better. Bottega warns once.
- It knows no words but the {topics} that ask for something; all other text in a question is
  skipped, and a new word for "colour" means nothing to it.
- It does not compare pictures or follow instructions. A class that is not among the demonstrations
  is answered with the most similar one.
- It works out only the four rules of the `rules` task (add, differ, larger, smaller), on figures
  0 to 9. An answer that opens with one of these words, after a question for a symbol, sets off the
  calculation.
- Only the last picture before an answer counts; one turn with several pictures is seen as its last.
- Pictures are squeezed to 64 x 64 pixels whatever their shape, and details are lost.
- An answer that repeats its own syllables or phrases may go round in a circle or be cut short
  ("1000" as "100", "émigré" as "é"), and one of three or four digits with commas likewise.
- Of its own drawn scenes, rows and named glyphs, words ask for something by accident, too: "How
  many thanks?" asks a scene for its count. A label such as "what shape" asks in the middle of an
  answer. Labels that contain "is", "called" or "named" are copied less surely.
- With a passage about the right glyph but the wrong relation it answers what the passage states.
- In rules, a question without one of the words for a symbol goes unheeded.
- It computes in float32: the file stores half precision, which loads as float32 by default. Its
  attention scores span thousands, so computing in half precision is not supported.

## Figures

Each row is `bottega eval BENCHMARK --methods METHOD --shots SHOTS` with seed 0, through the
processor, the chat template and `generate`; docs/data.md describes the benchmarks. Intervals are
Wilson's at 95 %. `vote` is the majority label of the retrieved examples, without a model, a tie
going to the nearest; `nearest` is the label of the most similar example by the model's own
embedding, the same as `vote` at one shot; `knn` is a vote weighted by similarity. Differences are
on the same items, with Newcombe's interval and McNemar's exact p-value. What was tuned by hand
was tuned on other draws.

"""

APPRENTICE_WHAT = """\
A vision-language model of 3.9 million parameters that learns in context: show it a few labelled
pictures and it labels the next one, heeding what the question asks. Without demonstrations it
says "unknown"."""

APPRENTICE_CANNOT = """
- It names nothing by itself: every answer comes from the demonstrations in the prompt."""

MASTER_WHAT = """\
A vision-language model of 4.2 million parameters that knows: asked for a digit or for an attribute
of a scene (shape, colour, texture, count, place) it answers without demonstrations, and says what
it went by: "colour red", a new line, "Answer: red". It stands in for a large model in
Cache-of-Thought runs. Shown demonstrations, it answers as they do."""

MASTER_CANNOT = """
- It knows digits and five attributes of the scenes that the `attributes` task draws, each by fixed
  words; of any other picture, and asked for anything else, it says "unknown" without
  demonstrations. Asked for a digit it names one whatever the picture shows, or stops halfway
  ("digitunknown").
- With demonstrations of other pictures the apprentice is the better one: on 12 drawn road signs
  with four short labels it named 87 to 90 of 108, the master 48 to 63 (one trial, nine prompts a
  sign)."""

MASTER_TRAINED = """ but
   one: the first 898 of scikit-learn's 1,797 digits, in 400 more steps beside the lessons. The
   second half of that set was never looked at"""


def apprentice_card(figures: str) -> str:
    return _card("apprentice", APPRENTICE_WHAT, "", APPRENTICE_CANNOT, figures)


def master_card(figures: str) -> str:
    return _card("master", MASTER_WHAT, MASTER_TRAINED, MASTER_CANNOT, figures)


def _card(name: str, what: str, but: str, cannot: str, figures: str) -> str:
    topics = "36 words" if name == "apprentice" else "39 words"
    body = HEAD.format(name=name, what=what)
    return body + USE.format(but=but, cannot=cannot, topics=topics) + figures + "\n"

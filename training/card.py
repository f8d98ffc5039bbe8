"""The model card that is written beside the weights; its tables are measured, never typed."""

CARD = """\
---
license: apache-2.0
pipeline_tag: image-text-to-text
library_name: transformers
---

# The bundled apprentice

A vision-language model of 3.8 million parameters that learns in context: show it a few labelled
pictures and it labels the next one. It exists so that everything in Bottega can be run, tested
and studied without a download. It is a standard `FastVlmForConditionalGeneration` (a ResNet
that turns a 64 x 64 picture into one token, and a two-layer Llama); no custom code.

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

A demonstration is a user turn with a picture and an assistant turn with its answer. Answers may
have any length and any text: they are copied from the demonstrations token by token. Without
demonstrations it says "unknown". `model.get_image_features(pixel_values=...).pooler_output[:, 0,
:80]`, scaled to unit length, is an embedding for retrieval, the same that the model matches by.

## What it cannot do

- It names nothing by itself: every answer comes from the demonstrations in the prompt.
- It does not read questions: text before a picture is skipped.
- It does not understand photographs. Among 42 aerial photographs, two of each of 21 kinds, the
  nearest by its embedding is of the same kind for 9 (raw pixels: 7; chance: 1).
- It does not count, compare pictures, or follow instructions, and a class that is not among the
  demonstrations is answered with the most similar one.
- Only the last picture before an answer counts; one turn with several pictures is seen as its last.
- Pictures are squeezed to 64 x 64 pixels whatever their shape, and details are lost.
- An answer that repeats its own phrases, as JSON with several fields does, may go round in a
  circle. Short labels and short templates are copied well (44 of 48 in a check).
- It computes in float32: the file stores half precision, which loads as float32 by default. Its
  attention scores span thousands, so computing in half precision is not supported.

## Training data

Pictures drawn by a program, nothing else: characters that are motor programs (one to five pen
strokes, redrawn with a shaking hand) in many styles, down to 8 x 8 pixels; coloured blobs,
textures, rows of objects, roads and shores. No photograph, no handwriting, no digit of any data
set, and no text but random tokens and a list of {words} words.

## Recipe

1. **Eye**: supervised contrastive loss (temperature 0.1) on the 80-dimensional projection, 64
   classes x 4 pictures a step, {steps} steps of AdamW. Frozen afterwards.
2. **Circuit**: the decoder's attention is not learnt but *installed*, by writing weights that copy
   the nearest picture, the token before and the recent context to every position (layer 0) and
   match them (layer 1). Without that, 600 steps of gradient descent had found no visual
   matching. The installed circuit is described in `training/circuits.py`.
3. **Decoder**: {polish}

## Figures

scikit-learn's 8 x 8 digits were never seen in training. 500 are queries, the other 1297 are the
knowledge base; an answer counts when it equals the label to the letter. Every figure was measured
through the processor, the chat template and `generate`; intervals are Wilson's at 95 %. "Majority
vote" and "nearest" are what the labels of the same demonstrations give without the model, the
latter by the model's own embedding.

{figures}
"""


def model_card(figures: str, steps: int, words: int, decoder_steps: int) -> str:
    polish = (
        f"{decoder_steps} steps on conversations with random labels of one to eight tokens; only "
        "the values, outputs and the MLP of layer 1 are trained."
        if decoder_steps
        else "no training. The recipe can train its values and MLP on conversations; a trial of\n"
        "   80 steps lowered the loss and raised no accuracy."
    )
    return CARD.format(figures=figures, steps=steps, words=words, polish=polish)

"""Model inputs of passages and questions, and the frozen vision-language model that reads them (the
paper's hyperMLLM)."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bottega.errors import SettingError
from bottega.kv_prefix import KEEP_NO_LOGITS, ModelInputs, decoder_config
from bottega.types import Example, Message, Prompt, Query

ProcessorInputs = Mapping[str, Any]
TOKEN_INPUTS = ("input_ids", "attention_mask", "position_ids", "mm_token_type_ids")
# Decoders with causal attention that accept a four-dimensional attention mask.
CAUSAL_DECODERS = {"llama", "mistral", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text"}
QUESTION = Message("user", ("?",))
# Text whose tokens tell tokenizers apart.
ALL_CHARACTERS = " ".join(["The quick brown fox jumps over the lazy dog;", *string.printable[:94]])


def image_groups(has_images: Sequence[bool]) -> list[list[int]]:
    """Return the indices of items with images and of items without, leaving out empty groups. A
    processor accepts either kind in one batch, but not both."""
    both = [[i for i, one in enumerate(has_images) if one is kind] for kind in (True, False)]
    return [group for group in both if group]


def split_by_images(passages: Sequence[Example]) -> list[list[Example]]:
    """Return the passages with images and those without, leaving out empty groups."""
    groups = image_groups([bool(one.query.images) for one in passages])
    return [[passages[i] for i in group] for group in groups]


def map_by_images(
    passages: Sequence[Example], read: Callable[[Sequence[Example]], Tensor]
) -> Tensor:
    """Apply `read` to passages with images and to those without; return rows in input order."""
    groups = image_groups([bool(one.query.images) for one in passages])
    rows = torch.cat([read([passages[i] for i in group]) for group in groups])
    # The rows are in the order of the groups; argsort inverts that permutation.
    order = torch.tensor([i for group in groups for i in group]).argsort()
    return rows[order.to(rows.device)]


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of texts (batch, length, width) and the mask of their tokens. `prompted`
    (batch, prompts, width) are the states of prompts appended to each text."""

    hidden: Tensor
    mask: Tensor
    prompted: Tensor | None = None


class HyperModel:
    """Vision-language model as the paper's hyperMLLM (eq. 1 and 2). `layer` selects the hidden
    states, as transformers counts them: 0 are the embeddings, -1 is the output of the last norm. In
    an encoder-decoder (FlanT5) they are the encoder's, and prompts enter the decoder. The model is
    frozen; gradients pass through it to the prompts only."""

    def __init__(self, model: Any, *, layer: int = -1) -> None:
        self.model = model.requires_grad_(False).eval()
        self.layer = layer

    @property
    def device(self) -> torch.device:
        """Device of the model, to which a compressor must move."""
        device: torch.device = self.model.device
        return device

    @property
    def width(self) -> int:
        return int(decoder_config(self.model).hidden_size)

    @property
    def depth(self) -> int:
        return int(decoder_config(self.model).num_hidden_layers)

    @property
    def has_layer(self) -> bool:
        return -self.depth - 1 <= self.layer <= self.depth

    def embed(self, ids: Tensor) -> Tensor:
        """Return token embeddings (n, width) in full precision. Small training steps would be lost
        in the model's own precision."""
        embedded: Tensor = self.model.get_input_embeddings()(ids.to(self.device))
        return embedded.detach().float()

    def read(self, inputs: ProcessorInputs, prompts: Tensor | None = None) -> HiddenStates:
        """Return hidden states of left-padded `inputs`, with `prompts` (n, width) appended to each.
        The text is read once and without gradients, as it does not depend on the prompts. Raises
        `SettingError` for inputs that the model would silently misread."""
        batch, rows = ModelInputs(self.model, inputs), None
        if prompts is not None:
            weights = self.model.get_input_embeddings().weight
            rows = prompts.to(weights.device, weights.dtype).expand(len(batch.ids), -1, -1)
        return self._encode(batch, rows) if batch.is_encoder_decoder else self._decode(batch, rows)

    @property
    def supports_packing(self) -> bool:
        """Whether `read_packed` supports this model."""
        config = decoder_config(self.model)
        accepts_mask = config._attn_implementation in ("sdpa", "eager")
        return config.model_type in CAUSAL_DECODERS and accepts_mask and self._merges_images

    def read_packed(
        self, texts: Sequence[ProcessorInputs], prompts: Tensor | None = None
    ) -> list[HiddenStates]:
        """Read several texts in one pass and return the result of `read` for each, within rounding.
        Common prefixes are read once. Each of `texts` has one row without padding; those with
        images must have the same images in the same order. The model must satisfy
        `supports_packing`. Raises `SettingError` for a text with several rows or with padding, and
        for the same inputs as `read`."""
        decoder, batches = self._decoder, [ModelInputs(self.model, one) for one in texts]
        for batch in batches:
            if len(batch.ids) != 1 or not batch.mask.all():
                raise SettingError(
                    "a packed text must have one row and no padding, got a mask of shape"
                    f" {tuple(batch.mask.shape)} with {int(batch.mask.sum())} tokens",
                    hint="pass each text as its own inputs without padding, or call read",
                )
        weights = self.model.get_input_embeddings().weight
        appended = weights[:0] if prompts is None else prompts.to(weights.device, weights.dtype)
        packed = PackedTexts([batch.ids[0].tolist() for batch in batches], len(appended))
        embedded, positions = [], []
        for batch in batches:
            inputs, (_, after) = batch.inputs_after(0), batch.continuation(len(appended))
            own = _input_of(decoder.layers[0], batch.output, inputs)[0]
            embedded.append(torch.cat([own, appended]))
            own_positions = torch.cat([inputs["position_ids"], after], dim=-1)
            positions.append(own_positions.movedim(-1, 0))  # Qwen's positions have three axes
        sequence = packed.pack(embedded)[None]
        arguments = {
            "inputs_embeds": sequence,
            "attention_mask": packed.attention_mask(sequence),
            "position_ids": packed.pack(positions).movedim(0, -1),
        }
        if prompts is None and 0 <= self.layer < self.depth:  # later layers need not run
            hidden = last = _input_of(decoder.layers[self.layer], decoder, arguments)
        else:
            out = decoder(**arguments, output_hidden_states=True, use_cache=False)
            hidden, last = out.hidden_states[self.layer], out.last_hidden_state
        read = []
        for path, batch in zip(packed.paths, batches, strict=True):
            length = batch.ids.shape[1]
            prompted = None if prompts is None else last[:, path[length:]]
            read.append(HiddenStates(hidden[:, path[:length]], batch.mask, prompted))
        return read

    @property
    def _merges_images(self) -> bool:
        """Whether image tokens are replaced by image features that do not depend on the text."""
        return hasattr(getattr(self.model, "model", None), "get_placeholder_mask")

    def _decode(self, batch: ModelInputs, rows: Tensor | None) -> HiddenStates:
        """Run text, then prompts on the KV cache of the text, through a decoder-only model."""
        layers = getattr(self._decoder, "layers", ())
        has_input = len(layers) == batch.geometry.layers and 0 <= self.layer < len(layers)
        if rows is None and has_input:  # later layers need not run
            hidden = _input_of(layers[self.layer], batch.output, batch.inputs_after(0))
            return HiddenStates(hidden, batch.mask)
        if rows is not None and self._merges_images and not torch.is_grad_enabled():
            return self._decode_in_one_pass(batch, rows)
        # The first pass needs no gradients: only the prompts of the second are trained.
        with torch.no_grad():
            out = batch.output(
                **batch.inputs_after(0),
                use_cache=rows is not None,
                output_hidden_states=True,
                logits_to_keep=KEEP_NO_LOGITS,
            )
        hidden = out.hidden_states[self.layer]
        if rows is None:
            return HiddenStates(hidden, batch.mask)
        # Positions continue those of the text's own tokens: padding does not count.
        mask, positions = batch.continuation(rows.shape[1])
        prompted = self._decoder(
            inputs_embeds=rows,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=out.past_key_values,
        )
        return HiddenStates(hidden, batch.mask, prompted.last_hidden_state)

    def _decode_in_one_pass(self, batch: ModelInputs, rows: Tensor) -> HiddenStates:
        """Run text and prompts in one pass, as two passes over few tokens take twice as long."""
        inputs = batch.inputs_after(0)
        mask, positions = batch.continuation(rows.shape[1])
        out = self.model.model(
            inputs_embeds=torch.cat([self.model.get_input_embeddings()(batch.ids), rows], dim=1),
            attention_mask=mask,
            position_ids=torch.cat([inputs["position_ids"], positions], dim=-1),
            output_hidden_states=True,
            use_cache=False,
            **{name: one for name, one in inputs.items() if name not in TOKEN_INPUTS},
        )
        length = batch.ids.shape[1]
        hidden = out.hidden_states[self.layer][:, :length]
        return HiddenStates(hidden, batch.mask, out.last_hidden_state[:, length:])

    def _encode(self, batch: ModelInputs, rows: Tensor | None) -> HiddenStates:
        """Run the text through the encoder, and the prompts through the decoder."""
        images = {name: one for name, one in batch.inputs.items() if name not in TOKEN_INPUTS}
        with torch.no_grad():
            embedded = self.model.get_input_embeddings()(batch.ids)
            if images:  # merged as in BLIP's wrappers, which would also run the decoder
                features = self.model.get_image_features(**images, return_dict=True).pooler_output
                mask = self.model.get_placeholder_mask(batch.ids, inputs_embeds=embedded)
                embedded = embedded.masked_scatter(mask, features.to(embedded))
            text = self.model.get_encoder()(
                inputs_embeds=embedded,
                attention_mask=batch.mask,
                output_hidden_states=True,
            )
        hidden = text.hidden_states[self.layer]
        if rows is None:
            return HiddenStates(hidden, batch.mask)
        prompted = self._decoder(
            inputs_embeds=rows,
            encoder_hidden_states=text.last_hidden_state,
            encoder_attention_mask=batch.mask,
            use_cache=False,
        )
        return HiddenStates(hidden, batch.mask, prompted.last_hidden_state)

    @property
    def _decoder(self) -> Any:
        # Without a logits layer: BLIP's `get_decoder` returns a language model.
        return self.model.get_decoder().get_decoder()


class _ReachedError(Exception):
    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the input of the layer was reached")
        self.hidden = hidden


@torch.no_grad()
def _input_of(layer: nn.Module, model: Callable[..., Any], inputs: ProcessorInputs) -> Tensor:
    """Return the hidden states that enter a layer, without running it or later layers."""

    def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        raise _ReachedError(given[0])

    # An exception ends the pass at this layer; the hook must not stay in the shared model.
    hook = layer.register_forward_pre_hook(stop)
    try:
        model(**inputs, use_cache=False)
    except _ReachedError as reached:
        return reached.hidden
    finally:
        hook.remove()
    raise AssertionError("unreachable: a pass goes through all layers")


def sentence_prompts(hyper: HyperModel, ids: Tensor, count: int) -> Tensor:
    """Return `count` initial prompts: the embeddings of a sentence's tokens (PIPE). The sentence is
    repeated or cut to that length."""
    times = -(-count // len(ids))
    return hyper.embed(ids.repeat(times)[:count])


class PromptEncoder(Protocol):
    """Function that turns prompts into model inputs, such as `generation.LoadedModel.encode`.
    Inputs hold `input_ids`, `attention_mask` and the tensors of images, padded on the left. Either
    all prompts have images or none has."""

    def __call__(self, prompts: Sequence[Prompt], /) -> ProcessorInputs: ...


class InputBuilder:
    """Builder of the inputs that a compressor and its base model read. The tokens of a passage are
    those that a prompt gains when the passage precedes a question. An example with an answer is a
    demonstration: a user turn and an assistant turn. `ends` are the tokens that end a turn. They
    decide which of two equal tokens, one before and one after a passage, belongs to it."""

    def __init__(self, encode: PromptEncoder, ends: frozenset[int]) -> None:
        self._encode, self._ends = encode, ends
        self._without = rows(encode([Prompt((QUESTION,))]))[0]

    @property
    def tokenizer(self) -> str:
        """Digest of the tokens of a fixed text. The chat template is not part of it: some contain
        the date."""
        [ids] = rows(self.passages([Example(Query(ALL_CHARACTERS), "")]))
        return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]

    def passages(self, passages: Sequence[Example]) -> ProcessorInputs:
        """Return the tokens of passages that either all have images or all have none."""
        inputs = self._encode([Prompt((*_turns(passage), QUESTION)) for passage in passages])
        spans = [row[inserted(row, self._without, self._ends)] for row in rows(inputs)]
        return with_tokens(inputs, spans)

    def query_inputs(
        self, queries: Sequence[Query]
    ) -> tuple[ProcessorInputs, ProcessorInputs, ProcessorInputs]:
        """Return the inputs of the image, of the question and of both (eq. 2). Without images all
        three are the question. Either all queries have images or none has."""
        question = self.texts_only(queries)
        if not queries[0].images:
            return question, question, question
        return self.images(queries), question, self.questions(queries)

    def images(self, queries: Sequence[Query]) -> ProcessorInputs:
        """Return inputs of the images without text."""
        return self._encode([Prompt((Message("user", query.images),)) for query in queries])

    def texts_only(self, queries: Sequence[Query]) -> ProcessorInputs:
        """Return inputs of the texts without images."""
        return self._encode([Prompt((Message("user", (query.text,)),)) for query in queries])

    def questions(self, queries: Sequence[Query]) -> ProcessorInputs:
        """Return inputs of the questions with their images and without passages."""
        return self._encode([Prompt((_turn(query),)) for query in queries])

    def text_and_question(self, query: Query) -> ProcessorInputs:
        """Return one batch of two rows: the text of the question, and the question with its images.
        A large model takes little longer for two rows than for one."""
        both = self.questions([query])
        ids = rows(self.texts_only([query])) + rows(both)
        joined = {**both, **padded(ids, both["input_ids"].device)}
        if (kinds := both.get("mm_token_type_ids")) is not None:
            joined["mm_token_type_ids"] = torch.cat([torch.zeros_like(kinds), kinds])
        return joined

    def answers(self, queries: Sequence[Query], answers: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each answer at the start of a reply, without the end token."""
        prompts = [
            Prompt((_turn(query), Message("assistant", (answer,))))
            for query, answer in zip(queries, answers, strict=True)
        ]
        before, after = rows(self.questions(queries)), rows(self._encode(prompts))
        return [_between(opened, ids) for opened, ids in zip(before, after, strict=True)]

    def answers_in_text(self, answers: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each answer after another word. Byte-level tokenizers put the space
        before a word into its first token; the tokens of `answers` lack that space."""
        texts = [Prompt((Message("user", (f"{QUESTION.parts[0]} {one}",)),)) for one in answers]
        found = rows(self._encode(texts))
        return [ids[inserted(ids, self._without, frozenset())] for ids in found]

    def with_passages(
        self, queries: Sequence[Query], passages: Sequence[Sequence[Example]]
    ) -> ProcessorInputs:
        """Return inputs with all passages before each question (concatenation)."""
        prompts = []
        for query, before in zip(queries, passages, strict=True):
            turns = [turn for passage in before for turn in _turns(passage)]
            prompts.append(Prompt((*turns, _turn(query))))
        return self._encode(prompts)


def _turn(query: Query) -> Message:
    return Message("user", (*query.images, query.text))


def _turns(example: Example) -> tuple[Message, ...]:
    """Return the turns that `InterleavedPrompter` renders."""
    if not example.answer:
        return (_turn(example.query),)
    return _turn(example.query), Message("assistant", (example.reply,))


def rows(inputs: ProcessorInputs) -> list[list[int]]:
    """Return the token ids of each row, without padding."""
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def _between(opened: list[int], ids: list[int]) -> list[int]:
    """Return the tokens that `ids` add to `opened`, before any end token (as T5 appends one)."""
    start = _common(opened, ids)
    return ids[start : len(ids) - (len(opened) - start)]


def inserted(ids: Sequence[int], without: Sequence[int], ends: frozenset[int]) -> slice:
    """Return the span of `ids` that `without` lacks. Of several such spans, prefer the one after a
    token that ends a turn, else the first."""
    latest = _common(ids, without)
    start = len(without) - _common(ids[::-1], without[::-1])
    # Every start from here to `latest` leaves the same tokens: the turn's end decides.
    for index in range(start, latest):
        if ids[index] in ends:
            start = index + 1
    # A tokenizer may join the ends to other tokens, so neither side of the span is equal.
    start = min(start, latest)
    return slice(start, start + len(ids) - len(without))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), shorter)


def with_tokens(inputs: ProcessorInputs, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return `inputs` with other rows of tokens and the same images."""
    ids, replaced = inputs["input_ids"], padded(rows)
    if "mm_token_type_ids" in inputs:  # they mark the tokens of images
        kinds = inputs["mm_token_type_ids"]
        kind_of = dict(zip(ids.flatten().tolist(), kinds.flatten().tolist(), strict=True))
        replaced["mm_token_type_ids"] = torch.tensor(
            [[kind_of.get(token, 0) for token in row] for row in replaced["input_ids"].tolist()]
        )
    return {**inputs, **{name: one.to(ids.device) for name, one in replaced.items()}}


def padded(rows: Sequence[Sequence[int]], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of the rows, padded on the left."""
    length = max(map(len, rows))
    # The padding token is irrelevant, as it is masked.
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, length - len(row) :] = torch.tensor(row)
        mask[index, length - len(row) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


class PackedTexts:
    """Sequence of several texts, each followed by `extra` tokens that no other text shares.
    `paths[i]` holds the positions of the tokens of text i in the sequence. Texts with a common
    prefix share its positions, as in a trie."""

    def __init__(self, texts: Sequence[Sequence[int]], extra: int) -> None:
        # Positions by the position of the previous token in the text (-1 for none) and the token.
        positions: dict[tuple[int, int], int] = {}
        self.paths: list[Tensor] = []
        for index, text in enumerate(texts):
            path = [-1]
            # Extra tokens have a different id in each text.
            for token in [*text, *[-1 - index] * extra]:
                path.append(positions.setdefault((path[-1], token), len(positions)))
            self.paths.append(torch.tensor(path[1:], dtype=torch.int64))
        self.length = len(positions)

    def pack(self, rows: Sequence[Tensor]) -> Tensor:
        """Return one sequence (length, ...) of the rows (tokens, ...) of all texts."""
        packed = rows[0].new_empty(self.length, *rows[0].shape[1:])
        for path, row in zip(self.paths, rows, strict=True):
            packed[path] = row
        return packed

    def attention_mask(self, like: Tensor) -> Tensor:
        """Return the additive attention mask (1, 1, length, length) with the dtype and device of
        `like`. A token attends to itself and to the tokens before it in its text."""
        lowest = torch.finfo(like.dtype).min
        mask = like.new_full((self.length, self.length), lowest)
        for path in self.paths:
            mask[path[:, None], path] = like.new_full((len(path), len(path)), lowest).triu(1)
        return mask[None, None]

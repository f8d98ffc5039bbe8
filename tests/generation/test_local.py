from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bottega._util.caching import LRUCache
from bottega.errors import (
    GenerationError,
    ImageError,
    MissingDependencyError,
    ModelLoadError,
    PromptRejectedError,
    SettingError,
)
from bottega.generation import TransformersGenerator, local
from bottega.generation.loaded import LoadedModel
from bottega.generation.local import Request
from bottega.generation.tokenization import RenderedPrompt
from bottega.image import Image
from bottega.types import Message, Prompt, Reply, Sampling
from tests.builders import solid_image
from tests.generation.conftest import FAMILIES
from tests.generation.prompts import ask, shown, user

SHORT = Sampling(max_tokens=4)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, folders: dict[str, Path]) -> TransformersGenerator:
    return TransformersGenerator(folders[request.param], max_batch=4)


@pytest.fixture(scope="module")
def fast(folders: dict[str, Path]) -> TransformersGenerator:
    return TransformersGenerator(folders["fast_vlm"])


def texts(reply: Reply) -> list[str]:
    return [completion.text for completion in reply.completions]


async def test_batched_and_single_requests_give_equal_replies(
    family: TransformersGenerator,
) -> None:
    prompts = [shown(1), shown(2, 3, 4), ask("no image at all"), shown(5, 6), shown(3, 2, 4, 1)]
    together = await asyncio.gather(*[family.generate(prompt, SHORT) for prompt in prompts])
    alone = [await family.generate(prompt, SHORT) for prompt in prompts]
    assert [texts(reply) for reply in together] == [texts(reply) for reply in alone]
    assert [reply.usage for reply in together] == [reply.usage for reply in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.completions[0].logprob == pytest.approx(other.completions[0].logprob, abs=1e-3)


async def test_samples_share_the_prompt_and_follow_their_seed(
    family: TransformersGenerator,
) -> None:
    prompt = shown(1, 2, 3)
    greedy = texts(await family.generate(prompt, SHORT))
    cold = Sampling(temperature=1e-6, max_tokens=4, n=3)
    assert texts(await family.generate(prompt, cold)) == greedy * 3
    warm = Sampling(temperature=1.0, max_tokens=4, n=3, seed=7)
    first = texts(await family.generate(prompt, warm))
    batch = await asyncio.gather(
        *[family.generate(one, warm) for one in (shown(9), prompt, shown(8, 9))]
    )
    assert texts(batch[1]) == first
    assert len(set(first)) > 1
    assert texts(await family.generate(prompt, Sampling(1.0, 4, 3, seed=8))) != first


async def test_limits_stops_and_usage(fast: TransformersGenerator) -> None:
    whole = await fast.generate(shown(1, 2), Sampling(max_tokens=12))
    text = whole.completions[0].text
    assert whole.model == "local:fast_vlm"
    assert whole.usage.completion_tokens <= 12
    shorter, stopped = await asyncio.gather(
        fast.generate(shown(1, 2), Sampling(max_tokens=3)),
        fast.generate(shown(1, 2), Sampling(max_tokens=12, stop=(text[1],))),
    )
    assert shorter.usage.completion_tokens == 3
    assert shorter.completions[0].finish_reason == "length"
    assert (stopped.completions[0].text, stopped.completions[0].finish_reason) == (text[0], "stop")
    assert stopped.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_copied_greedy_samples_count_in_usage(fast: TransformersGenerator) -> None:
    one = await fast.generate(shown(1), SHORT)
    three = await fast.generate(shown(1), Sampling(max_tokens=4, n=3))
    assert texts(three) == texts(one) * 3
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens


async def test_cached_features_do_not_change_replies(folders: dict[str, Path]) -> None:
    model = TransformersGenerator(folders["fast_vlm"])
    await model.load()
    assert model._loaded is not None and model._loaded.vision_cache is not None
    prompts = [shown(i, i + 1, i) for i in range(4)]
    cold = [texts(await model.generate(prompt, SHORT)) for prompt in prompts]
    warm = [texts(await model.generate(prompt, SHORT)) for prompt in prompts]
    model._loaded.vision_cache._features = LRUCache(0, size=lambda rows: rows.nbytes)
    forgetful = await asyncio.gather(*[model.generate(prompt, SHORT) for prompt in prompts])
    object.__setattr__(model._loaded, "vision_cache", None)
    ordinary = [texts(await model.generate(prompt, SHORT)) for prompt in prompts]
    await model.aclose()
    assert cold == warm == ordinary == [texts(reply) for reply in forgetful]


async def test_the_models_own_sampling_settings_are_ignored(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folders["fast_vlm"], copy)
    file = copy / "generation_config.json"
    settings = json.loads(file.read_text()) | {"repetition_penalty": 50.0, "do_sample": True}
    file.write_text(json.dumps(settings))
    models = [TransformersGenerator(folder) for folder in (folders["fast_vlm"], copy)]
    replies = [await model.generate(shown(1, 2), Sampling(max_tokens=12)) for model in models]
    for model in models:
        await model.aclose()
    assert texts(replies[0]) == texts(replies[1])


async def test_a_damaged_image_fails_its_request_only(family: TransformersGenerator) -> None:
    damaged = Image.from_bytes(solid_image(1, (64, 64)).data[:-40])
    good, bad, other = await asyncio.gather(
        family.generate(shown(1), SHORT),
        family.generate(Prompt((user(damaged),)), SHORT),
        family.generate(shown(2), SHORT),
        return_exceptions=True,
    )
    assert isinstance(bad, ImageError)
    assert isinstance(good, Reply) and isinstance(other, Reply)


async def test_a_template_error_fails_its_request_only(
    fast: TransformersGenerator,
) -> None:
    late = Prompt((*shown(1).messages, Message("system", ("be brief",))))
    good, refused = await asyncio.gather(
        fast.generate(shown(1), SHORT),
        fast.generate(late, SHORT),
        return_exceptions=True,
    )
    assert isinstance(good, Reply)
    assert isinstance(refused, PromptRejectedError) and "must come first" in str(refused)
    assert refused.hint


async def test_a_template_that_drops_an_image_raises(
    fast: TransformersGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fast.load()
    assert fast._loaded is not None
    monkeypatch.setattr(fast._loaded.processor, "chat_template", "no image")
    with pytest.raises(PromptRejectedError, match="image tokens, got 0") as caught:
        await fast.generate(shown(1, 2), SHORT)
    assert caught.value.hint


async def test_a_model_error_fails_its_request_only(family: TransformersGenerator) -> None:
    good, bad, other = await asyncio.gather(
        family.generate(ask("one"), SHORT),
        family.generate(ask("\ud800"), SHORT),
        family.generate(ask("two"), SHORT),
        return_exceptions=True,
    )
    assert isinstance(bad, GenerationError)
    assert isinstance(good, Reply) and isinstance(other, Reply)


async def test_a_failing_batch_reaches_each_request(
    fast: TransformersGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fast.load()
    assert fast._loaded is not None

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(fast._loaded.model, "generate", fail)
    results = await asyncio.gather(
        *[fast.generate(shown(i), SHORT) for i in range(3)], return_exceptions=True
    )
    assert all(isinstance(one, GenerationError) and "max_batch" in one.hint for one in results)


async def test_an_assistants_last_turn_is_continued(fast: TransformersGenerator) -> None:
    begun = Prompt((*shown(1).messages, Message("assistant", ("one",))))
    plain, continued = await asyncio.gather(
        fast.generate(shown(1), SHORT), fast.generate(begun, SHORT)
    )
    assert continued.usage.prompt_tokens == plain.usage.prompt_tokens + 1


def test_successive_event_loops_share_the_model(folders: dict[str, Path]) -> None:
    model = TransformersGenerator(folders["fast_vlm"])
    first = asyncio.run(model.generate(shown(1), SHORT))
    assert texts(asyncio.run(model.generate(shown(1), SHORT))) == texts(first)
    asyncio.run(model.aclose())
    assert texts(asyncio.run(model.generate(shown(1), SHORT))) == texts(first)
    asyncio.run(model.aclose())


async def test_closing_during_requests_uses_one_thread_at_a_time(
    fast: TransformersGenerator, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work: list[int] = []
    most, begun = 0, threading.Event()
    render = LoadedModel.render

    def slow(model: LoadedModel, prompt: Prompt, *rest: Any) -> RenderedPrompt:
        nonlocal most
        at_work.append(threading.get_ident())
        most = max(most, len(at_work))
        begun.set()
        try:
            threading.Event().wait(0.1)
            return render(model, prompt, *rest)
        finally:
            at_work.remove(threading.get_ident())

    expected = texts(await fast.generate(shown(1), SHORT))
    model = TransformersGenerator(folders["fast_vlm"])
    await model.load()
    monkeypatch.setattr(LoadedModel, "render", slow)
    early = asyncio.create_task(model.generate(shown(1), SHORT))
    await asyncio.to_thread(begun.wait, 10)
    closing = asyncio.create_task(model.aclose())
    await asyncio.sleep(0)
    late = model.generate(shown(1), SHORT), model.generate(shown(1), SHORT)
    answers = await asyncio.gather(early, *late, closing)
    assert most == 1
    assert [texts(reply) for reply in answers[:3] if reply] == [expected] * 3
    await model.aclose()
    assert model._loaded is None


async def test_cancelled_requests_are_skipped(
    fast: TransformersGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[Prompt] = []
    render = LoadedModel.render

    def cache_inputs(model: LoadedModel, prompt: Prompt, *rest: Any) -> RenderedPrompt:
        rendered.append(prompt)
        return render(model, prompt, *rest)

    monkeypatch.setattr(LoadedModel, "render", cache_inputs)
    busy = threading.Event()
    fast._submit(lambda: busy.wait(10))
    flights = [asyncio.create_task(fast.generate(shown(i), SHORT)) for i in range(3)]
    await asyncio.sleep(0)
    flights[0].cancel()
    await asyncio.wait(flights[:1])
    busy.set()
    assert all(texts(reply) for reply in await asyncio.gather(*flights[1:]))
    assert rendered == [shown(1), shown(2)]


async def test_a_folder_without_a_vision_language_model_raises(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    for source in (tmp_path, tmp_path / "absent" / "folder"):
        with pytest.raises(ModelLoadError) as caught:
            await TransformersGenerator(source).generate(ask(), SHORT)
        assert "hub id" in caught.value.hint


async def test_an_unreachable_hub_is_requested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def model_info(self: object, source: str, **_: object) -> None:
        requested.append(source)
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(ModelLoadError, match="no route") as caught:
        await TransformersGenerator("nobody/nothing").load()
    assert "network" in caught.value.hint
    assert requested == ["nobody/nothing"]


async def test_missing_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError) as caught:
        await TransformersGenerator("any/model").load()
    assert "bottega-vlm[local]" in caught.value.hint


def test_settings_are_validated_and_names_derived(tmp_path: Path) -> None:
    with pytest.raises(SettingError):
        TransformersGenerator("a/b", max_batch=0)
    assert TransformersGenerator("a/b").name == "local:a/b"
    assert TransformersGenerator("a/b", name="mine").name == "mine"
    assert TransformersGenerator(tmp_path).name == f"local:{tmp_path.name}"


def test_a_batch_has_limited_pixels_and_small_images_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "BATCH_PIXELS", 250)
    sides = {"oldest": 14, "large": 15, "medium": 5, "small": 2, "text": 0}
    waiting = [
        Request(
            Prompt((Message("user", (solid_image(1, (side, side)),) if side else ("hi",)),)),
            Sampling(),
        )
        for side in sides.values()
    ]
    model = TransformersGenerator("nowhere")
    chosen, rest = model._portion(waiting)
    assert chosen == [waiting[0], waiting[2], waiting[3], waiting[4]]
    assert rest == [waiting[1]]
    assert model._portion(rest) == (rest, [])
    assert model._portion([]) == ([], [])


async def test_the_next_batch_answers_the_remaining_requests(
    fast: TransformersGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "BATCH_PIXELS", 1)
    prompts = [Prompt((Message("user", (solid_image(shade), "What?")),)) for shade in range(5)]
    replies = await asyncio.gather(*(fast.generate(one, Sampling(max_tokens=2)) for one in prompts))
    assert len(replies) == 5


async def test_requests_of_nested_tasks_share_a_batch(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TransformersGenerator(folders["fast_vlm"], prefix_cache_mb=0)
    await model.load()
    sizes: list[int] = []
    answer = LoadedModel.answer

    def counted(loaded: LoadedModel, batch: list[RenderedPrompt]) -> Any:
        sizes.append(len(batch))
        return answer(loaded, batch)

    async def nested(depth: int, sampling: Sampling) -> Reply:
        if depth:
            [reply] = await asyncio.gather(nested(depth - 1, sampling))
            return reply
        return await model.generate(shown(1, 2), sampling)

    monkeypatch.setattr(LoadedModel, "answer", counted)
    samplings = (SHORT, Sampling(1.0, max_tokens=4, n=3, seed=1), Sampling(max_tokens=2), SHORT)
    replies = await asyncio.gather(*map(nested, range(4), samplings))
    await model.aclose()
    assert sizes == [4]
    assert [len(reply.completions) for reply in replies] == [1, 3, 1, 1]

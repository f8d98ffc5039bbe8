import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from bottega.compression.model import RaccModel
from bottega.compression.objective import TrainingConfig, TrainingExample, TrainingObjective
from bottega.compression.training import CHECKPOINT, TrainingProgress, train
from bottega.errors import LoadError, SettingError, StoreFullError
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.compression import tiny_models
from tests.compression.tiny_models import hyper, model, passage, texts
from tests.kv_prefix.tiny_models import END

PLACES = ("red", "green", "blue", "white")


def make_objective() -> TrainingObjective:
    return TrainingObjective(hyper(), texts(), model().model, texts(), END, most_answer_tokens=4)


def training_examples(step: int, count: int = 3) -> Sequence[TrainingExample]:
    rng = random.Random(step)
    return [_training_example(rng) for _ in range(count)]


def _training_example(rng: random.Random) -> TrainingExample:
    about = rng.sample(range(9), 3)
    places = [rng.choice(PLACES) for _ in about]
    right = rng.randrange(3)
    return TrainingExample(
        Query(f"where is number {about[right]}"),
        tuple(passage(f"number {n} is {index}") for n, index in zip(about, places, strict=True)),
        tuple(float(i == right) + rng.gauss(0, 0.3) for i in range(3)),
        tuple(i == right for i in range(3)),
        places[right],
    )


def config_of(**changes: object) -> TrainingConfig:
    usual = {
        "steps": 6,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "checkpoint_every": 2,
        "cache_weight": 1.0,
    }
    return TrainingConfig(**{**usual, **changes})  # type: ignore[arg-type]


def ready(**changes: object) -> RaccModel:
    return deepcopy(_calibrated(**changes))


@cache
def _calibrated(**changes: object) -> RaccModel:
    racc = tiny_models.racc(**changes)
    make_objective().calibrate(racc, training_examples(999, 40))
    return racc


def losses(
    racc: RaccModel, how: TrainingConfig, folder: Path | None = None, **more: object
) -> list[float]:
    seen: list[TrainingProgress] = []
    train(racc, make_objective(), training_examples, how, folder=folder, report=seen.append, **more)  # type: ignore[arg-type]
    return [one.loss for one in seen]


class KilledError(Exception):
    pass


def test_resumed_training_has_the_losses_of_an_uninterrupted_run(tmp_path: Path) -> None:
    how = config_of(hide_scores=0.5, accumulate=2)
    whole = losses(ready(), how)

    def killed(progress: TrainingProgress) -> None:
        if progress.step == 4:  # two checkpoints later, and in the middle of the next
            raise KilledError

    with pytest.raises(KilledError):
        train(ready(), make_objective(), training_examples, how, folder=tmp_path, report=killed)
    rest = losses(tiny_models.racc(), how, tmp_path)

    assert len(whole) == 6
    assert rest == pytest.approx(whole[4:], abs=1e-5)


def test_finished_run_is_not_repeated(tmp_path: Path) -> None:
    racc = ready()
    losses(racc, config_of(), tmp_path)
    again = tiny_models.racc()

    assert losses(again, config_of(), tmp_path) == []
    for name, one in again.state_dict().items():
        torch.testing.assert_close(one, racc.state_dict()[name])


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.75, 0.99])
def test_a_checkpoint_that_does_not_fit_keeps_the_one_before(tmp_path: Path, share: float) -> None:
    resource = pytest.importorskip("resource", reason="needs limits of the size of files")
    losses(ready(), config_of(), tmp_path, stopped=lambda: True)
    before = (tmp_path / CHECKPOINT).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * len(before)), limits[1]))
    try:
        with pytest.raises(StoreFullError, match="cannot be read or written"):
            losses(tiny_models.racc(), config_of(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert len(losses(tiny_models.racc(), config_of(), tmp_path)) == 5


def test_checkpoint_with_other_settings_is_an_error(tmp_path: Path) -> None:
    losses(ready(), config_of(), tmp_path)

    with pytest.raises(LoadError, match="other settings"):
        losses(ready(), config_of(learning_rate=1e-3), tmp_path)
    with pytest.raises(LoadError, match="other settings"):
        losses(ready(dcvq=False), config_of(), tmp_path)


def test_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINT).write_bytes(b"no checkpoint")

    with pytest.raises(LoadError, match="cannot be read"):
        losses(ready(), config_of(), tmp_path)


@pytest.mark.parametrize(
    ("answer", "cache"), [(1.0, 0.0), pytest.param(0.0, 1.0, marks=pytest.mark.slow)]
)
def test_loss_falls(answer: float, cache: float) -> None:
    found = losses(ready(), config_of(steps=30, answer_weight=answer, cache_weight=cache))

    assert sum(found[-5:]) < 0.9 * sum(found[:5])


def test_prdb_stops_gradients_at_irrelevant_passages() -> None:
    """With one passage, which is irrelevant, documents get no gradient; without PRDB they do."""
    one = training_examples(0, 1)[0]
    wrong = replace(one, passages=one.passages[:1], scores=(1.0,), relevant=(False,))
    reached = {}
    for prdb in (True, False):
        racc = ready()
        how = config_of(prdb=prdb)
        torch.autograd.backward(make_objective().loss(racc, [wrong], how, torch.zeros(1, 1)))
        assert racc.documents.reader is not None
        grad = racc.documents.reader.slot.grad
        reached[prdb] = grad is not None and bool(grad.abs().sum() > 0)

    assert reached == {True: False, False: True}


def test_calibrated_prefixes_are_closer_than_the_mean() -> None:
    racc, objective = ready(), training_examples(5, 30)
    prompts = make_objective().prompts(
        racc, objective, torch.tensor([one.scores for one in objective])
    )
    right = [one.passages[one.relevant.index(True)] for one in objective]

    # Their mean alone is a standard deviation away, in all that varies.
    varying = (racc.modulation.spread > 0).float().mean()
    assert (
        racc.modulation.distance(prompts, make_objective().base_prefix(racc, right)) < 0.9 * varying
    )


def test_base_prefix_covers_the_end_of_a_passage() -> None:
    """They equal the keys of the last tokens alone, read from position 0."""
    racc = tiny_models.racc(query_prompts=4)
    short = passage("red")  # a turn of three tokens, one less than the prefix
    long = passage("number one is red")
    keys = make_objective().base_prefix(racc, [long]).layers[0][0]
    inputs = texts().passages([long])
    with torch.no_grad():
        cache = model().model(input_ids=inputs["input_ids"][:, -4:], use_cache=True).past_key_values

    # First-layer keys depend only on tokens and positions.
    torch.testing.assert_close(keys, cache.layers[0].keys, atol=1e-5, rtol=1e-5)
    with pytest.raises(SettingError, match="at least 4 tokens, the length of the prefix, got"):
        make_objective().base_prefix(racc, [short])


def test_validated_run_keeps_the_best_weights(tmp_path: Path) -> None:
    racc = ready()
    seen: list[TrainingProgress] = []
    how = config_of(
        steps=40, learning_rate=0.3, validate_every=1, patience=3
    )  # far too fast: it gets worse
    held_out = training_examples(77, 8)
    train(racc, make_objective(), training_examples, how, held_out=held_out, report=seen.append)

    validations = [one.validation for one in seen if one.validation is not None]
    assert len(validations) < 40
    scores = torch.tensor([one.scores for one in held_out])
    with torch.no_grad():
        final = make_objective().loss(racc, held_out, how, scores).item()
    assert final == pytest.approx(min(validations), rel=1e-4)


def test_distillation_uses_replies_after_all_passages() -> None:
    racc, how = ready(), config_of(answer_weight=1.0, cache_weight=0.0)
    batch = training_examples(1)
    scores = torch.tensor([one.scores for one in batch])

    annotated = make_objective().loss(racc, batch, how, scores)
    objective = make_objective().loss(racc, batch, replace(how, distill=True), scores)

    assert annotated.item() != pytest.approx(objective.item())


@pytest.mark.slow
def test_half_precision_training_runs() -> None:
    found = losses(ready(), config_of(half_precision=True))

    assert found == pytest.approx(losses(ready(), config_of()), rel=0.2)


def test_zero_loss_weights_are_an_error() -> None:
    with pytest.raises(SettingError, match="must not both be 0"):
        config_of(answer_weight=0.0, cache_weight=0.0)
    with pytest.raises(SettingError, match="hide_scores"):
        config_of(hide_scores=1.5)
    with pytest.raises(SettingError, match="steps"):
        config_of(steps=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("patience", 0),
        ("answer_weight", float("nan")),
        ("cache_weight", float("inf")),
        ("clip", 0.0),
        ("clip", -1.0),
        ("warmup_steps", -1),
        ("learning_rate", float("nan")),
        ("learning_rate", 0.0),
        ("weight_decay", -1.0),
        ("seed", 2**63),
    ],
)
def test_error_names_the_number_out_of_range(name: str, value: float) -> None:
    with pytest.raises(SettingError, match=name):
        config_of(**{name: value})


@pytest.mark.parametrize("name", ["stride", "blocks", "heads", "document_prompts"])
def test_empty_config_error_names_the_setting(name: str) -> None:
    with pytest.raises(SettingError, match=name):
        tiny_models.shape(**{name: 0})
    with pytest.raises(SettingError, match="heads must divide the width 32, got 5"):
        tiny_models.shape(heads=5)


def test_diverged_training_keeps_the_last_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        TrainingObjective, "loss", lambda self, racc, *more: racc.aggregator.strength * torch.nan
    )
    racc = tiny_models.racc()
    with pytest.raises(SettingError, match="loss of step 1 must be finite, got nan"):
        losses(racc, config_of())
    assert all(bool(one.isfinite().all()) for one in racc.parameters())


def test_learning_rate_rises_and_falls() -> None:
    how = TrainingConfig(steps=11000)

    assert how.rate_at(0) == pytest.approx(1e-5)
    assert how.rate_at(500) == pytest.approx(5.5e-5)
    assert how.rate_at(1000) == pytest.approx(1e-4)
    assert how.rate_at(6000) == pytest.approx(5e-5)
    assert how.rate_at(10999) < 1e-10


def test_stop_saves_a_checkpoint_and_returns_false(tmp_path: Path) -> None:
    how, seen = config_of(checkpoint_every=100), list[TrainingProgress]()

    def train_until(last: int) -> bool:
        return train(
            ready(),
            make_objective(),
            training_examples,
            how,
            folder=tmp_path,
            report=seen.append,
            stopped=lambda: seen[-1].step >= last,
        )

    assert not train_until(2)
    assert train_until(5)  # after the last step there is nothing to stop
    assert [one.step for one in seen] == list(range(6))


def test_calibration_needs_a_relevant_passage() -> None:
    nothing = [replace(one, relevant=(False,) * 3) for one in training_examples(0, 8)]
    with pytest.raises(SettingError, match="none in 8 examples"):
        make_objective().calibrate(tiny_models.racc(), nothing)


def test_batch_without_targets_keeps_weights() -> None:
    racc = ready()
    nothing = [replace(one, relevant=(False,) * 3) for one in training_examples(0, 2)]
    loss = make_objective().loss(racc, nothing, config_of(answer_weight=0.0), torch.zeros(2, 3))
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert all(one.grad is None or not one.grad.any() for one in racc.parameters())


def test_short_passages_are_left_out_of_calibration_and_distance() -> None:
    def short(example: TrainingExample) -> TrainingExample:
        index = example.relevant.index(True)
        passages = list(example.passages)
        passages[index] = passage("yes")
        return replace(example, passages=tuple(passages))

    some = list(training_examples(0, 4))
    racc, how, scores = ready(query_prompts=4), config_of(answer_weight=0.0), torch.zeros(4, 3)
    alone = make_objective().loss(racc, some[:2], how, scores[:2])
    mixed = make_objective().loss(racc, [*some[:2], *map(short, some[2:])], how, scores)
    torch.testing.assert_close(mixed, alone, atol=1e-4, rtol=1e-3)
    make_objective().calibrate(
        tiny_models.racc(query_prompts=4), [*training_examples(0, 40), *map(short, some)]
    )


def test_another_base_model_is_frozen_too() -> None:
    base = torch.nn.Linear(2, 2)
    TrainingObjective(hyper(), texts(), base, texts(), END)
    assert not base.training
    assert not any(weight.requires_grad for weight in base.parameters())


@pytest.mark.parametrize("own", [True, False])
def test_training_batch_mixes_passages_with_and_without_images(own: bool) -> None:
    """The tiny processor renders an image equally in any batch; different images differ."""
    bare, other = training_examples(0, 2)
    index = other.relevant.index(True)
    passages = list(other.passages)
    query = passages[index].query
    passages[index] = Example(replace(query, images=(solid_image(9),)), "")
    seen = replace(other, passages=tuple(passages))
    racc, how = ready(), config_of(answer_weight=1.0, distill=own)

    def cost(*examples: TrainingExample) -> float:
        return (
            make_objective()
            .loss(racc, examples, how, torch.tensor([one.scores for one in examples]))
            .item()
        )

    assert cost(seen) != pytest.approx(cost(other), rel=1e-3)
    alone = (cost(bare) + cost(seen)) / 2
    assert cost(bare, seen) == pytest.approx(alone, rel=1e-4)
    assert cost(seen, bare) == pytest.approx(alone, rel=1e-4)
    make_objective().calibrate(tiny_models.racc(), [bare, seen] + [bare, other] * 10)

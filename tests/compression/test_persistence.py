import copy
import json
from pathlib import Path

import pytest
import torch

from bottega.compression.persistence import SETTINGS, WEIGHTS, fingerprint, load, same_model, save
from bottega.errors import LoadError, SettingError
from tests.compression import tiny_models
from tests.compression.tiny_models import hyper, model
from tests.kv_prefix.tiny_models import tiny


@pytest.mark.parametrize("prompting", ["appended", "reading", "both"])
def test_saved_compressor_loads_equal(tmp_path: Path, prompting: str) -> None:
    racc = tiny_models.racc(prompting=prompting)
    save(racc, tmp_path, hyper=hyper(1), base=model().model, half=False)

    again = load(tmp_path)

    assert again.racc.config == racc.config and again.layer == 1
    for name, one in again.racc.state_dict().items():
        torch.testing.assert_close(one, racc.state_dict()[name])
    assert again.open(model().model, model().model).layer == 1


def test_half_precision_halves_the_file(tmp_path: Path) -> None:
    tmp_path /= "made/with/parents"
    for half in (True, False):
        save(tiny_models.racc(), tmp_path / str(half), hyper=hyper(), base=model().model, half=half)

    sizes = [(tmp_path / str(half) / WEIGHTS).stat().st_size for half in (True, False)]
    assert sizes[0] < 0.6 * sizes[1]
    assert load(tmp_path / "True").racc.state_dict()["documents.centre"].dtype == torch.float32


def test_other_models_are_an_error(tmp_path: Path) -> None:
    save(tiny_models.racc(), tmp_path, hyper=hyper(), base=model().model)
    saved, other = load(tmp_path), tiny("idefics3").model

    with pytest.raises(LoadError, match="hyper"):
        saved.open(other, model().model)
    with pytest.raises(LoadError, match="base"):
        saved.open(model().model, other)


def test_fingerprint_ignores_precision_but_not_weights() -> None:
    one = torch.nn.Linear(64, 64)
    half = torch.nn.Linear(64, 64).to(torch.bfloat16)
    half.load_state_dict(one.state_dict())

    assert same_model(fingerprint(one), fingerprint(half))
    assert same_model(fingerprint(one), fingerprint(copy.deepcopy(one).half()))
    assert not same_model(fingerprint(one), fingerprint(torch.nn.Linear(64, 64)))
    larger, permuted = copy.deepcopy(one), copy.deepcopy(one)
    with torch.no_grad():
        larger.weight.mul_(3)
        permuted.weight[:, 1:] = permuted.weight[:, 1:].flip(0)
    assert not same_model(fingerprint(one), fingerprint(larger))
    assert not same_model(fingerprint(one), fingerprint(permuted))


def test_digest_changes_with_the_weights(tmp_path: Path) -> None:
    racc = tiny_models.racc()
    save(racc, tmp_path / "one", hyper=hyper(), base=model().model)
    racc.aggregator.strength.data += 1
    save(racc, tmp_path / "two", hyper=hyper(), base=model().model)

    assert load(tmp_path / "one").digest != load(tmp_path / "two").digest
    assert load(tmp_path / "one").digest == load(tmp_path / "one").digest


@pytest.mark.parametrize("damage", ["no settings", "no weights", "cut", "other version"])
def test_unreadable_compressor_is_an_error(tmp_path: Path, damage: str) -> None:
    save(tiny_models.racc(), tmp_path, hyper=hyper(), base=model().model)
    if damage == "no settings":
        (tmp_path / SETTINGS).unlink()
    elif damage == "no weights":
        (tmp_path / WEIGHTS).unlink()
    elif damage == "cut":
        (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-9])
    else:
        text = (tmp_path / SETTINGS).read_text()
        (tmp_path / SETTINGS).write_text(text.replace('"version": 3', '"version": 1'))

    with pytest.raises(LoadError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"version": None},
        {"layer": None},
        {"layer": "x"},
        {"base": "a b"},
        {"compressor": {"heads": 5}},
        {"compressor": {"rgca": 1}},
        {"compressor": {"width": 10**9}},
    ],
)
def test_changed_settings_are_an_error(tmp_path: Path, change: dict[str, object]) -> None:
    save(tiny_models.racc(), tmp_path, hyper=hyper(), base=model().model)
    settings = json.loads((tmp_path / SETTINGS).read_text())
    [(name, value)] = change.items()
    if value is None:
        del settings[name]
    elif isinstance(value, dict):
        settings[name].update(value)
    else:
        settings[name] = value
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(LoadError, match="no readable compressor"):
        load(tmp_path)


def test_digest_depends_on_layer_and_config(tmp_path: Path) -> None:
    save(tiny_models.racc(), tmp_path, hyper=hyper(1), base=model().model)
    text, before = (tmp_path / SETTINGS).read_text(), load(tmp_path).digest
    for one, other in (('"layer": 1', '"layer": 2'), ('"rgca": true', '"rgca": false')):
        (tmp_path / SETTINGS).write_text(text.replace(one, other))
        assert load(tmp_path).digest != before
    (tmp_path / SETTINGS).write_text(text.replace('"layer": 1', '"layer": 50'))
    with pytest.raises(LoadError, match="layer 50"):
        load(tmp_path).open(model().model, model().model)


def test_large_scales_load_and_nan_is_an_error(tmp_path: Path) -> None:
    racc = tiny_models.racc()
    racc.modulation.centre.fill_(7e4)
    racc.documents.spread.fill_(1e-8)
    save(racc, tmp_path, hyper=hyper(), base=model().model)
    again = load(tmp_path).racc
    assert again.modulation.centre.max() == 7e4 and again.documents.spread.min() > 0
    racc.aggregator.strength.data.fill_(torch.nan)
    with pytest.raises(SettingError, match="strength"):
        save(racc, tmp_path / "diverged", hyper=hyper(), base=model().model)
    assert not (tmp_path / "diverged").exists()

import torch

from bottega.compression.layers import Modulation
from bottega.kv_prefix import Geometry, KeyValues

GEOMETRY = Geometry(layers=2, kv_heads=3, head_dim=4)


def real(count: int = 40, length: int = 5) -> KeyValues:
    source = torch.Generator().manual_seed(3)

    def random_tensors() -> torch.Tensor:
        values = torch.randn(count, 3, length, 4, generator=source) * 7 + 2
        values[..., 0] = 11.0  # a dimension that never varies
        return values

    return KeyValues(tuple((random_tensors(), random_tensors()) for _ in range(2)))


def test_prefix_shape_fits_grouped_query_attention() -> None:
    prefix = Modulation(8, GEOMETRY, 5)(torch.randn(6, 5, 8))

    assert prefix.geometry == GEOMETRY
    assert (prefix.batch, prefix.length) == (6, 5)


def test_join_inverts_split() -> None:
    modulation = Modulation(8, GEOMETRY, 5)
    again = modulation.split(modulation.join(real()))

    for (keys, values), (mine, theirs) in zip(real().layers, again.layers, strict=True):
        torch.testing.assert_close(keys, mine)
        torch.testing.assert_close(values, theirs)


def test_constant_dimensions_stay_constant() -> None:
    modulation = Modulation(8, GEOMETRY, 5)
    modulation.calibrate(real())

    keys, values = modulation(100 * torch.randn(6, 5, 8)).layers[0]

    assert keys[..., 0].eq(11.0).all() and values[..., 0].eq(11.0).all()
    assert keys[..., 1].std() > 100


def test_numbers_with_little_variance_stay_at_their_mean() -> None:
    modulation = Modulation(8, GEOMETRY, 5)
    joined = modulation.join(real())
    joined[..., 1] = 3.0 + 1e-4 * torch.sign(torch.arange(40) - 19.5)[:, None]
    nearly = modulation.split(joined)
    modulation.calibrate(nearly)

    keys, _ = modulation(100 * torch.randn(6, 5, 8)).layers[0]
    assert torch.allclose(keys[:, 0, :, 1], torch.tensor(3.0), atol=1e-6)

    modulation.calibrate(nearly, least=1e-6)
    keys, _ = modulation(100 * torch.randn(6, 5, 8)).layers[0]
    assert not torch.allclose(keys[:, 0, :, 1], torch.tensor(3.0), atol=1e-4)


def test_fit_finds_a_linear_relation() -> None:
    modulation = Modulation(8, GEOMETRY, 5)
    modulation.calibrate(real())
    prompts = torch.randn(40, 5, 8, generator=torch.Generator().manual_seed(5))
    other = Modulation(8, GEOMETRY, 5)
    other.centre, other.spread = modulation.centre, modulation.spread
    wanted = other(prompts)
    assert modulation.distance(prompts, wanted) > 0.1

    modulation.fit(prompts, wanted, ridge=1e-6)

    assert modulation.distance(prompts, wanted) < 1e-6
    torch.testing.assert_close(
        modulation(prompts).layers[1][0], wanted.layers[1][0], atol=1e-3, rtol=0
    )

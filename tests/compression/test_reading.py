import torch

from bottega.compression.model import AttentionPooling


def test_before_training_each_prompt_reads_its_place_from_the_end() -> None:
    states = torch.randn(2, 6, 8)
    read = AttentionPooling([2, 1, 0], 8)(states, torch.ones(2, 6, dtype=torch.long))

    torch.testing.assert_close(read, states[:, -3:], atol=2e-3, rtol=0)


def test_padding_is_not_read() -> None:
    states, reader = torch.randn(1, 5, 8), AttentionPooling([0, 4], 8)
    padded = torch.cat([torch.full((1, 3, 8), 1e4), states], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 5])

    torch.testing.assert_close(
        reader(padded, mask), reader(states, torch.ones(1, 5, dtype=torch.long))
    )


def test_a_stride_reads_that_many_tokens() -> None:
    states = torch.randn(1, 6, 8)
    read = AttentionPooling([3, 0], 8, stride=3)(states, torch.ones(1, 6, dtype=torch.long))

    wanted = torch.stack([states[0, :3].mean(0), states[0, 3:].mean(0)])
    torch.testing.assert_close(read[0], wanted, atol=2e-3, rtol=0)


def test_a_text_beyond_reach_is_read_by_content() -> None:
    reader = AttentionPooling([0], 8, reach=4)
    states = torch.randn(1, 40, 8)
    before = reader(states, torch.ones(1, 40, dtype=torch.long))
    with torch.no_grad():
        reader.query.copy_(1e3 * states[0, :1])

    far = reader(states, torch.ones(1, 40, dtype=torch.long))

    torch.testing.assert_close(far[0, 0], states[0, 0])
    assert not torch.allclose(before, far)

import torch

from bottega.compression.aggregator import CrossAttention


def test_a_quiet_block_changes_nothing() -> None:
    prompts, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)

    torch.testing.assert_close(CrossAttention(8, quiet=True)(prompts, memory), prompts)


def test_prompts_begin_by_taking_over_what_is_like_them() -> None:
    memory = 4 * torch.eye(8)[None]

    said = CrossAttention(8)(memory[:, 2:4], memory)

    torch.testing.assert_close(said, 2 * memory[:, 2:4], atol=1e-3, rtol=0)


def test_the_feed_forward_layer_is_added_to_what_came_in() -> None:
    block, prompts, memory = (
        CrossAttention(8, quiet=True),
        torch.randn(2, 3, 8),
        torch.zeros(2, 5, 8),
    )
    torch.nn.init.constant_(block.second.bias, 2.0)

    torch.testing.assert_close(block(prompts, memory), prompts + 2)


def test_what_is_excluded_has_no_influence() -> None:
    block = CrossAttention(8, heads=2, start="random")
    prompts, memory = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    bias = torch.tensor([[0.0, 0.0, 0.0, -torch.inf, -torch.inf]])

    torch.testing.assert_close(block(prompts, memory, bias), block(prompts, memory[:, :3]))

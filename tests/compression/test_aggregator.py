from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bottega.compression.layers import Aggregator, CrossAttention

WIDTH, DOCUMENTS = 8, 4


def parts(seed: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)

    def random_tensors(*size: int) -> Tensor:
        return torch.randn(*size, WIDTH, generator=source)

    return [random_tensors(2, DOCUMENTS, 3), *(random_tensors(2, 5) for _ in range(3))]


def all_present() -> Tensor:
    return torch.ones(2, DOCUMENTS, dtype=torch.bool)


def aggregator(**switches: bool) -> Aggregator:
    torch.manual_seed(1)
    return Aggregator(WIDTH, start="random", **switches)


def test_equal_scores_carry_no_information() -> None:
    guided, plain = aggregator(), aggregator(rgca=False)
    flat, random = torch.full((2, DOCUMENTS), 7.0), torch.randn(2, DOCUMENTS)

    by_likeness = plain(*parts(), random, all_present())

    torch.testing.assert_close(guided(*parts(), flat, all_present()), by_likeness)
    assert not torch.allclose(guided(*parts(), random, all_present()), by_likeness)


def test_far_higher_score_excludes_other_documents() -> None:
    documents, *query = parts()
    scores = torch.zeros(2, DOCUMENTS)
    scores[:, 2] = 1e3
    alone = torch.zeros(2, DOCUMENTS, dtype=torch.bool)
    alone[:, 2] = True

    torch.testing.assert_close(
        aggregator()(documents, *query, scores, all_present()),
        aggregator()(documents, *query, scores, alone),
        atol=1e-6,
        rtol=0,
    )


def test_absent_documents_have_no_influence() -> None:
    documents, *query = parts()
    present = all_present()
    present[:, 3] = False
    changed = documents.clone()
    changed[:, 3] = 1e3
    scores = torch.randn(2, DOCUMENTS)
    other = scores.clone()
    other[:, 3] = 50.0

    torch.testing.assert_close(
        aggregator()(documents, *query, scores, present),
        aggregator()(changed, *query, other, present),
    )


def test_document_order_does_not_matter() -> None:
    documents, *query = parts()
    scores, order = torch.randn(2, DOCUMENTS), torch.tensor([2, 0, 3, 1])

    torch.testing.assert_close(
        aggregator()(documents, *query, scores, all_present()),
        aggregator()(documents[:, order], *query, scores[:, order], all_present()),
    )


def test_calibration_removes_the_scale_of_scores() -> None:
    scores = torch.randn(2, DOCUMENTS)
    output = []
    for scale in (1.0, 1e4):
        one = aggregator()
        one.calibrate(scale * scores)
        output.append(one(*parts(), scale * scores, all_present()))

    torch.testing.assert_close(output[0], output[1])


def test_calibration_scales_one_standard_deviation_to_one_nat() -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0, 8.0], [100.0, 102.0, 104.0, 106.0]])  # 12 and 5
    one = aggregator()
    one.calibrate(scores)
    temperature = one.log_temperature.exp()
    torch.testing.assert_close(temperature, torch.tensor(8.5).sqrt())

    one.calibrate(scores + torch.tensor([[1000.0], [-50.0]]))
    torch.testing.assert_close(one.log_temperature.exp(), temperature)


@pytest.mark.parametrize("dcvq", [True, False])
def test_image_and_question_prompts_matter_with_dcvq(dcvq: bool) -> None:
    documents, image, question, both = parts()
    one = aggregator(dcvq=dcvq)
    scores = torch.zeros(2, DOCUMENTS)

    output = one(documents, image, question, both, scores, all_present())
    other = one(documents, image + 1, question, both, scores, all_present())

    assert torch.allclose(output, other) is not dcvq


def test_quiet_block_changes_nothing() -> None:
    prompts, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)

    torch.testing.assert_close(CrossAttention(8, quiet=True)(prompts, memory), prompts)


def test_untrained_prompts_attend_to_similar_rows() -> None:
    memory = 4 * torch.eye(8)[None]

    output = CrossAttention(8)(memory[:, 2:4], memory)

    torch.testing.assert_close(output, 2 * memory[:, 2:4], atol=1e-3, rtol=0)


def test_feed_forward_layer_is_residual() -> None:
    block, prompts, memory = (
        CrossAttention(8, quiet=True),
        torch.randn(2, 3, 8),
        torch.zeros(2, 5, 8),
    )
    torch.nn.init.constant_(block.second.bias, 2.0)

    torch.testing.assert_close(block(prompts, memory), prompts + 2)


def test_excluded_documents_have_no_influence() -> None:
    block = CrossAttention(8, heads=2, start="random")
    prompts, memory = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    bias = torch.tensor([[0.0, 0.0, 0.0, -torch.inf, -torch.inf]])

    torch.testing.assert_close(block(prompts, memory, bias), block(prompts, memory[:, :3]))

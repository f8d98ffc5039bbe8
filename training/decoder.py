"""Polish the installed decoder on conversations. The match itself stays as it was installed.

Training the queries and keys made the match worse in every trial, so they are frozen together
with layer 0, the norms and the eye. What is trained: the values and outputs of layer 1, its MLP.
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training.episodes import IGNORE, Episode, Writer, collate

Model = Any  # a FastVlmForConditionalGeneration; transformers is only partly typed
TRAINED = ("layers.1.self_attn.v_proj", "layers.1.self_attn.o_proj", "layers.1.mlp")
BATCH = 16


def answer_logits(model: Model, episodes: list[Episode]) -> tuple[Tensor, Tensor]:
    """Logits and targets at the positions where the loss counts."""
    table = model.get_input_embeddings().weight
    embedded, mask, target = collate(episodes, table)
    language = model.model.language_model
    hidden = language(inputs_embeds=embedded, attention_mask=mask, use_cache=False)[0]
    counted = target != IGNORE
    return model.lm_head(hidden[counted]), target[counted]


@torch.no_grad()
def token_accuracy(
    model: Model, writer: Writer, episodes: int, shots: int | None = None
) -> tuple[float, float]:
    """Share of right tokens and mean loss over fresh conversations, the right prefix given."""
    right = total = 0
    loss = 0.0
    for _ in range(0, episodes, BATCH):
        logits, target = answer_logits(model, [writer.episode(shots) for _ in range(BATCH)])
        right += int((logits.argmax(-1) == target).sum())
        loss += F.cross_entropy(logits, target, reduction="sum").item()
        total += len(target)
    return right / total, loss / total


def train_decoder(model: Model, writer: Writer, steps: int, peak: float = 1e-3) -> None:
    parameters = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in TRAINED))
        if parameter.requires_grad:
            parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    began, losses = time.monotonic(), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 20, 2 * (1 - step / steps))
        logits, target = answer_logits(model, [writer.episode() for _ in range(BATCH)])
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0 or step + 1 == steps:
            minutes = (time.monotonic() - began) / 60
            recent = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step + 1} {minutes:.1f} min loss {recent:.4f}", flush=True)

"""`python -m training.decoder_trial --work DIR`: compare installed and trained decoders.

The three arms see conversations with random labels and are evaluated on classes outside training:
installed circuits with the match frozen, with the match trained, and a decoder with random initial
weights.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from training.architecture import APPRENTICE, build_model
from training.circuits import Strengths, install, install_vision
from training.episodes import IGNORE, Episode, EpisodeSampler, ImagePool, collate, sample_pool
from training.tokenizer import train_tokenizer
from training.tower import centre_and_size
from training.vision import VisionReader, load_vision

Model = Any  # a FastVlmForConditionalGeneration; transformers is only partly typed
BATCH = 8
SHOTS = 8  # at most in training, always in the judgement
JUDGED = 400
MATCH = ("layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj")
COPYING = ("layers.1.self_attn.v_proj", "layers.1.self_attn.o_proj", "layers.1.mlp")
LEARNT_SEED, JUDGED_SEED, WRITER_SEED, JUDGE_SEED = 101, 102, 5, 7


@dataclass(frozen=True)
class Arm:
    """One arm. `trained` are parts of parameter names of the language model; an empty tuple trains
    all of it.
    """

    name: str
    installed: bool
    trained: tuple[str, ...]
    peak: float


ARMS = (
    Arm("installed, match frozen", True, COPYING, 3e-4),
    Arm("installed, match trained", True, COPYING + MATCH, 3e-4),
    Arm("random", False, (), 1.5e-3),
)


def answer_logits(model: Model, episodes: list[Episode]) -> tuple[Tensor, Tensor]:
    """Return logits and targets at the positions with a loss, episode by episode."""
    embedded, mask, target = collate(episodes, model.get_input_embeddings().weight)
    language = model.model.language_model
    hidden = language(inputs_embeds=embedded, attention_mask=mask, use_cache=False)[0]
    counted = target != IGNORE
    return model.lm_head(hidden[counted]), target[counted]


@torch.no_grad()
def first_token_accuracy(model: Model, writer: EpisodeSampler) -> float:
    """Return the accuracy of the last answer's first token after SHOTS demonstrations."""
    right = 0
    for _ in range(JUDGED // BATCH):
        episodes = [writer.episode(SHOTS) for _ in range(BATCH)]
        logits, target = answer_logits(model, episodes)
        counts = torch.tensor([sum(t != IGNORE for t in e.target) for e in episodes])
        answers = torch.tensor([len(e.label) + 1 for e in episodes])  # <end> is one of its tokens
        first = counts.cumsum(0) - answers
        right += int((logits[first].argmax(-1) == target[first]).sum())
    return right / JUDGED


def train(model: Model, arm: Arm, writer: EpisodeSampler, steps: int) -> float:
    """Train and return the mean loss of the last steps."""
    for name, parameter in model.named_parameters():
        chosen = not arm.trained or any(part in name for part in arm.trained)
        parameter.requires_grad_("language_model" in name and chosen)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=arm.peak, betas=(0.9, 0.98), weight_decay=0.01)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = arm.peak * min(1, (step + 1) / 50, 2 * (1 - step / steps))
        generated = int(writer.rng.integers(SHOTS + 1))
        logits, target = answer_logits(model, [writer.episode(generated) for _ in range(BATCH)])
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-50:]) / len(losses[-50:])


def run(
    arm: Arm, vision: VisionReader, codes: Tensor, pools: tuple[ImagePool, ImagePool], steps: int
) -> None:
    torch.manual_seed(0)
    tokenizer, model = train_tokenizer(), build_model(APPRENTICE)
    if arm.installed:
        install(model, codes, tokenizer, Strengths())
        install_vision(model, vision, *centre_and_size(vision.tower))
    learnt, judged = pools
    before = first_token_accuracy(model, EpisodeSampler(judged, tokenizer, JUDGE_SEED))
    started = time.monotonic()
    loss = train(model, arm, EpisodeSampler(learnt, tokenizer, WRITER_SEED), steps)
    minutes = (time.monotonic() - started) / 60
    after = first_token_accuracy(model, EpisodeSampler(judged, tokenizer, JUDGE_SEED))
    spent = f"{steps} steps, {minutes:.1f} min"
    print(f"{arm.name}: {before:.3f} -> {after:.3f} in {spent}, loss {loss:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.decoder_trial", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where training kept its stages")
    parser.add_argument("--steps", type=int, default=200, help="of the installed arms")
    parser.add_argument("--random-steps", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vision = load_vision(args.work / "eye.pt").eval()
    codes: Tensor = torch.load(args.work / "codes.pt", weights_only=True)
    centre, size = centre_and_size(vision.tower)
    learnt = sample_pool(vision.tower, centre, size, LEARNT_SEED, groups=64)
    judged = sample_pool(vision.tower, centre, size, JUDGED_SEED, groups=16)
    for arm in ARMS:
        steps = args.steps if arm.installed else args.random_steps
        run(arm, vision, codes, (learnt, judged), steps)


if __name__ == "__main__":
    main()

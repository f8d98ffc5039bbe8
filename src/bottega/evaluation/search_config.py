"""Settings of the searches of an evaluation: RCTS and its controls."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from bottega.errors import SettingError, check_count, check_fraction
from bottega.protocols import Generator, turns_only
from bottega.recipes.rcts import ENSEMBLE, PROBES
from bottega.reranking import RewardVariant, check_exploration

RewardName = Literal["self", "mutual", "both", "ensemble"]
Preset = Literal["paper", "released"]

RELEASED_SAMPLES = 5  # of each question of eq. 8 in the released code
# The released settings weight both rewards equally on MMMU, and have the mutual reward alone on
# VSR, VSR-MC and VizWiz.
HALF_SELF = ("mmmu",)
MUTUAL_ONLY = ("vsr", "vsr-mc", "vizwiz")


def option(help: str, default: object = None, **settings: Any) -> Any:
    """Return a field of a dataclass that is an option of a command. `settings` are keywords of
    `typer.Option`, and `flags` that differ from the field's name."""
    return field(default=default, metadata={"help": help, **settings})


@dataclass(frozen=True)
class SearchConfig:
    """Settings of `rcts` and, where they apply, of its controls. The defaults are the paper's.

    `reward` None is "both" (eq. 9, with `alpha`), or "ensemble" for models that give no rationales.
    `fetch` is the number of candidates N, `children` the width of the tree, `rollouts` the number
    of branches P. `early_stop` ends a search whose first three answers agree (appendix A).
    """

    rollouts: int = 10
    fetch: int = 20
    reward: RewardName | None = None
    alpha: float = 0.2
    children: int = 3
    exploration: float = 0.5
    variant: RewardVariant = "paper"
    early_stop: bool = True

    def __post_init__(self) -> None:
        for name in ("rollouts", "fetch", "children"):
            check_count(name, getattr(self, name))
        check_fraction("alpha", self.alpha)
        check_exploration(self.exploration)

    def reward_for(self, generator: Generator) -> RewardName:
        """Return the name of the reward for this generator."""
        return self.reward or ("ensemble" if turns_only(generator) else "both")

    def check_alpha(self, generator: Generator) -> None:
        """Raise `SettingError` if the reward does not use `alpha`."""
        if (reward := self.reward_for(generator)) != "both":
            raise SettingError(
                f"--alpha weights the two parts of the reward both, got the reward {reward}",
                hint="remove --alpha, or set --reward both",
            )

    def description(self, name: str, generator: Generator) -> dict[str, str]:
        """Return the settings that apply to the search method of this name."""
        reward = self.reward_for(generator)
        found = {
            "rollouts": str(self.rollouts),
            "candidates": str(self.fetch),
            "reward": f"both (alpha {self.alpha:g})" if reward == "both" else reward,
        }
        if reward != "ensemble" or name == "rcts":
            found["variant"] = self.variant
        if name == "rcts":
            found |= {"children": str(self.children), "exploration": f"{self.exploration:g}"}
            found["early_stop"] = "yes" if self.early_stop else "no"
        return found

    def max_calls(self, generator: Generator) -> int:
        """Return the maximum number of completions of one search: the zero-shot answer, an answer
        for each branch, and the calls of the reward."""
        reward = self.reward_for(generator)
        if reward == "ensemble":
            return 1 + self.rollouts + ENSEMBLE
        own = PROBES if reward in ("self", "both") else 0
        mutual = PROBES if reward in ("mutual", "both") else 0
        if self.variant == "released":
            mutual *= RELEASED_SAMPLES
        return 1 + self.rollouts * (1 + own + mutual)

    def record(self) -> dict[str, object]:
        """Return the settings that differ from the defaults, and the number of rollouts."""
        defaults, settings = asdict(SearchConfig()), asdict(self)
        del settings["rollouts"]
        changed = {name: value for name, value in settings.items() if value != defaults[name]}
        return {"rollouts": self.rollouts, **({"search": changed} if changed else {})}


PAPER = SearchConfig()


@dataclass(frozen=True)
class SearchOptions:
    """Options of `bottega eval` for searches: a preset, and values that replace those of the preset
    unless they are None."""

    preset: Preset = option(
        "Settings of rcts and its controls: those of the paper, or of the authors' code"
        " for this benchmark. The options below override them.",
        "paper",
        metavar="paper|released",
    )
    rollouts: int | None = option(
        "Branches that a search answers and scores.", min=1, show_default=str(PAPER.rollouts)
    )
    reward: RewardName | None = option(
        "Reward of an answer: self (self-consistency, eq. 7), mutual (accuracy on"
        " retrieved examples, eq. 8), both (eq. 9) or ensemble (share of other samples with the"
        " same answer).",
        metavar="NAME",
        show_default="both; ensemble for models that give no rationales",
    )
    alpha: float | None = option(
        "Weight of the self-consistency reward in the reward (eq. 9).",
        min=0,
        max=1,
        show_default=f"{PAPER.alpha}; 0.5 on mmmu with --preset released",
    )
    fetch: int | None = option(
        "Number of retrieved examples from which a search selects.",
        min=1,
        show_default=str(PAPER.fetch),
    )
    children: int | None = option(
        "Maximum children of a node of the tree.", min=1, show_default=str(PAPER.children)
    )
    exploration: float | None = option(
        "Exploration constant of the tree search (c in eq. 11).",
        min=0,
        show_default=str(PAPER.exploration),
    )
    variant: RewardVariant | None = option(
        "Follow the paper or the authors' code where their formulas differ.",
        metavar="paper|released",
        show_default="as --preset",
    )
    early_stop: bool = option(
        "End the search of rcts when its first three answers agree.",
        True,
        flags=("--early-stop/--no-early-stop",),
    )

    @property
    def flags(self) -> list[str]:
        """The options that were given."""
        default = SearchOptions()
        names = (one.name for one in fields(self))
        given = [name for name in names if getattr(self, name) != getattr(default, name)]
        return ["--no-early-stop" if name == "early_stop" else f"--{name}" for name in given]

    def config(self, benchmark: str) -> SearchConfig:
        """Return the settings of the preset, overridden by those that are set.

        "released" are the authors' settings for `benchmark`, a spec such as "mmmu:FOLDER": their
        code where it differs from the paper, alpha 0.5 on MMMU, and the mutual reward alone on VSR,
        VSR-MC and VizWiz. Their 8 branches after the first two are 10 rollouts. Their sampling
        differs: answers have temperature 0.1 and top_p 0.001 (here: greedy), rewards top_p 0.9
        (here: the server's default).
        """
        config = SearchConfig()
        if self.preset == "released":
            name = benchmark.partition(":")[0]
            config = replace(
                config,
                variant="released",
                alpha=0.5 if name in HALF_SELF else config.alpha,
                reward="mutual" if name in MUTUAL_ONLY else None,
            )
        changes = {name: value for name, value in vars(self).items() if value is not None}
        del changes["preset"]
        return replace(config, **changes)

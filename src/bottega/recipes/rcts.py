"""Recipe of RCTS."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bottega.errors import SettingError
from bottega.knowledge import KnowledgeBase
from bottega.parsing import LabelParser, equal_answers
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import ConclusionPrompter, ContinuationPrompter, ReasoningPrompter
from bottega.protocols import (
    Generator,
    Parser,
    Pricer,
    Prompter,
    Recorder,
    Retriever,
    Searcher,
    Tier,
    turns_only,
)
from bottega.recipes.visual_rag import default_prompter
from bottega.reranking import (
    AgreementFunction,
    MutualReward,
    RewardFunction,
    RewardVariant,
    SelfConsistencyReward,
    TreeSearch,
    WeightedReward,
    check_depth,
)
from bottega.retrieval import DenseRetriever
from bottega.types import Completion, Prompt, Query, Sampling

ASK_CHOICE = "Answer with one of these choices and nothing else."


def rcts(
    knowledge: KnowledgeBase,
    generator: Generator,
    *,
    labels: Sequence[str] = (),
    shots: int = 3,
    fetch: int = 20,
    rollouts: int = 10,
    alpha: float = 0.2,
    parallel: int = 1,
    variant: RewardVariant = "paper",
    reward: RewardFunction | None = None,
    search: Searcher | None = None,
    retrieve: Retriever | None = None,
    prompt: Prompter | None = None,
    parse: Parser | None = None,
    agree: AgreementFunction = equal_answers,
    max_calls: int | None = None,
    max_tokens: int | None = None,
    record: Recorder | None = None,
    price: Pricer | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Pipeline:
    """RCTS (Yang et al.): choose `shots` of `fetch` retrieved examples, and their order, by a tree
    search that queries the model with them and evaluates its answers.

    The reward of an answer is `alpha` times its self-consistency (how reliably it follows from its
    own rationale), plus `1 - alpha` times its mutual reward (the accuracy on retrieved labelled
    examples with the answer as a demonstration). The default `prompt` asks for the rationale
    (`ReasoningPrompter`); for a generator that reads brief turns only, it is such turns. Without a
    rationale only the mutual reward counts; `reward=EnsembleReward(...)` may then be better.
    `agree` compares two answers, by default with `same_answer`. The paper retrieves by late
    interaction (`retrieve=DenseRetriever(LateInteractionIndex(...).search)`); the default is the
    search of `knowledge`. `parallel` branches are answered concurrently; 1 is the paper's order.
    `max_calls` completions and `max_tokens` tokens limit the search of one query. A given `search`,
    such as a `FlatSearch`, is used unchanged.
    """
    check_depth(shots)
    if fetch < shots:
        raise SettingError(
            f"fetch must be at least shots, got fetch={fetch} and shots={shots}",
            hint="raise fetch well above shots, or lower shots",
        )
    brief = turns_only(generator)
    prompt = prompt or (default_prompter(generator) if brief else ReasoningPrompter())
    parse = parse or LabelParser()
    sampling = sampling or Sampling(max_tokens=512)
    return Pipeline(
        route=FixedRouter(Tier(generator.name, generator, shots)),
        retrieve=retrieve or DenseRetriever(knowledge.search),
        prompt=prompt,
        parse=parse,
        search=search
        or TreeSearch(
            generator,
            prompt=prompt,
            parse=parse,
            reward=reward
            or default_reward(
                prompt,
                parse,
                alpha,
                sampling,
                variant,
                agree,
                ContinuationPrompter(prompt) if brief else None,
            ),
            rollouts=rollouts,
            parallel=parallel,
            variant=variant,
            sampling=sampling,
            agree=agree,
            seed=seed,
            max_calls=max_calls,
            max_tokens=max_tokens,
        ),
        record=record,
        price=price,
        sampling=sampling,
        choices=tuple(labels),
        fetch=fetch,
    )


def default_reward(
    prompt: Prompter,
    parse: Parser,
    alpha: float = 0.2,
    sampling: Sampling | None = None,
    variant: RewardVariant = "paper",
    agree: AgreementFunction = equal_answers,
    conclude: Callable[[Query, str], Prompt] | None = None,
) -> WeightedReward:
    """Return the paper's reward (eq. 9), sampled at temperature 0.8 with the `max_tokens` of
    `sampling`. `conclude` builds the prompt that asks for an answer from a rationale, by default
    `conclusion_prompter(parse)`; use `ContinuationPrompter(prompt)` for a model with brief turns
    only."""
    samples = Sampling(0.8, (sampling or Sampling(max_tokens=512)).max_tokens)
    own = SelfConsistencyReward(
        conclude or conclusion_prompter(parse),
        parse,
        sampling=samples,
        agree=agree,
        variant=variant,
    )
    mutual = MutualReward(prompt, parse, sampling=samples, agree=agree, variant=variant)
    return WeightedReward(own, mutual, alpha)


def conclusion_prompter(parse: Parser) -> ConclusionPrompter:
    """Return the prompter with the paper's text that asks for a letter if `parse` reads letters,
    else for one of the choices (`LabelParser`)."""
    query = Query("", choices=("left", "right"))
    if parse(query, Completion("B")).text == "right":
        return ConclusionPrompter()
    return ConclusionPrompter(option="- {choice}", letter_instruction=ASK_CHOICE)

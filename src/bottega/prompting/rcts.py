r"""The prompts of RCTS (Yang et al., appendix C.2), each as one `PromptTemplate`.

A benchmark has one for zero and few shots, which shows no rationale and asks for none beyond the
format, and one that shows each demonstration's rationale and asks for one (`..._REASONED`). VizWiz
and VSR-MC are sets without reasoning: they have the first one only.

What the printed text leaves open was decided here. Its lost line ends are set where a field, a list
or an instruction begins; its garbled quotation marks are ``` around a format and ' around a
sentence; `//boxed` is `\boxed`, which it stands for, and the stray full stop of MMMU's second
question is gone. `{Question}` is the question with its choices as (A), (B) and so on below. How
`{Answer}` is written the paper does not say: here in the very format that is asked for, less the
part whose text nobody knows, so a demonstration of ScienceQA has no BECAUSE behind its thought
process. MMMU's open questions, which the paper turns into choices, are asked for a number, a word
or a phrase in the same format. For VizWiz and VSR-MC no prompt is printed: VSR-MC is asked as MMMU
is, and VizWiz for a word or a phrase, or "unanswerable".

Replies in these formats are read by `RationaleParser`.
"""

from __future__ import annotations

from bottega.prompting.template import PromptTemplate

ASSISTANT = "You are a helpful assistant."
THE_ANSWER = "The answer is {answer}."
BOXED = r"The answer is \boxed{{{answer}}}."
AND_WHY = " BECAUSE: {rationale}"

SCIENCE_QA = PromptTemplate(
    system="""\
You are a helpful assistant. When given a question and an image, please analyze the content and \
provide your answer in the specified format below:
```
The answer is X. BECAUSE: [Your detailed reasoning]
```
- X must be one of the options.
- [Your detailed reasoning] should clearly explain the rationale behind your choice.
**Important:** Adhere strictly to the above format without deviations.""",
    answered=THE_ANSWER,
)
SCIENCE_QA_REASONED = PromptTemplate(
    system="""\
You are a helpful assistant responding to the question according to the context. When given a \
question and an image, please analyze the content and provide your answer in the specified format \
below:
```
**THOUGHT PROCESS:** [Your thought process for arriving at the answer].
**FINAL ANSWER:** The answer is X. BECAUSE: [Your detailed reasoning].
```
- [Your thought process for arriving at the answer] should provide a step-by-step process that led \
to your chosen answer.
- X must be one of the options: A, B, C, D, E.
- [Your detailed reasoning] should clearly explain the rationale behind your choice.
**Important:** Adhere strictly to the above format without deviations.""",
    answered=f"**FINAL ANSWER:** {THE_ANSWER}",
    reasoned=f"**THOUGHT PROCESS:** {{rationale}}\n**FINAL ANSWER:** {THE_ANSWER}",
)

STEP_BY_STEP = " Think step by step before answering."
OPENLY = "Answer with a number, a word or a short phrase in the following format: 'The answer is X"

MMMU = PromptTemplate(
    system=ASSISTANT,
    ask="Answer with the option letter from the given choices in the following format:"
    " 'The answer is X.' (without quotes) where X must be one of options.",
    ask_open=f"{OPENLY}.' (without quotes).",
    answered=THE_ANSWER,
)
MMMU_REASONED = PromptTemplate(
    system=ASSISTANT,
    ask="Answer with the option letter from the given choices in the following format:"
    " 'The answer is X. BECAUSE: xxx' (without quotes) where X must be one of options."
    + STEP_BY_STEP,
    ask_open=f"{OPENLY}. BECAUSE: xxx' (without quotes).{STEP_BY_STEP}",
    answered=THE_ANSWER,
    reasoned=THE_ANSWER + AND_WHY,
)

ASK_BOXED = (
    "Answer the preceding multiple choice question. The format of your response should follow this"
    r" format: 'The answer is \boxed{X} or \boxed{YOUR_ANSWER}."
)
EITHER = (
    " (without quotes), where 'X' must be one of the options or 'YOUR_ANSWER' is your conclusion."
)

MATH_V = PromptTemplate(system=ASSISTANT, ask=f"{ASK_BOXED}'{EITHER}", answered=BOXED)
MATH_V_REASONED = PromptTemplate(
    system=ASSISTANT,
    ask=f"{ASK_BOXED} BECAUSE: xxx'{EITHER}{STEP_BY_STEP}",
    answered=BOXED,
    reasoned=BOXED + AND_WHY,
)

VSR_MC = MMMU
VIZ_WIZ = PromptTemplate(
    system=ASSISTANT,
    ask="Answer the question using a single word or phrase. When the provided information is"
    " insufficient, answer 'unanswerable'.",
)

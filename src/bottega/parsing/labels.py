"""Parsers of labels and their synonyms, and contradictions in the text after a label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import ascii_letters, ascii_lowercase

from bottega.errors import SettingError
from bottega.parsing.answers import (
    ANSWER_PHRASE,
    QUOTES,
    WORDS,
    ChoiceIndex,
    choice_index,
    cut_dialogue,
    drop_confidence,
    find_stated_answers,
    normalize,
    rationale_before,
    read_confidence,
    strip_thinking,
    unwrap,
)
from bottega.parsing.introductions import CLASSES, only_introduces, possible_labels
from bottega.types import Answer, Completion, Query

# A character outside ASCII is a token of its own: Chinese, Japanese and Thai have no spaces.
WORD = re.compile(r"[a-z]+|[0-9]+|[^\W_]")
TOKEN = re.compile(rf"{WORD.pattern}|[^\s\w]")
ARTICLE = re.compile(r"\ba(?=[ \t]+[a-z])")
# With an "s", shorter words become other words: "as", "is", "its".
LAST_WORD = re.compile(r" [a-z]{3,} \Z")
# After a label, these words may retract it. The "t" is from "isn't".
NEGATIONS = "cannot|never|no|nor|not|t"
RETRACTIONS = (
    "actually|alternatively|although|apologies|but|correction|false|however|incorrect|instead"
    "|kidding|maybe|mistake|mistaken|negated|oops|perhaps|possibly|rather|sorry|uncertain|unlikely"
    "|unsure|wait|wrong|不|错|錯|(?:disregard|ignore|scratch|strike)  (?:that|this)"
)
DOUBTS = re.compile(f" (?:{NEGATIONS}|{RETRACTIONS}) ")
RETRACTED = re.compile(f" (?:{RETRACTIONS}) ")
# "It is not on a leash" after a label describes the image and does not retract the label. Such a
# sentence begins with SUBJECT, contains one of MILD_DOUBTS, and does not match SPEAKER. REFERENCE
# must not follow the doubt.
SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
SUBJECT = re.compile(" (?:an?|both|he|her|his|it|its|no|she|the|their|there|these|they) ")
MILD_DOUBTS = re.compile(f" (?:{NEGATIONS}|although|but|instead|rather) ")
SPEAKER = re.compile(
    " (?:i|me|my|we|you|answer|case|category|certain|choice|class|clear|clearly|confident|correct"
    "|could|determine|enough|exactly|fit|identify|know|label|like|list|match|may|might|one|option"
    "|options|possible|question|recognise|recognize|right|say|sure|tell|true) "
)
REFERENCE = re.compile(
    " (?:any|be|entirely|here|it|necessarily|present|quite|really|shown|so|that|the|there|this"
    "|visible) "
)
NEGATIVE = ("no", "false")
YES_OR_NO = {"yes", "no", "true", "false"}


def contradicts(
    text: str, labels: Sequence[str], index: ChoiceIndex, doubts: re.Pattern[str] = DOUBTS
) -> bool:
    """Return whether the text contains a word of doubt, or a choice that is not one of the labels,
    in the singular or plural. The comparison runs with and without punctuation: the first
    distinguishes "C" from "C++", the second finds "salt-and-pepper"."""
    folded = normalize(text)
    if not folded:
        return False
    for pattern in (TOKEN, WORD):
        own = [_tokens(normalize(label), pattern) for label in labels]
        choices = zip(index.choices, (_tokens(one, pattern) for one in index.texts), strict=True)
        others = [(choice, other) for choice, other in choices if other and other not in own]
        named = {other for _, other in others}
        own_forms = [form for one in own if one for form in _forms(one) if form not in named]
        said = rest = _tokens(folded, pattern)
        for form in sorted(own_forms, key=len, reverse=True):
            rest = rest.replace(form, "\n")
        if doubts.search(rest) and _is_doubtful(text, own_forms, doubts, index):
            return True
        for choice, other in others:
            if other == " a " and not choice.islower():
                if other in _tokens(normalize(ARTICLE.sub("", text)), pattern):
                    return True
                continue
            # "hot dog" contains "dog", so only a "dog" outside it counts.
            for form in _forms(other):
                if form in (rest if any(form in one for one in own_forms) else said):
                    return True
    return False


def _is_doubtful(
    text: str, own_forms: Sequence[str], doubts: re.Pattern[str], index: ChoiceIndex
) -> bool:
    """Return whether a sentence with a word of doubt is more than a description of the image."""
    if YES_OR_NO.intersection(index.texts):
        return True
    sentences = (_tokens(normalize(one), WORD) for one in SENTENCE.split(text))
    return any(doubts.search(one) and not _describes(one, own_forms) for one in sentences)


def _describes(sentence: str, own_forms: Sequence[str]) -> bool:
    """Return whether the words of doubt in a sentence concern something other than the label.

    The sentence must begin with a subject in the third person. It must not mention the speaker, and
    neither the label nor a reference to it may follow the negation.
    """
    mild = MILD_DOUBTS.search(sentence)
    if mild is None or RETRACTED.search(MILD_DOUBTS.sub(" ", sentence)):
        return False
    rest = sentence[mild.end() :]
    return (
        SUBJECT.match(sentence) is not None
        and bool(rest)
        and SPEAKER.search(sentence) is None
        and REFERENCE.match(rest) is None
        and not any(form in rest for form in own_forms)
    )


def _tokens(text: str, pattern: re.Pattern[str]) -> str:
    """Return each token between two spaces; adjacent matches then never overlap."""
    return "".join(f" {token} " for token in pattern.findall(text))


def _forms(tokens: str) -> tuple[str, ...]:
    """Return the tokens, also in the plural if the last one is a word."""
    if not LAST_WORD.search(tokens):
        return (tokens,)
    return tokens, f"{tokens[:-1]}s ", f"{tokens[:-1]}es "


STATED_LABEL = re.compile(
    rf"^[^\w\n]*(?:(?:final |correct |predicted )?(?:{CLASSES}|answer choice|prediction|output"
    r"|response)\W*[:：]|(?:答案|标签|类别|الإجابة|الجواب)\s*[:：])\s*(.*)$",
    re.IGNORECASE | re.MULTILINE,
)
SEPARATORS = re.compile(r"([,;|\n]+(?: and )?| and )")
NO_LABEL = "none"
STRUCK_OUT = re.compile(r"~~[^~\n]+~~")
REJECTED = re.compile(r"[❌✖✗✘🚫]|\(\s*0(?:\.0+)?\s*%\s*\)")  # as in "dog ❌" and "dog (0%)"
# Markdown at the start of a line. The blank after it distinguishes a bullet from a minus sign.
BULLET = re.compile(r"\A[\s*_]*(?:[-–—•·▪◦>→]|[-=]>|#{1,6})\s+")
# The letter or the number of a choice, as in "(B) dog", "**B:** dog" and "2. dog".
ENUMERATOR = re.compile(
    r"\A(?:[\s*_]*[Oo]ption\s)?[\s*_(\[]*([a-zA-Z]|[0-9]{1,3})[*_]*[.):\]]{1,2}[\s*_]+"
)


class LabelParser:
    """Parser of `Answer Choice: ...` and `Confidence Score: ...`, or else of the whole reply.

    The last of each line counts, because a model may repeat the template before it answers.

    The label must equal one of the query's choices up to case, outer punctuation and spacing. It
    may be a line of its own, with a bullet, bold, quotes or its own letter or number ("B. dog" if
    dog is the second choice), a letter before other text ("B. Because"), a field of an object
    (`{"answer": "dog"}`), or the end of a plain sentence ("Based on the image, the animal is a
    dog."). Dialogue that continues after it is ignored (`cut_dialogue`). Other text after it must
    not name another choice or express doubt. With no choices, any text is an answer. The text
    before the first answer is the rationale. With `multi_label` the reply may list several choices
    separated by commas or on several lines `Label: ...`, or say "none". Text that is struck out
    ("~~dog~~ cat") is ignored. Everything else is `Answer(valid=False)`.
    """

    def __init__(self, *, multi_label: bool = False) -> None:
        self.multi_label = multi_label

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        reply = strip_thinking(completion.text)
        whole = reply in query.choices
        reply = reply if whole else cut_dialogue(unwrap(STRUCK_OUT.sub("", reply)), query)
        stated = [] if whole else self._stated(reply, query.choices)
        listed = ", ".join(one[1] for one in stated if one.re is STATED_LABEL)
        text = (listed or (stated[-1][1] if stated else reply)).strip()
        later = drop_confidence(reply[stated[-1].end() :]) if stated else ""
        rationale = rationale_before(reply, stated)
        labels = self._labels(text, later, query.choices)
        if labels is None:
            return Answer(text, valid=False, rationale=rationale)
        shown = ", ".join(labels) or NO_LABEL
        sure = read_confidence(reply, completion)
        return Answer(shown, labels=labels, confidence=sure, rationale=rationale)

    def _stated(self, reply: str, choices: Sequence[str]) -> list[re.Match[str]]:
        """Return the lines `Answer: ...`, or else the first line such as `Label: ...` that states a
        label: an explanation may have lines such as `Type: mammal`. With `multi_label`, return all
        lines with the field of the last one."""
        answers = find_stated_answers(reply)
        if answers or not choices:
            return answers
        stated = list(STATED_LABEL.finditer(reply))
        if self.multi_label or not stated:
            return [one for one in stated if _field(one) == _field(stated[-1])]
        index = choice_index(tuple(choices))
        readable = (one for one in stated if _first_line(one[1].strip(), index) is not None)
        return [one for one in (next(readable, None),) if one is not None]

    def _labels(self, text: str, later: str, choices: Sequence[str]) -> tuple[str, ...] | None:
        """Return the labels in the text, unless `later` text may contradict them."""
        if not choices:
            bare = text.strip(QUOTES)
            return (bare,) if bare else None
        if text not in choices and REJECTED.search(f"{text}\n{later}"):
            return None
        index = choice_index(tuple(choices))
        one = _listed(text, index)
        if one is None and not self.multi_label:
            one = _first_line(text, index)
        labels: tuple[str, ...] | None = None if one is None else (one,)
        if labels is None and self.multi_label:
            labels = () if normalize(text) == NO_LABEL else _split(text, index)
        return None if labels is None or contradicts(later, labels, index) else labels


class SynonymParser:
    """Label parser that replaces each name of a label by the label: "tabby" by "cat".

    `names` gives the other names of each label; a label is its own name, too. A name belongs to one
    label (`SettingError`). Replies with other names are invalid.
    """

    def __init__(self, names: Mapping[str, Sequence[str]], *, multi_label: bool = False) -> None:
        self._label_of = {label.casefold(): label for label in names}
        self._names = list(names)
        for label, others in names.items():
            for name in others:
                owner = self._label_of.setdefault(name.casefold(), label)
                if owner != label:
                    raise SettingError(
                        f"the name {name!r} belongs to {owner!r} and {label!r}",
                        hint="give each name to one label",
                    )
                self._names.append(name)
        self._parse = LabelParser(multi_label=multi_label)

    def __call__(self, query: Query, completion: Completion, /) -> Answer:
        choices = tuple(dict.fromkeys((*query.choices, *self._names)))
        text = strip_thinking(completion.text)
        answer = self._parse(replace(query, choices=choices), replace(completion, text=text))
        if not answer.valid:
            return answer
        labels = [self._label_of.get(name.casefold(), name) for name in answer.labels]
        unique = tuple(dict.fromkeys(labels))
        return replace(answer, text=", ".join(unique) or answer.text, labels=unique)


def stated_label(query: Query, completion: Completion) -> Answer | None:
    """Return the label that `LabelParser` reads for a query with choices, or None. Returns None if
    choices are single letters: "(B)" may then mean the second choice."""
    choices = query.choices
    if not choices or any(len(choice) == 1 and choice in ascii_letters for choice in choices):
        return None
    answer = LabelParser()(query, completion)
    return answer if answer.valid and answer.labels == (answer.text,) else None


def _field(stated: re.Match[str]) -> str:
    """Return the field of a line such as `Label: ...`, without case and punctuation."""
    return normalize(stated[0][: stated.start(1) - stated.start()])


def _listed(text: str, index: ChoiceIndex) -> str | None:
    """Return the choice that equals the text, with or without a bullet. Return None for "- 5" if
    "-5" is a choice, with any dash in either."""
    label = index.find(text)
    bullet = BULLET.match(text)
    if label is not None or bullet is None:
        return label
    return None if index.has_signed(text) else index.find(text[bullet.end() :])


def _first_line(text: str, index: ChoiceIndex) -> str | None:
    """Return the choice that the first line states, unless later text may contradict it. If the
    line only introduces the next one ("The answer is:"), the next line is read."""
    lines = [line for line in text.splitlines() if WORDS.search(line)]
    if not lines:
        return None
    first, later = lines[0], lines[1:]
    label, rest = _introduced(first, index)
    if label is None and later and only_introduces(first):
        first = later.pop(0)
        label, rest = _introduced(first, index)
    if label is None:
        label, rest = _in_sentence(first, index)
    if label is None:
        return None
    # "No, there is not" confirms the label "no".
    doubts = RETRACTED if normalize(label) in NEGATIVE else DOUBTS
    if contradicts(rest, (label,), index, doubts):
        return None
    return None if contradicts("\n".join(later), (label,), index) else label


def _in_sentence(line: str, index: ChoiceIndex) -> tuple[str | None, str]:
    """Return the choice that a sentence such as "The animal is a dog." states, and the text after
    it."""
    is_yes_or_no = set(index.texts) <= YES_OR_NO
    for head, rest in possible_labels(line, is_yes_or_no=is_yes_or_no):
        label, more = _introduced(head, index)
        if label is not None:
            return label, f"{more}\n{rest}"
    return None, ""


def _introduced(line: str, index: ChoiceIndex) -> tuple[str | None, str]:
    """Return the choice that is the line, less "the answer is" and an enumerator; or the choice
    that is the enumerator's letter, and the text after it."""
    bare = line.lstrip(QUOTES)
    phrase = ANSWER_PHRASE.match(bare)
    said = bare[phrase.end() :] if phrase else line
    label = _listed(said, index)
    enumerator = ENUMERATOR.match(said)
    if label is not None or enumerator is None:
        return label, ""
    mark, rest = enumerator[1], said[enumerator.end() :]
    named = index.find(mark)
    if named is not None:
        return (named, rest) if mark.isalpha() else (None, "")
    if mark.isdigit() and rest[:1].isdigit():  # "1. 5" may be 1.5
        return None, ""
    label = index.find(rest)
    position = int(mark) - 1 if mark.isdigit() else ascii_lowercase.index(mark.lower())
    return (label if label in index.choices[position : position + 1] else None), ""


def _split(text: str, index: ChoiceIndex) -> tuple[str, ...] | None:
    """Return the labels of a list, or None if any part belongs to no choice.

    A label may contain a separator, so the longest run of parts that is a choice wins.
    """
    parts = SEPARATORS.split(text)  # captured separators are at the odd indices
    # An upper bound: each separator is at least one character of a choice.
    max_length = 2 * max(map(len, index.texts)) + 1
    found: list[str] = []
    start = 0
    while start < len(parts):
        for end in range(min(len(parts), start + max_length), start, -2):
            label = _listed("".join(parts[start:end]), index)
            if label is not None:
                found.append(label)
                start = end + 1
                break
        else:
            return None
    return tuple(dict.fromkeys(found))

"""Parser of labels that a model calls by other names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bottega.errors import SettingError
from bottega.parsing.labels import LabelParser
from bottega.parsing.replies import strip_thinking
from bottega.types import Answer, Completion, Query


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

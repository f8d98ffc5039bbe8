"""What the demonstrations of each method show, as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from bottega.evaluation.report.sections import Section
from bottega.evaluation.run_store import SHOWN


def demonstration_texts(section: Section) -> list[str]:
    """Return a text for each run that describes its methods, empty for runs of earlier versions."""
    several = len(section.runs) > 1
    texts = {
        name: description_text(run.settings.get(SHOWN, {})) for name, run in section.runs.items()
    }
    return [f"{name}: {text}" if several else text for name, text in texts.items() if text]


def description_text(shown: Mapping[str, Mapping[str, str]]) -> str:
    """Return the descriptions, each with its methods: "top-k (rationales none)"."""
    methods: defaultdict[str, list[str]] = defaultdict(list)
    for name, what in shown.items():
        words = (f"{key.replace('_', ' ')} {value}" for key, value in what.items())
        methods[", ".join(words)].append(name)
    return "; ".join(f"{', '.join(names)} ({what})" for what, names in methods.items())

"""What the demonstrations of each method show, as text."""

from __future__ import annotations

from bottega.evaluation.prompts import description_text
from bottega.evaluation.report.sections import Section
from bottega.evaluation.run_store import SHOWN


def demonstration_texts(section: Section) -> list[str]:
    """Return a text for each run with descriptions of its methods."""
    several = len(section.runs) > 1
    texts = {
        name: description_text(run.settings.get(SHOWN, {})) for name, run in section.runs.items()
    }
    return [f"{name}: {text}" if several else text for name, text in texts.items() if text]

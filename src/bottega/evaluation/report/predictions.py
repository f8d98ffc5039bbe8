"""Predictions of a run in the form of A-OKVQA's leaderboard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import orjson

from bottega._util.durable_files import replace_file
from bottega.errors import SettingError
from bottega.evaluation.outcomes import method_title
from bottega.evaluation.report.runs import opened_run

DIRECT, BY_CHOICE = "direct_answer", "multiple_choice"


class PredictionCounts(NamedTuple):
    """Number of questions with predictions, and of items without."""

    questions: int
    missing: int


def write_predictions(folders: Iterable[Path], file: Path) -> PredictionCounts:
    """Write the answers of runs over A-OKVQA as one JSON object from question ids to
    `direct_answer` and `multiple_choice`, as `prepare_predictions.py` of allenai/aokvqa does.

    Pass at most one run of each form. Failed items and invalid answers have no prediction. Raises
    `SettingError` for runs of other benchmarks, of several methods or of the same form, and
    `StoreError` for a folder without a run.
    """
    predictions: defaultdict[str, dict[str, str]] = defaultdict(dict)
    read: dict[str, Path] = {}
    missing = 0
    for folder in folders:
        form, answers, items = _answers(folder)
        if form in read:
            raise SettingError(
                f"{read[form]} and {folder} both have predictions of the form {form}",
                hint="pass at most one run with answers=choices and one without",
            )
        read[form] = folder
        missing += items - len(answers)
        for id, text in answers.items():
            predictions[id][form] = text
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, orjson.dumps(predictions))
    except OSError as error:
        raise SettingError(
            f"{file} is not writable: {error.strerror}", hint="set another --predictions file"
        ) from error
    return PredictionCounts(len(predictions), missing)


def _answers(folder: Path) -> tuple[str, dict[str, str], int]:
    """Return the form of a run's predictions, the predictions by question id, and the number of
    items."""
    with opened_run(folder) as (connection, settings):
        benchmark = str(settings["benchmark"])
        if not benchmark.startswith("aokvqa:"):
            raise SettingError(
                f"--predictions needs runs over aokvqa, got {benchmark}",
                hint="remove --predictions, or pass another run",
            )
        methods = connection.execute("SELECT DISTINCT method, shots FROM answers").fetchall()
        if len(methods) > 1:
            titles = ", ".join(method_title(*key) for key in methods)
            raise SettingError(
                f"predictions need a run of one method, got {titles} in {folder}",
                hint="evaluate the method with its own --out folder",
            )
        rows = connection.execute(
            "SELECT answer, json_extract(trace, '$.query_id') FROM answers"
        ).fetchall()
        choices = connection.execute("SELECT choices, count(*) FROM items").fetchone()
    answers = {
        str(id): str(answer["text"])
        for answer, id in ((orjson.loads(text), id) for text, id in rows)
        if answer["valid"] and id is not None
    }
    form = BY_CHOICE if orjson.loads(choices[0]) else DIRECT
    return form, answers, int(choices[1])

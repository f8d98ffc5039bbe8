from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bottega import KnowledgeBase, TowerEmbedder, load_image_folder
from bottega._util.locations import StoreLocation
from bottega.bundled import MODELS
from bottega.cli import answer as answer_command
from bottega.evaluation.knowledge_rows import open_rows
from bottega.knowledge.embedders.names import packaged_name
from bottega.knowledge.embedders.photo_embedder import default_photos
from bottega.naming import has_photos
from bottega.pipeline import Pipeline
from bottega.protocols import Generator
from bottega.recipes import rcts
from bottega.recording import TraceStore
from bottega.types import Answer, Completion
from tests.cli.conftest import Run
from tests.generation.test_bundled import encoded, landscape
from tests.reasoner import Reasoner
from tests.recording.test_traces import trace
from tests.server import Server, ok, raw, refuse, reply


def answers(document: object) -> list[dict[str, Any]]:
    assert isinstance(document, list)
    return document


def test_classify_with_the_bundled_model(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    [answer] = answers(run("classify", "k.db", "query.jpg", "--shots", 4, "--json").json)
    assert (answer["answer"], answer["valid"], answer["cost_usd"]) == ("leaf", True, 0.0)
    assert len(answer["demonstrations"]) == 4
    assert 0 < answer["confidence"] <= 1
    assert answer["prompt_tokens"] > 0


def test_the_full_name_of_a_bundled_model_is_accepted(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    plain, named = (
        answers(run("classify", "k.db", "query.jpg", "--model", model, "--json").json)[0]
        for model in ("bundled", "bundled:apprentice")
    )
    assert plain["model"] == named["model"] == "bundled:apprentice"
    assert plain["answer"] == named["answer"]
    failed = run("classify", "k.db", "query.jpg", "--model", "bundled:journeyman")
    assert failed.code == 2
    assert "model is unknown, got 'bundled:journeyman'" in failed.err


def test_more_shots_than_examples_shows_all_examples(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    [answer] = answers(run("classify", "k.db", "query.jpg", "--shots", 50, "--json").json)
    assert len(answer["demonstrations"]) == 12
    note = "50 shots requested; only 12 examples available"
    for method, is_noted in (("visual-rag", True), ("knn", True), ("logreg", False)):
        done = run("classify", "k.db", "query.jpg", "--shots", 50, "--method", method)
        assert (done.code, note in done.err) == (0, is_noted)
    assert "requested" not in run("classify", "k.db", "query.jpg", "--shots", 12).err


def test_ask_and_eval_say_that_shots_are_limited(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "bundled")
    ask = ("ask", "What is it?", "--image", "query.jpg", "--kb", "k.db", "--json", "--shots")
    for shots, noted in ((5000, True), (12, False)):
        done = run(*ask, shots)
        assert isinstance(done.json, dict)
        assert len(done.json["demonstrations"]) == 12
        assert ("5000 shots requested; only 12 examples available" in done.err) == noted
    evaluation = ("eval", f"image-folder:{pets}", "--methods", "vote", "--shots")
    note = "shots requested; only 9 examples available"
    assert f"5000 {note}" in run(*evaluation, "2,5000").err
    assert note not in run(*evaluation, 9).err
    regression = ("eval", f"image-folder:{pets}", "--methods", "logreg", "--shots", 5000)
    assert note not in run(*regression).err


def test_eval_suggests_the_nearest_method(run: Run, pets: Path) -> None:
    done = run("eval", f"image-folder:{pets}", "--methods", "visualrag")
    assert (done.code, "did you mean visual-rag?" in done.err) == (2, True), done.err


def test_an_unknown_order_is_rejected(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    done = run("classify", "k.db", "query.jpg", "--order", "best")
    assert (done.code, "--order must be nearest-" in done.err) == (2, True)
    assert "got 'best'" in done.err


def test_swapped_arguments_are_explained(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    done = run("classify", "query.jpg", "k.db")
    assert done.code == 2
    assert "query.jpg is an image, but the first argument is the knowledge base" in done.err
    assert "bottega classify K.db IMAGE" in done.err


def test_an_empty_question_is_rejected(run: Run) -> None:
    done = run("ask", " ")
    assert (done.code, "question is empty" in done.err) == (2, True)


def test_an_image_is_not_its_own_demonstration(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    image = pets / "sky" / "1.png"
    [answer] = answers(run("classify", "k.db", image, "--shots", 12, "--json").json)
    assert len(answer["demonstrations"]) == 11


def test_a_search_costs_all_its_requests(
    run: Run, pets: Path, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searching(knowledge: KnowledgeBase, generator: Generator, **more: Any) -> Pipeline:
        options = {name: more[name] for name in ("labels", "record", "price")}
        return rcts(knowledge, generator, rollouts=2, **options)

    monkeypatch.setattr(answer_command, "visual_rag", searching)
    names = cycle(["leaf", "sky", "ruby"])  # the first answers disagree
    served.answers = [reasoner := Reasoner(answers=lambda _: next(names), format="Answer: {}")]
    run("add", "k.db", pets)
    command = ("classify", "k.db", "query.jpg", "--model", "openai:m", "--price", "1,1", "--json")
    [answer] = answers(run(*command).json)
    assert reasoner.samples > 3
    assert (answer["calls"], answer["prompt_tokens"]) == (reasoner.samples, reasoner.prompt_tokens)
    assert answer["completion_tokens"] == 2 * reasoner.samples
    spent = (answer["prompt_tokens"] + answer["completion_tokens"]) / 1e6
    assert answer["cost_usd"] == pytest.approx(spent)


def test_a_bad_image_does_not_stop_the_others(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    Path("bad.jpg").write_bytes(b"no image")
    done = run("classify", "k.db", "bad.jpg", "query.jpg", "nowhere.png", "--json")
    bad, good, missing = answers(done.json)
    assert done.code == 1
    assert "not a readable image" in bad["error"]
    assert "cannot be read" in missing["error"]
    assert good["answer"] == "leaf"
    for shown in (done.err, run("classify", "k.db", "bad.jpg", "query.jpg").err):
        assert "skipped: bad.jpg is not a readable image" in shown


def test_a_folder_is_classified_without_traces(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    done = run("classify", "k.db", pets / "sky", "--traces", "none", "--json")
    assert [Path(answer["image"]).name for answer in answers(done.json)] == [
        f"{i}.png" for i in range(4)
    ]
    assert not Path("traces.db").exists()
    Path("empty").mkdir()
    assert "no images" in run("classify", "k.db", "empty").err


def test_a_rejected_key_is_reported_once(run: Run, pets: Path, served: Server) -> None:
    run("add", "k.db", pets)
    served.answers = [refuse(401, "bad key")]
    failed = run("classify", "k.db", pets, "--model", "openai:m")
    assert failed.code == 1
    assert failed.err.count("error: ") == 1


def test_an_invalid_reply_is_shown(run: Run, pets: Path, served: Server) -> None:
    run("add", "k.db", pets)
    served.answers = [ok("It looks like a leaf.\x1b]0;title\x07")]
    done = run("classify", "k.db", "query.jpg", "--model", "openai:m")
    assert "(invalid) 'It looks like a leaf." in done.out
    assert "\x1b" not in run("ask", "?", "-i", "query.jpg", "--model", "openai:m").out


def test_classify_does_not_change_the_knowledge_base(run: Run, pets: Path) -> None:
    with KnowledgeBase.open("k.db", embed=TowerEmbedder.bundled()) as knowledge:
        knowledge.add(load_image_folder(pets))
    before = Path("k.db").read_bytes()
    assert run("classify", "k.db", "query.jpg").code == 0
    assert Path("k.db").read_bytes() == before


@pytest.mark.parametrize("name", ["query.jpg/traces.db", "pets", "kept.db"])
def test_unwritable_traces_fail_before_the_model_is_called(
    run: Run, pets: Path, served: Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def read_only(path: Path) -> TraceStore:
        traces = opened(path)
        traces._tables.execute("PRAGMA query_only = ON")  # a superuser ignores file modes
        return traces

    opened = TraceStore.open
    opened("kept.db").close()
    if name == "kept.db":
        monkeypatch.setattr(TraceStore, "open", read_only)
    monkeypatch.setenv("BOTTEGA_TRACES", name)
    failed = run("ask", "Which pet?", "--model", "openai:m")
    assert (failed.code, served.paths) == (1, [])
    assert f"cannot be stored in {name}: " in failed.err
    assert "--traces none" in failed.err and "BOTTEGA_TRACES" in failed.err


def test_an_emptied_knowledge_base_gets_a_hint(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    ids = [row["id"] for row in answers(run("ls", "k.db", "--json").json)]
    run("rm", "k.db", *ids)
    failed = run("classify", "k.db", "query.jpg")
    assert failed.code == 1
    assert "bottega add" in failed.err


def test_the_papers_prompt_is_sent_and_its_cost_recorded(
    run: Run, pets: Path, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("add", "k.db", pets)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123")
    served.answers = [ok("Answer Choice: leaf\nConfidence Score: 0.8", model="gpt-4o")]
    done = run("classify", "k.db", "query.jpg", "--model", "openai:gpt-4o", "--shots", 2, "--json")
    [answer] = answers(done.json)
    assert (answer["answer"], answer["confidence"]) == ("leaf", 0.8)
    assert answer["cost_usd"] == pytest.approx((10 * 2.5 + 2 * 10) / 1e6)
    [body] = served.bodies
    assert body["model"] == "gpt-4o"
    [message] = body["messages"]
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["image_url", "text"] * 3
    urls = [p["image_url"]["url"] for p in message["content"] if p["type"] == "image_url"]
    assert all(url.startswith("data:image/") for url in urls)
    assert message["content"][-1]["text"].endswith("Repeat the format template for the answer.")
    logged = run("log", "--json")
    assert isinstance(logged.json, dict)
    [trace] = logged.json["traces"]
    assert trace["cost_usd"] == answer["cost_usd"]
    assert [d["id"] for d in trace["demonstrations"]] == [d["id"] for d in answer["demonstrations"]]
    assert "sk-secret" not in logged.out
    assert b"sk-secret" not in Path("traces.db").read_bytes()
    assert "leaf" in run("log", trace["id"][:8]).out
    assert "gpt-4o" in run("log").out


def test_files_of_one_name_are_logged_with_their_paths(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    files = (pets / "leaf" / "0.png", pets / "sky" / "0.png", "query.jpg")
    assert run("classify", "k.db", *files, "--model", "bundled").code == 0
    shown = run("log").out
    assert all(str(file) in shown for file in files)
    assert str(Path("query.jpg").resolve()) not in shown


def test_the_warning_about_photographs_names_the_knowledge_base(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "bundled")
    Path("photo.jpg").write_bytes(encoded(landscape(), "JPEG").data)
    for command in (
        ("classify", "k.db", "photo.jpg"),
        ("ask", "?", "-i", "photo.jpg", "--kb", "k.db"),
    ):
        done = run(*command, "--model", "bundled")
        assert "run bottega reindex k.db --embed photos" in done.err
        assert "K.db" not in done.err


def test_a_reasoned_prompt_asks_for_reasons_with_more_tokens(
    run: Run, pets: Path, served: Server
) -> None:
    run("add", "k.db", pets)
    served.answers = [ok("It is green.\nAnswer: leaf")]
    classify = ("classify", "k.db", "query.jpg", "--prompt", "reasoned")
    [answer] = answers(run(*classify, "--model", "openai:m", "--shots", 1, "--json").json)
    assert answer["answer"] == "leaf"
    [body] = served.bodies
    shown, request = body["messages"][1:]
    assert (shown["content"], body["max_tokens"]) == ("Answer: leaf", 512)
    assert "Explain your reasoning" in str(request)
    refused = run(*classify)  # the bundled model
    assert refused.code == 2
    assert "reads brief turns only, got --prompt reasoned" in refused.err


def test_the_log_shows_and_finds_questions_and_files(run: Run, pets: Path, served: Server) -> None:
    served.answers = [ok("leaf")]
    long = f"Which of {' and '.join(str(number) for number in range(40))} is it?"
    for question in ("What is this?", long):
        assert run("ask", question, "-i", "query.jpg", "--model", "openai:m").code == 0
    head, *rows = run("log").out.splitlines()
    assert head.split()[:4] == ["id", "time", "file", "question"]
    assert "What is this?" in rows[1]
    assert "query.jpg" in rows[1]
    assert "Which of 0 and 1" in rows[0] and "39 is it?" in rows[0] and "20 and" not in rows[0]

    def found(*options: object) -> int:
        return len(run("log", *options).out.splitlines()) - 1

    assert found("--text", "QUERY.jpg") == 2
    assert found("--text", "what is") == found("-n", 1) == 1
    assert found("--text", "elephant") == found("--tier", "master") == 0
    assert found("--since", "2020-01-01") == 2
    assert found("--since", "2999-01-01") == found("--namespace", "team") == 0


def test_the_log_shortens_answers_and_shows_ids_that_explain_finds(run: Run) -> None:
    with closing(TraceStore.open("gateway.db")) as store:
        ids = [f"req_01a2b3c4{number:04}ffff" for number in range(3)]
        answer = Answer(" ".join(["is"] * 500))
        store.write([replace(trace(), id=id, answer=answer) for id in ids])
    _, *rows = run("log", "--traces", "gateway.db").out.splitlines()
    assert sorted(row.split()[0] for row in rows) == [id[:16] for id in ids]
    assert all(len(row) < 300 for row in rows)
    # One row is also unique among the traces that it does not show.
    _, row = run("log", "--traces", "gateway.db", "-n", 1).out.splitlines()
    assert row in rows
    assert run("explain", row.split()[0], "--traces", "gateway.db").code == 0


def test_equal_replies_are_counted(run: Run) -> None:
    with closing(TraceStore.open("votes.db")) as store:
        one = trace()
        completions = tuple(Completion(text) for text in ("leaf", "stem", "leaf"))
        store.write([replace(one, reply=replace(one.reply, completions=completions))])
    shown = run("log", one.id, "--traces", "votes.db").out
    assert "reply:    (2 times) leaf\n" in shown and "reply:    stem\n" in shown


def test_reasons_are_shown_that_the_reply_lacks(run: Run) -> None:
    with closing(TraceStore.open("reasoned.db")) as store:
        store.write([replace(trace(), answer=Answer("dög", rationale="It barks."))])
    for command in ("log", "explain"):
        shown = run(command, "abc123", "--traces", "reasoned.db").out
        assert "reply:    dög\nreasons:  It barks.\n" in shown


def test_a_missing_file_of_traces_is_an_error(run: Run) -> None:
    for command in (("log",), ("explain", "4f1c9a2b")):
        refused = run(*command, "--traces", "missing.db")
        assert (refused.code, "missing.db does not exist" in refused.err) == (1, True)
        nothing = run(*command)
        assert (nothing.code, "no answer is recorded yet" in nothing.err) == (1, True)
    assert not list(Path.cwd().glob("*.db"))


def test_the_log_states_why_a_tier_answered_and_where_examples_are_from(run: Run) -> None:
    first, second = trace().candidates
    first = replace(first, example=replace(first.example, source="master:big"))
    with closing(TraceStore.open("traces.db")) as store:
        store.write([replace(trace(), candidates=(first, second), reason="cold start")])
    out = run("log", "abc123").out
    assert "route:    cold start\n" in out
    rows = [line.split()[-1] for line in out.splitlines() if line.lstrip()[:1] in ("1", "2")]
    assert rows == ["master:big", "-"]


def test_a_given_price_sets_the_cost(run: Run, pets: Path, served: Server) -> None:
    run("add", "k.db", pets)
    served.answers = [ok("Answer Choice: leaf")]
    priced = ("classify", "k.db", "query.jpg", "--model", "openai:own", "--json")
    assert answers(run(*priced).json)[0]["cost_usd"] is None
    assert answers(run(*priced, "--price", "1,2").json)[0]["cost_usd"] == pytest.approx(14e-6)
    assert run(*priced, "--price", "cheap").code == 2


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (raw(b"<html>hello</html>"), "OPENAI_BASE_URL"),
        (refuse(401, "bad key"), "OPENAI_API_KEY"),
        (refuse(404, "no such model"), "model"),
    ],
)
def test_endpoint_errors_name_the_setting_to_check(
    run: Run,
    pets: Path,
    served: Server,
    reply: Any,
    expected: str,
) -> None:
    run("add", "k.db", pets)
    served.answers = [reply]
    failed = run("ask", "what?", "--image", "query.jpg", "--model", "openai:m")
    assert failed.code == 1
    assert expected in failed.err


def test_ask_with_and_without_a_knowledge_base(run: Run, pets: Path, served: Server) -> None:
    run("add", "k.db", pets)
    served.answers = [ok("A green disc.")]
    command = ("ask", "What is this?", "-i", "query.jpg", "--model", "openai:m")
    assert run(*command).out == "A green disc.\n"
    assert run(*command, "--kb", "k.db", "--shots", 2).out == "A green disc.\n"
    without, shown = served.bodies
    log = run("log", "--json").json
    assert isinstance(log, dict)
    with_demonstrations, zero_shot = log["traces"]
    head = "position"
    assert head not in run("log", zero_shot["id"]).out
    assert head in run("log", with_demonstrations["id"]).out
    assert [m["role"] for m in without["messages"]] == ["user"]
    assert [m["role"] for m in shown["messages"]] == ["user", "assistant"] * 2 + ["user"]


def test_models_are_listed(run: Run, served: Server) -> None:
    assert "bundled:apprentice" in run("models").out
    listed = run("models", "--json").json
    assert isinstance(listed, list)
    by_name = {row["model"]: row["kind"] for row in listed}
    assert {f"bundled:{name}" for name in MODELS} <= set(by_name)
    kinds = ["drawings", "photographs", "both", "simulated", "endpoints", "transformers"]
    assert [kind for kind, _ in groupby(by_name.values())] == kinds
    assert by_name["bundled:photos-master"] == "photographs"
    assert by_name["openai-completions:NAME"] == "endpoints"

    async def listing(request: object) -> Any:
        return await raw(b'{"data": [{"id": "qwen"}]}', kind="application/json")(request)  # type: ignore[arg-type]

    served.answers = [listing]
    assert "openai:qwen" in run("models", "--endpoint").out


@pytest.mark.parametrize("mode", ["CMYK", "I;16", "RGBA", "P", "1", "L"])
def test_images_of_every_mode_are_classified(run: Run, pets: Path, mode: str) -> None:
    run("add", "k.db", pets)
    name = "odd.tif" if mode in ("CMYK", "I;16") else "odd.png"
    Image.new(mode, (300, 20), 1).save(name)
    assert run("classify", "k.db", name, "--json").code == 0


@pytest.mark.slow
def test_photographs_get_their_embedder_and_model_by_default(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_photos():
        pytest.skip("needs the extra [photos]")
    monkeypatch.setenv("BOTTEGA_CACHE", str(tmp_path / "cache"))
    for kind in ("red", "green"):
        for i in range(3):
            path = tmp_path / "pets" / kind / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(i).integers(0, 160, (6, 6, 3), dtype=np.uint8)
            noise[..., kind == "green"] += 90
            Image.fromarray(noise).resize((160, 160)).save(path)
    assert run("add", "k.db", tmp_path / "pets").code == 0
    with open_rows(StoreLocation(Path("k.db"))) as rows:
        [view] = rows.views().values()
    assert packaged_name(view.fingerprint) == default_photos()
    image = tmp_path / "pets" / "red" / "0.jpg"
    [answer] = answers(run("classify", "k.db", image, "--shots", 4, "--json").json)
    assert answer["model"] == "bundled:photos"
    assert answer["answer"] in ("red", "green", None)
    assert run("add", "old.db", tmp_path / "pets", "--embed", "bundled").code == 0
    [answer] = answers(run("classify", "old.db", image, "--shots", 4, "--json").json)
    assert answer["model"] == "bundled:apprentice"
    alone = run("ask", "What is it?", "--image", image, "--json").json
    assert isinstance(alone, dict)
    assert alone["model"] == "bundled:photos-master"


def test_stop_texts_and_token_limits_are_sent(run: Run, pets: Path, served: Server) -> None:
    run("add", "k.db", pets)
    options = ("--model", "openai:m", "--stop", r"\n", "--stop", "User:", "--max-tokens", 9)
    run("ask", "What is this?", *options)
    run("classify", "k.db", "query.jpg", *options)
    assert [(one["stop"], one["max_tokens"]) for one in served.bodies] == 2 * [(["\n", "User:"], 9)]
    failed = run("ask", "What is this?", "--stop", "")
    assert failed.code == 2
    assert "stop text is empty" in failed.err
    failed = run("classify", "k.db", "query.jpg", "--method", "knn", *options[2:])
    assert failed.code == 2
    assert "got --max-tokens, --stop" in failed.err


def test_text_completion_asks_with_plain_text(run: Run, pets: Path, served: Server) -> None:
    served.answers = [reply({"choices": [{"text": " Four.", "finish_reason": "stop"}]})]
    done = run("ask", "What is 2 + 2?", "--model", "openai-completions:m")
    assert (done.code, done.out) == (0, "Four.\n")
    assert served.paths == ["/v1/completions"]
    assert served.bodies[0]["prompt"] == "Question: What is 2 + 2?\nAnswer:"
    with_image = run("ask", "What is this?", "-i", "query.jpg", "--model", "openai-completions:m")
    assert with_image.code == 2
    assert "reads no images" in with_image.err
    nameless = run("ask", "What is 2 + 2?", "--model", "openai-completions:")
    assert nameless.code == 2
    assert "openai-completions: needs a model name" in nameless.err
    assert len(served.bodies) == 1


def test_labels_of_many_scripts_are_answers_on_one_line_each(run: Run, pets: Path) -> None:
    labels = {"leaf": "小狗", "ruby": "قطة", "sky": "\u202eevil"}
    for name, label in labels.items():
        (pets / name).rename(pets / label)
    run("add", "k.db", pets)
    odd = pets / "قطة" / "line\nbreak.png"
    next((pets / "قطة").iterdir()).rename(odd)
    done = run("classify", "k.db", pets, "--method", "knn", "--shots", 1, "--traces", "none")
    rows = done.out.splitlines()
    assert len(rows) == 13
    assert any("line break.png" in row for row in rows)
    assert "\u202e" not in done.out
    found = answers(run("classify", "k.db", pets, "--traces", "none", "--json").json)
    assert {one["answer"] for one in found} == set(labels.values())


def test_a_class_with_one_photograph_is_an_answer(run: Run, pets: Path) -> None:
    for extra in list((pets / "ruby").iterdir())[1:]:
        extra.rename(extra.with_name(f"query-{extra.name}.kept").with_suffix(".txt"))
    run("add", "k.db", pets)
    kept = next((pets / "ruby").glob("*.txt"))
    query = Path("query.png")
    query.write_bytes(kept.read_bytes())
    for options in ((), ("--method", "knn", "--shots", 1), ("--method", "logreg")):
        done = run("classify", "k.db", query, "--traces", "none", "--json", *options)
        [found] = answers(done.json)
        assert found["answer"] == "ruby", options
        assert 0 < found["confidence"] <= 1


def test_an_abstention_is_shown_as_unknown(run: Run, pets: Path, served: Server) -> None:
    served.answers = [ok("Answer: unknown")]
    run("add", "pets.db", pets)
    done = run("classify", "pets.db", pets.parent / "query.jpg", "--model", "openai:m")
    row = done.out.splitlines()[-1].split()
    assert row[1] == "unknown" and "(invalid)" not in done.out
    assert "unknown: no example resembles the image enough" in done.err
    assert "disagree" not in done.err


def test_a_single_label_is_noted(run: Run, pets: Path) -> None:
    for label in ("leaf", "sky"):
        shutil.rmtree(pets / label)
    added = run("add", "pets.db", pets)
    assert "pets.db has the label 'ruby' only; add images of other classes" in added.err
    done = run("classify", "pets.db", pets.parent / "query.jpg")
    assert "pets.db has the label 'ruby' only" in done.err
    refused = run("eval", f"image-folder:{pets}")
    assert refused.code == 1 and "has the label 'ruby' only: every answer is right" in refused.err


def test_a_question_unlike_the_examples_is_noted(run: Run, pets: Path) -> None:
    run("add", "pets.db", pets)
    image = pets.parent / "query.jpg"
    other = run("ask", "What colour is it?", "--image", image, "--kb", "pets.db")
    note = "the shown examples answer another question: 'What is in the image above?'"
    assert f"{note}; ask that question, or add examples of yours to pets.db" in other.err
    same = run("ask", "What is in the image above?", "--image", image, "--kb", "pets.db")
    assert "another question" not in same.err


def test_ask_without_an_image_says_how_to_add_one(run: Run) -> None:
    assert "add --image FILE" in run("ask", "What is it?").err
    assert "add --image FILE" in run("ask", "What is it?", "--model", "bundled:master").err


def test_ask_with_an_image_or_an_answer_has_no_hint(run: Run, pets: Path, served: Server) -> None:
    image = pets.parent / "query.jpg"
    assert "--image" not in run("ask", "?", "-i", image, "--model", "bundled:master").err
    served.answers = [ok("Paris")]
    assert "--image" not in run("ask", "Capital?", "--model", "openai:m").err

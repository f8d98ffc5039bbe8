from __future__ import annotations

from datetime import datetime
from pathlib import Path

from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Entry, ShadowSample
from tests.cli.conftest import Run

MOMENT = datetime(2023, 11, 14, 12).timestamp()  # local: the command prints local dates


def write_ledger(folder: Path) -> None:
    folder.mkdir()
    ledger = Ledger(folder / "gateway.db")
    for _ in range(20):
        ledger.record(Entry(MOMENT, "r", "k", "a", "master", "m", "answered", cost_usd=0.02))
    for _ in range(60):
        entry = Entry(
            MOMENT, "r", "k", "a", "apprentice", "m", "answered", 2, 0.75, 100, 5, cost_usd=0.001
        )
        ledger.record(entry)
    for _ in range(20):
        ledger.record(Entry(MOMENT, "r", "k", "b", "master", "m", "replayed"))
    ledger.record_shadow(ShadowSample(MOMENT, "r", "a", 0.9, 1.0, 0.0))
    ledger.close()


def test_figures_are_printed_with_n(run: Run, tmp_path: Path) -> None:
    write_ledger(tmp_path / "bottega-data")
    printed = run("savings")
    assert "100 requests, 11-14" in printed.out
    row = next(line for line in printed.out.splitlines() if line.startswith("apprentice, 2 shown"))
    assert row.split()[3:] == [
        "60",
        "60.0%",
        "6000",
        "300",
        "0.0600",
        *["0.750", "(n", "=", "60)", "0.000"],
    ]
    assert "spent:            0.4600 USD, n = 100" in printed.out
    assert "the master alone: 2.0000 USD [2.0000, 2.0000]" in printed.out
    assert "saved:            1.5400 USD [1.5400, 1.5400], 77% of it" in printed.out
    assert "n = 1 sampled answer of cheaper tiers, 0 undecided" in printed.out
    assert "an estimate: 80 requests not answered by the master" in printed.err
    assert "(n = 20)" in printed.err
    assert "20 of them, in namespaces without such answers" in printed.err


def test_servers_by_the_hour_are_subtracted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    ledger = Ledger(tmp_path / "d" / "gateway.db")
    ledger.set_hourly_prices({"apprentice": 0.5})
    for hour in range(12):
        for tier, usd in (("apprentice", 0.0), ("master", 1.0)):
            moment = MOMENT + 1800 * hour
            ledger.record(Entry(moment, "r", "k", "", tier, "m", "answered", cost_usd=usd))
    ledger.close()
    printed = run("savings", "--data", "d").out
    assert "spent:            12.0000 USD, n = 24" in printed
    assert "servers:          2.7500 USD, 5.5 hours" in printed
    assert "the master alone: 24.0000 USD" in printed
    assert "saved:            9.2500 USD [9.2500, 9.2500], 39% of it" in printed


def test_a_loss_is_no_share_of_the_master(run: Run, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    ledger = Ledger(tmp_path / "d" / "gateway.db")
    ledger.set_hourly_prices({"apprentice": 1.2})
    for second in range(0, 156, 2):
        for tier, usd in (("apprentice", 0.0), ("master", 1e-5)):
            moment = MOMENT + second
            ledger.record(Entry(moment, "r", "k", "", tier, "m", "answered", cost_usd=usd))
    ledger.close()
    printed = run("savings", "--data", "d").out
    assert "USD, 0.0428 hours" in printed
    saved = next(line for line in printed.splitlines() if line.startswith("saved"))
    assert saved.endswith(": the master alone would have cost less") and "%" not in saved


def test_token_counts_are_no_answers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    ledger = Ledger(tmp_path / "d" / "gateway.db")
    for _ in range(4):
        ledger.record(Entry(MOMENT, "r", "k", "", "", "", "counted", cost_usd=0.0))
    ledger.flush()
    assert run("savings", "--data", "d").out.startswith("0 requests, ")
    ledger.record(Entry(MOMENT, "r", "k", "", "apprentice", "m", "answered", cost_usd=0.1))
    ledger.close()
    lines = run("savings", "--data", "d").out.splitlines()
    assert lines[0].startswith("1 request, 11-14")
    assert next(line for line in lines if line.startswith("apprentice")).split()[2] == "100.0%"
    counted = next(line for line in lines if line.startswith("counted"))
    assert counted.split()[1:3] == ["4", "-"]


def test_savings_are_printed_as_json(run: Run, tmp_path: Path) -> None:
    write_ledger(tmp_path / "bottega-data")
    savings = run("savings", "--namespace", "a", "--since", "2020-01-01", "--json").json
    assert isinstance(savings, dict)
    assert (savings["requests"], savings["master_only"]["estimated"]) == (80, 60)
    assert savings["master_only"]["usd"]["n"] == 20
    assert savings["agreement"]["n"] == 1
    later = run("savings", "--since", "2030-01-01", "--json").json
    assert isinstance(later, dict)
    assert later["requests"] == 0


def test_missing_data_are_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    ledger = Ledger(tmp_path / "d" / "gateway.db")
    ledger.record(Entry(MOMENT, "r", "k", "", "apprentice", "m", "answered"))
    ledger.flush()
    printed = run("savings", "--data", "d")
    assert "the master alone: unknown: no priced answer of 'master'" in printed.out
    assert "tiers that answered: apprentice" in printed.err
    assert "1 of unknown price are excluded" in printed.out
    assert "agreement:        not measured; set rate = 0.02 in [shadow]" in printed.out
    ledger.record(Entry(MOMENT, "r", "k", "", "master", "m", "answered", cost_usd=1.0))
    ledger.close()
    assert "2.0000 USD (no interval: too few answers, n = 1)" in run("savings", "--data", "d").out


def test_lost_rows_are_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    ledger = Ledger(tmp_path / "d" / "gateway.db")
    ledger._set_note("lost", "7")
    ledger.close()
    assert "7 rows not written" in run("savings", "--data", "d").out


def test_an_empty_ledger_is_reported(run: Run) -> None:
    missing = run("savings")
    assert (missing.code, "does not exist" in missing.err) == (1, True)
    run("keys", "add", "team-a")
    empty = run("savings")
    assert (empty.code, empty.out) == (0, "no requests yet\n")
    assert "bottega serve --data bottega-data" in empty.err
    none = run("savings", "--namespace", "nowhere")
    assert none.out == "no requests match the filters\n"


def test_shares_are_of_answered_requests(run: Run, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    ledger = Ledger(tmp_path / "d" / "gateway.db")
    ledger.record(Entry(MOMENT, "r", "k", "", "apprentice", "m", "answered", cost_usd=0.1))
    for _ in range(3):
        entry = Entry(MOMENT, "r", "k", "", "", "", "failed", cost_usd=0.0, status=400)
        ledger.record(entry)
    ledger.close()
    printed = run("savings", "--data", "d").out.splitlines()
    assert printed[0].startswith("4 requests, 1 answered, ")
    assert next(line for line in printed if line.startswith("apprentice")).split()[2] == "100.0%"
    rejected = next(line for line in printed if line.startswith("rejected"))
    assert "3" in rejected and "%" not in rejected


def test_a_missing_ledger_names_the_option_of_the_demo(run: Run) -> None:
    done = run("savings")
    assert "gateway.db does not exist" in done.err
    assert "serve --demo keeps its ledger only with --data FOLDER" in " ".join(done.err.split())


def test_an_invalid_time_names_the_format(run: Run, tmp_path: Path) -> None:
    write_ledger(tmp_path / "bottega-data")
    done = run("savings", "--since", "lastweek")
    assert done.code == 2
    assert "--since must be a date or time such as 2026-01-31" in done.err
    assert "got 'lastweek'" in done.err
    later = run("savings", "--since", "2030-01-01T00:00:00+02:00", "--json").json
    assert isinstance(later, dict)
    assert later["requests"] == 0


def test_small_amounts_have_two_significant_digits(run: Run, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    ledger = Ledger(tmp_path / "d" / "gateway.db")
    ledger.record(Entry(MOMENT, "r", "k", "", "master", "m", "answered", cost_usd=0.0000123))
    ledger.close()
    assert "spent:            0.000012 USD" in run("savings", "--data", "d").out

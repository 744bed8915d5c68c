"""The ledger: every change to it is found and named, a crash takes no row that was told, a full disk is no silence."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.audit.chain import Head, fingerprint
from outrider.audit.errors import LedgerError
from outrider.audit.reading import Choice, duration, moment, read
from outrider.audit.store import Event, Ledger
from outrider.audit.verification import verify
from outrider.audit.writer import Writer
from outrider.cli import main

KEY = b"sixteen bytes and more"
LATER = 4_000_000_000.0  # than any row that this process writes of itself, in Unix seconds
ROWS = 12  # of `filled`, the first one included


def event(index: int, kind: str = "request", at: float = 1_800_000_000.0) -> Event:
    return Event(kind, at + index, {"id": f"r-{index}", "key": "alice" if index % 2 else None, "seconds": 0.5})


def filled(path: Path, key: bytes | None = None) -> Head:
    """A ledger of twelve rows."""
    with closing(Ledger(path, key=key)) as ledger:
        return ledger.append([event(index, "mode" if index == 7 else "request") for index in range(2, ROWS + 1)])


@contextmanager
def tampering(path: Path) -> Iterator[sqlite3.Connection]:
    """What somebody with the file and SQLite can do, the triggers gone."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER ledger_keeps_rows")
        connection.execute("DROP TRIGGER ledger_keeps_values")
        yield connection


def rehash(connection: sqlite3.Connection, number: int) -> None:
    """Compute a row's hash anew, so that it fits its content."""
    row = connection.execute("SELECT previous, number, time, kind, body FROM ledger WHERE number = ?", (number,))
    connection.execute("UPDATE ledger SET hash = ? WHERE number = ?", (fingerprint(*row.fetchone()), number))


def run(*statements: str, rehashed: int | None = None) -> Callable[[sqlite3.Connection], None]:
    def change(connection: sqlite3.Connection) -> None:
        for statement in statements:
            connection.execute(statement)
        if rehashed is not None:
            rehash(connection, rehashed)

    return change


def swap(connection: sqlite3.Connection) -> None:
    for old, new in ((5, 900), (6, 5), (900, 6)):
        connection.execute("UPDATE ledger SET number = ? WHERE number = ?", (new, old))


def close_the_gap(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM ledger WHERE number = 5")
    connection.execute("UPDATE ledger SET number = number - 1 WHERE number > 5")


def put_in(connection: sqlite3.Connection) -> None:
    """A row between 4 and 5 that follows 4 as it should, those behind it counted on."""
    for number in range(ROWS, 4, -1):
        connection.execute("UPDATE ledger SET number = ? WHERE number = ?", (number + 1, number))
    connection.execute(
        "INSERT INTO ledger SELECT 5, time, kind, '{\"id\":\"forged\"}', hash, '' FROM ledger WHERE number = 4"
    )
    rehash(connection, 5)


BY_CONTENT = [f"UPDATE ledger SET {column} = 'x' WHERE number = 5" for column in ("time", "kind", "body", "hash")]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *((run(statement), [(5, 5, "changed")]) for statement in BY_CONTENT),
        (run("UPDATE ledger SET previous = hash WHERE number = 5"), [(5, 5, "changed")]),
        (run("UPDATE ledger SET body = CAST(x'ff7b' AS TEXT) WHERE number = 5"), [(5, 5, "changed")]),
        (run("UPDATE ledger SET body = '{}' WHERE number IN (3, 7)"), [(3, 3, "changed"), (7, 7, "changed")]),
        (run("UPDATE ledger SET body = '{}' WHERE number = 5", rehashed=5), [(5, 5, "replaced")]),
        (run("UPDATE ledger SET previous = body WHERE number = 5", rehashed=5), [(5, 5, "replaced")]),
        (run("UPDATE ledger SET body = '{}' WHERE number = 1", rehashed=1), [(1, 1, "replaced")]),
        (run("DELETE FROM ledger WHERE number = 5"), [(5, 5, "missing")]),
        (run("DELETE FROM ledger WHERE number BETWEEN 4 AND 6"), [(4, 6, "missing")]),
        (run("DELETE FROM ledger WHERE number < 4"), [(1, 3, "missing")]),
        (run("DELETE FROM ledger WHERE number > 10"), [(11, 12, "cut off")]),
        (run("UPDATE ledger SET number = 40 WHERE number = 5"), [(40, 40, "moved")]),
        (run("INSERT INTO ledger SELECT 13, time, kind, body, hash, hash FROM ledger WHERE number = 12"),
         [(13, 13, "changed")]),
        (run("INSERT INTO ledger SELECT 0, time, kind, body, previous, hash FROM ledger WHERE number = 1"),
         [(0, 0, "moved"), (1, 1, "inserted")]),
        (swap, [(5, 5, "moved"), (6, 6, "moved")]),
        (close_the_gap, [(5, 11, "moved"), (5, 5, "missing")]),
        (put_in, [(6, 13, "moved"), (5, 5, "inserted")]),
    ],
)  # fmt: skip
def test_what_was_done_to_a_row_is_named(
    tmp_path: Path, change: Callable[[sqlite3.Connection], None], named: list[tuple[int, int, str]]
) -> None:
    """Number and fault of each row that is not as it was written, and of no other; and exit code 1."""
    path = tmp_path / "ledger.db"
    filled(path)
    assert verify(path).intact
    with tampering(path) as connection:
        change(connection)
    assert [(f.first, f.last, f.fault) for f in verify(path).findings] == named
    assert main(["audit", "verify", str(path)]) == 1


def test_any_single_byte_of_a_row_counts(tmp_path: Path) -> None:
    """One character of one column of one row, wherever it lies: exactly that row is named, with its kind."""
    path = tmp_path / "ledger.db"
    filled(path)
    with tampering(path) as connection:
        for number in range(1, ROWS + 1):
            for column in ("time", "kind", "body", "previous", "hash"):
                (value,) = connection.execute(f"SELECT {column} FROM ledger WHERE number = {number}").fetchone()
                at = number % len(value)
                other = value[:at] + ("0" if value[at] != "0" else "1") + value[at + 1 :]
                connection.execute(f"UPDATE ledger SET {column} = ? WHERE number = {number}", (other,))
                (finding,) = verify(path).findings
                assert (finding.first, finding.last, finding.fault) == (number, number, "changed")
                if column != "kind":
                    assert finding.kind == {1: "ledger", 7: "mode"}.get(number, "request")
                connection.execute(f"UPDATE ledger SET {column} = ? WHERE number = {number}", (value,))
    assert verify(path).intact


def forge_from_five(connection: sqlite3.Connection) -> None:
    """Change row 5 and compute the chain anew to its end."""
    connection.execute("UPDATE ledger SET body = '{}' WHERE number = 5")
    for number in range(5, ROWS + 1):
        connection.execute(
            "UPDATE ledger SET previous = (SELECT hash FROM ledger WHERE number = ?) WHERE number = ?",
            (number - 1, number),
        )
        rehash(connection, number)


def test_a_chain_computed_anew_shows_against_a_kept_head_only(tmp_path: Path) -> None:
    """Without a key and without a head nobody can tell; with either, it is told. So says the documentation."""
    plain, keyed = tmp_path / "plain.db", tmp_path / "keyed.db"
    head = filled(plain)
    filled(keyed, KEY)
    for path in (plain, keyed):
        with tampering(path) as connection:
            forge_from_five(connection)
    assert verify(plain).intact
    (finding,) = verify(plain, head=head).findings
    assert (finding.first, finding.fault) == (ROWS, "other head")
    assert [f.fault for f in verify(keyed, key=KEY).findings] == ["changed"] * (ROWS - 4)


def test_rows_cut_off_with_care_show_against_a_kept_head_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one thing that a chain cannot know by itself."""
    path = tmp_path / "ledger.db"
    head = filled(path)
    with tampering(path) as connection:
        connection.execute("DELETE FROM ledger WHERE number > 9")
        connection.execute("UPDATE sqlite_sequence SET seq = 9")
    assert main(["audit", "verify", str(path)]) == 0
    assert "only against a head" in " ".join(capsys.readouterr().out.split()).replace("show only", "only")
    assert main(["audit", "verify", str(path), "--head", str(head)]) == 1
    assert "rows 10 to 12: cut off" in capsys.readouterr().out


def test_an_older_head_still_holds(tmp_path: Path) -> None:
    """A head is an anchor for all rows before it, however many came later."""
    path = tmp_path / "ledger.db"
    head = filled(path)
    with closing(Ledger(path)) as ledger:
        ledger.append([event(13), event(14)])
    assert verify(path, head=head).intact


def test_the_key_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A keyed ledger without its key, another key, and a key for a ledger that has none are refused by name."""
    keyed, plain, key = tmp_path / "keyed.db", tmp_path / "plain.db", tmp_path / "key"
    key.write_bytes(KEY + b"\n")
    filled(keyed, KEY)
    filled(plain)
    assert main(["audit", "verify", str(keyed), "--key-file", str(key)]) == 0
    assert main(["audit", "verify", str(keyed)]) == 2
    assert "--key-file" in capsys.readouterr().err
    assert main(["audit", "verify", str(plain), "--key-file", str(key)]) == 2
    with pytest.raises(LedgerError, match="the key is another one"):
        Ledger(keyed, key=b"another key, long enough")
    with pytest.raises(LedgerError, match="--ledger-key-file"):
        Ledger(keyed)
    assert verify(keyed, key=KEY).intact


@pytest.mark.parametrize("content", [None, b"", b"no database at all, but longer than a header of SQLite needs to be"])
def test_what_is_no_ledger_is_refused(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line, for each command; and no server writes into it."""
    path = tmp_path / "other.db"
    if content is not None:
        path.write_bytes(content)
    for command in (["verify"], ["show"], ["export", "--format", "csv"], ["report", "--out", str(tmp_path / "r.html")]):
        assert main(["audit", *command, str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(path) in line
    if content:
        with pytest.raises(LedgerError):
            Ledger(path)


def test_another_database_is_left_alone(tmp_path: Path) -> None:
    """A SQLite file of somebody else is never taken for a ledger, nor written to."""
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE ledger (number INTEGER)")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="no ledger of outrider"):
        Ledger(path)
    with pytest.raises(LedgerError, match="no ledger of outrider"):
        verify(path)
    assert path.read_bytes() == before


def test_rows_cannot_be_changed_by_accident(tmp_path: Path) -> None:
    """Append-only also for somebody with a SQLite shell who means no harm."""
    path = tmp_path / "ledger.db"
    filled(path)
    with closing(sqlite3.connect(path)) as connection:
        for statement in ("DELETE FROM ledger", "UPDATE ledger SET kind = 'x'"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                connection.execute(statement)


def test_a_damaged_file_is_named_and_not_taken_for_sound(tmp_path: Path) -> None:
    """Bytes overwritten in the middle of the file, below SQLite's own structure."""
    path = tmp_path / "ledger.db"
    with closing(Ledger(path)) as ledger:
        ledger.append([event(index) for index in range(2, 400)])
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096] = b"\xff" * 4096
    path.write_bytes(content)
    verdict = verify(path)
    assert not verdict.intact
    assert "damaged" in [finding.fault for finding in verdict.findings]


def test_no_server_writes_on_behind_a_broken_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not start, before any model is loaded, and names the row and the way out."""
    path = tmp_path / "ledger.db"
    filled(path)
    with tampering(path) as connection:
        connection.execute("UPDATE ledger SET body = '{}' WHERE number = 5")
    assert main(["serve", "--ledger", str(path), "--port", "0", "--model", "nowhere.gguf"]) == 2
    error = capsys.readouterr().err
    assert "row 5 (request): changed" in error
    assert "name a new one" in error


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second one is refused and told who writes; it may begin when the first has ended. Readers are never refused."""
    path = tmp_path / "ledger.db"
    with closing(Ledger(path)) as ledger:
        with pytest.raises(LedgerError, match=f"another server .process {os.getpid()}"):
            Ledger(path)
        ledger.append([event(2)])
        assert verify(path).rows == 2
    Ledger(path).close()


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Nobody else may read who asked what when."""
    path = tmp_path / "deep" / "er" / "ledger.db"
    with closing(Ledger(path)):
        for file in path.parent.iterdir():
            assert file.stat().st_mode & 0o077 == 0


WRITING = """
import sys, time
from pathlib import Path
from outrider.audit.store import Event, Ledger
ledger = Ledger(Path(sys.argv[1]))
while True:
    head = ledger.append([Event("request", time.time(), {"id": "x" * 200, "n": n}) for n in range(100)])
    print(head, flush=True)
"""


def test_kill_9_in_the_middle_of_writing_loses_no_row_that_was_told(tmp_path: Path) -> None:
    """A process that does nothing but write is killed, many times: the chain holds, to the last head it told and on."""
    path = tmp_path / "ledger.db"
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", WRITING, str(path)], stdout=subprocess.PIPE, text=True) as writing:
            assert writing.stdout is not None
            told = [writing.stdout.readline() for _ in range(3)]
            writing.send_signal(signal.SIGKILL)
            told += writing.stdout.readlines()
        last = [Head.parse(line) for line in told if line.endswith("\n")][-1]
        verdict = verify(path, head=last)
        assert verdict.intact, verdict.findings
        # whole transactions alone: the first row, and a hundred each
        assert verdict.head.number % 100 == 1
        assert verdict.head.number >= last.number
    with closing(Ledger(path)) as ledger:
        ledger.append([event(0)])
    assert verify(path).intact


def test_old_rows_go_and_the_chain_holds(tmp_path: Path) -> None:
    """A checkpoint carries the hash of what was removed, and under which settings the rest was written; twice over."""
    path = tmp_path / "ledger.db"
    with closing(Ledger(path)) as ledger:
        start = Event("start", LATER - 2, {"model": {"name": "tiny"}})
        ledger.append([start, Event("drafter", LATER - 1, {"drafter": "ngram", "weights": {}})])
        ledger.append([event(index, at=LATER) for index in range(20)])
        removed_hash = [row.hash for row in read(path, Choice())][7]
        assert ledger.prune(LATER + 5) == 8
        ledger.append([event(30, at=LATER)])
        assert ledger.prune(LATER + 5) == 0
        ledger.prune(LATER + 10)
    verdict = verify(path)
    assert verdict.intact, verdict.findings
    assert (verdict.first, verdict.removed) == (14, 13)
    first, second = [row.content() for row in read(path, Choice(kind="checkpoint"))]
    assert (first["through"], first["hash"], first["count"]) == (8, removed_hash, 8)
    assert (second["first"], second["through"]) == (9, 13)
    assert [entry["number"] for entry in second["in_force"]] == [2, 3]
    assert second["in_force"][0]["body"] == {"model": {"name": "tiny"}}
    with pytest.raises(LedgerError, match="row 5 was removed by age"):
        verify(path, head=Head(5, "0" * 64))


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("DELETE FROM ledger WHERE number <= 12", "missing"),
        ("DELETE FROM ledger WHERE kind = 'checkpoint'", "missing"),
        ("UPDATE ledger SET body = replace(body, '8', '9') WHERE kind = 'checkpoint'", "changed"),
    ],
)
def test_removal_that_no_checkpoint_tells_of_is_named(tmp_path: Path, statement: str, fault: str) -> None:
    """Nobody can pass a deletion off as retention."""
    path = tmp_path / "ledger.db"
    with closing(Ledger(path)) as ledger:
        ledger.append([event(index, at=LATER) for index in range(20)])
        assert ledger.prune(LATER + 7) == 8
    with tampering(path) as connection:
        connection.execute(statement)
    assert fault in [finding.fault for finding in verify(path).findings]


# -- the writer ----------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def fill_disk(ledger: Ledger) -> None:
    """SQLite says "database or disk is full" from now on: its file may have no further page."""
    (pages,) = ledger._connection.execute("PRAGMA page_count").fetchone()
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")


def free_disk(ledger: Ledger) -> None:
    ledger._connection.execute("PRAGMA max_page_count = 1000000")


BIG = {"id": "x" * 5000}  # more than a page


def test_stop_refuses_until_the_disk_has_room_and_loses_nothing(tmp_path: Path) -> None:
    """Under `stop` the records of what ran already wait, and are written in order when that can be done again."""
    ledger = Ledger(tmp_path / "ledger.db")
    fill_disk(ledger)
    writer = Writer(ledger, policy="stop", retry_seconds=0.01)
    assert writer.refusal is None
    writer.start()
    for _ in range(3):
        writer.put(Event("request", 1.0, BIG))
    wait_until(lambda: writer.failures > 1)
    assert writer.refusal == "database or disk is full"
    writer.miss()
    free_disk(ledger)
    wait_until(lambda: writer.refusal is None)
    writer.close(Event("end", 2.0, {}))
    rows = list(read(tmp_path / "ledger.db", Choice()))
    assert sorted(row.kind for row in rows) == ["end", "gap", "ledger", "request", "request", "request"]
    assert next(row.content()["records"] for row in rows if row.kind == "gap") == 1
    assert (writer.lost, writer.written) == (1, 5)
    assert verify(tmp_path / "ledger.db").intact


def test_continue_goes_on_and_counts_what_is_lost(tmp_path: Path) -> None:
    """Under `continue` nothing is refused, the queue is bounded, and a row tells how many records are not there."""
    ledger = Ledger(tmp_path / "ledger.db")
    fill_disk(ledger)
    writer = Writer(ledger, policy="continue", capacity=5, retry_seconds=0.01)
    writer.start()
    writer.put(Event("request", 1.0, BIG))
    wait_until(lambda: writer.failure is not None)
    for _ in range(12):  # one is with the thread, five fit
        writer.put(Event("request", 1.0, BIG))
    assert writer.refusal is None
    assert writer.queued == 5
    free_disk(ledger)
    wait_until(lambda: writer.failure is None)
    writer.close()
    rows = list(read(tmp_path / "ledger.db", Choice()))
    assert [row.kind for row in rows].count("request") == 6
    assert [row.content()["records"] for row in rows if row.kind == "gap"] == [7]
    assert writer.lost == 7


def test_a_queue_that_grows_too_long_refuses_too(tmp_path: Path) -> None:
    """A disk that is only slow: under `stop` half of the queue is kept for what runs already."""
    writer = Writer(Ledger(tmp_path / "ledger.db"), policy="stop", capacity=8)
    for index in range(5):
        writer.put(event(index))
    assert writer.refusal == "5 records wait to be written"
    writer.start()
    wait_until(lambda: writer.refusal is None)
    writer.close()
    assert verify(tmp_path / "ledger.db").rows == 6


def test_an_end_with_a_full_disk_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server must be able to stop: it tries once more, says how many rows are lost, and what is there holds."""
    ledger = Ledger(tmp_path / "ledger.db")
    fill_disk(ledger)
    writer = Writer(ledger, retry_seconds=0.01)
    writer.start()
    writer.put(Event("request", 1.0, BIG))
    wait_until(lambda: writer.failure is not None)
    head = writer.close(Event("end", 2.0, {}))
    assert head.number == 1
    assert "ends without its last rows" in caplog.text
    assert verify(tmp_path / "ledger.db").intact


@pytest.mark.parametrize("harm", ["removed", "replaced"])
def test_a_ledger_taken_away_from_a_running_server_is_noticed(tmp_path: Path, harm: str) -> None:
    """Without a look at the file SQLite would write on into one that nobody sees any more."""
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    path.unlink()
    if harm == "replaced":
        path.write_bytes(b"")
    writer = Writer(ledger, retry_seconds=0.01)
    writer.start()
    writer.put(event(2))
    wait_until(lambda: writer.refusal is not None)
    assert "removed or replaced" in str(writer.refusal)
    writer.close()


def test_rows_cut_off_under_a_running_server_are_told_in_the_chain(tmp_path: Path) -> None:
    """The server knows what it wrote last: who cuts the end off meanwhile is found without any kept head."""
    path = tmp_path / "ledger.db"
    with closing(Ledger(path)) as ledger:
        ledger.append([event(index) for index in range(2, 6)])
        with tampering(path) as connection:
            connection.execute("DELETE FROM ledger WHERE number > 3")
            connection.execute("UPDATE sqlite_sequence SET seq = 3")
        ledger.append([event(9)])
    (finding,) = verify(path).findings
    assert (finding.first, finding.kind, finding.fault) == (4, "disturbance", "disturbed")
    assert "written up to 5:" in finding.text


def test_a_record_that_cannot_be_made_does_not_stop_the_others(tmp_path: Path) -> None:
    """It is counted as lost, and told by a gap."""

    class Broken(Event):
        def body(self) -> dict[str, object]:
            raise KeyError("a fault of the program")

    writer = Writer(Ledger(tmp_path / "ledger.db"))
    writer.put(Broken("request", 1.0, {}))
    writer.put(Event("request", 1.0, {"share": float("nan")}))
    for beyond in (float("nan"), float("inf"), 253402300800.0, -1e18):  # no calendar has such times
        writer.put(Event("request", beyond, {}))
    writer.put(event(3))
    writer.start()
    writer.close()
    kinds = [row.kind for row in read(tmp_path / "ledger.db", Choice())]
    assert sorted(kinds) == ["gap", "ledger", "request"]
    assert writer.lost == 6


def test_put_never_waits_for_the_disk(tmp_path: Path) -> None:
    """While a transaction is held up for as long as the test likes, records are taken all the same."""
    gate = threading.Event()

    class Slow(Ledger):
        def append(self, records: object) -> Head:
            assert gate.wait(60)
            return super().append(records)  # type: ignore[arg-type]

    writer = Writer(Slow(tmp_path / "ledger.db"))
    writer.start()
    for index in range(100):
        writer.put(event(index))  # were this to wait, the gate would never open
    gate.set()
    writer.close()
    assert verify(tmp_path / "ledger.db").rows == 101


def test_rows_older_than_wanted_are_removed_by_the_writer(tmp_path: Path) -> None:
    """`keep_seconds`, with a clock of the test's own."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.append([event(index, at=5000.0) for index in range(4)])
    writer = Writer(ledger, keep_seconds=100.0, clock=lambda: time.time() + 1000)
    writer.start()
    writer.put(Event("request", time.time() + 1000, {"id": "young"}))
    writer.close()
    kinds = [row.kind for row in read(tmp_path / "ledger.db", Choice())]
    assert kinds == ["request", "checkpoint"]
    assert verify(tmp_path / "ledger.db").intact


# -- the command line ----------------------------------------------------------------------------------------------


def test_show_chooses_rows_and_ends_with_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By kind, key name, time and number."""
    path = tmp_path / "ledger.db"
    head = filled(path)

    def shown(*options: str) -> list[int]:
        assert main(["audit", "show", str(path), *options]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == f"head {head}"
        return [int(found) for found in re.findall(r"^ *(\d+) ", out, re.MULTILINE)]

    assert shown() == list(range(1, 13))
    assert shown("--kind", "mode") == [7]
    assert shown("--key", "alice") == [3, 5, 9, 11]
    assert shown("--key", "-") == [2, 4, 6, 8, 10, 12]
    assert shown("--limit", "3") == [10, 11, 12]
    assert shown("--since", "2027-01-15T08:00:10", "--until", "2027-01-15T08:00:12") == [10, 11]
    for options in (["--kind", "nothing"], ["--since", "yesterday"], ["--limit", "0"]):
        assert main(["audit", "show", str(path), *options]) == 2
        assert options[0] in capsys.readouterr().err


def test_export_gives_what_anybody_needs_to_check_the_chain(tmp_path: Path) -> None:
    """From the JSON Lines alone, with SHA-256 and nothing of ours, each hash is found again."""
    import hashlib

    path, out = tmp_path / "ledger.db", tmp_path / "rows.jsonl"
    filled(path)
    assert main(["audit", "export", str(path), "--out", str(out)]) == 0  # the ending tells the format
    previous = "0" * 64
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        body = json.dumps(row["body"], sort_keys=True, separators=(",", ":"))
        text = f"{previous}\n{row['number']}\n{row['time']}\n{row['kind']}\n{body}"
        previous = hashlib.sha256(text.encode()).hexdigest()
        assert (row["hash"], row["number"]) == (previous, rows.index(row) + 1)
    assert len(rows) == ROWS


def test_export_runs_no_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    """A request id is the client's to choose."""
    path, out = tmp_path / "ledger.db", tmp_path / "rows.csv"
    with closing(Ledger(path)) as ledger:
        ledger.append([Event("request", 1.0, {"id": "=1+1", "key": "alice", "drafters": ["auto", "none"]})])
    assert main(["audit", "export", str(path), "--format", "csv", "--kind", "request", "--out", str(out)]) == 0
    (line,) = csv.DictReader(out.read_text().splitlines())
    assert (line["id"], line["key"], line["drafters"]) == ("'=1+1", "alice", "auto none")


# no field is a list, a number or a text just because this program writes one, and no text need be Unicode
FIELDS = ("keys", "in_force", "drafters", "served_as", "request_drafters", "weights", "model", "id")
ODD_BODIES: list[dict[str, Any]] = [
    dict.fromkeys(FIELDS, value)
    for value in (None, 5, "\ud800", [None, {"kind": "start"}, {"kind": "drafter", "body": {"weights": 1}}], {"a": 1})
]


def test_the_report_of_a_broken_ledger_says_so_and_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever somebody wrote into rows of any kind, the page is made, escapes it, and names the rows."""
    path, out = tmp_path / "ledger.db", tmp_path / "report.html"
    kinds = ("start", "drafter", "request", "mode", "gap", "disturbance", "checkpoint", "end")
    with closing(Ledger(path)) as ledger:
        ledger.append([Event(kind, 1.0, {}) for kind in kinds])
        ledger.append([Event("request", 1.0, {"key": "<script>alert(1)</script>", "drafted": "many", "drafters": [1]})])
        ledger.append([Event(kind, 1.0, body) for kind in kinds for body in ODD_BODIES])
    with tampering(path) as connection:
        connection.execute("UPDATE ledger SET body = 'no JSON' WHERE number = 4")
        connection.execute("UPDATE ledger SET body = ? WHERE number = 5", ("[" * 200_000,))
    for command in (["show", "--limit", "999"], ["export", "--format", "csv"], ["export", "--format", "jsonl"]):
        assert main(["audit", *command, str(path)]) == 0
    assert main(["audit", "export", "--format", "csv", "--out", str(out), str(path)]) == 0
    assert main(["audit", "report", str(path), "--out", str(out)]) == 1
    page = out.read_text()
    assert "The chain is broken" in page
    assert "row 4 (request): changed" in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert main(["audit", "show", str(path)]) == 0
    assert "NOT INTACT" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "--limit", "99999999999999999999"],
        ["show", "--limit", "0"],
        ["show", "--key", "\udcff"],
        ["export", "--format", "csv", "--key", "\udcff"],
        ["verify", "--head", f"99999999999999999999:{'0' * 64}"],
        ["verify", "--head", f"{'9' * 5000}:{'0' * 64}"],
        ["verify", "--head", f"\u0663:{'0' * 64}"],
    ],
)
def test_what_no_ledger_can_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """In one line: numbers beyond SQLite's, names that are not UTF-8."""
    path = tmp_path / "ledger.db"
    Ledger(path).close()
    assert main(["audit", *arguments, str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"outrider: {arguments[-2]}: ")


def test_spans_and_moments() -> None:
    """The forms of --ledger-keep and --since."""
    assert (duration("--x", "90d"), duration("--x", "12h"), duration("--x", "2w")) == (7_776_000, 43_200, 1_209_600)
    assert moment("--x", "2026-11-30") == "2026-11-30T00:00:00.000000Z"
    assert moment("--x", "2026-11-30T08:15+02:00") == "2026-11-30T06:15:00.000000Z"
    assert moment("--x", "1h", now=3600.0) == "1970-01-01T00:00:00.000000Z"
    for text in ("0d", "90", "d", "-1d", "1y"):
        with pytest.raises(LedgerError, match="--x"):
            duration("--x", text)


def test_several_ledgers_are_verified_each_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "a-1.db", tmp_path / "a-2.db"
    filled(one)
    head = filled(two)
    assert main(["audit", "verify", str(one), str(two)]) == 0
    told = capsys.readouterr().out
    assert f"{one}:" in told
    assert told.count("intact;") == 2
    with tampering(two) as file:
        file.execute("DELETE FROM ledger WHERE number = 5")
    assert main(["audit", "verify", str(one), str(two)]) == 1
    assert "NOT INTACT" in capsys.readouterr().out.partition(f"{two}:")[2]
    assert main(["audit", "verify", str(one), str(two), "--head", str(head)]) == 2
    assert "--head: it belongs to one chain, and 2 ledgers are given" in capsys.readouterr().err

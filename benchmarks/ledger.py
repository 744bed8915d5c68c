"""What a row of the ledger costs: to whoever records something, and to the thread that writes.

python benchmarks/ledger.py                    # in a temporary folder
python benchmarks/ledger.py --folder /var/lib  # on the disk that matters
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from outrider.audit.store import Event, Ledger
from outrider.audit.verification import verify
from outrider.audit.writer import Writer

BODY = {
    "id": "f" * 32, "endpoint": "/v1/chat/completions", "key": "alice", "model": "smollm2-135m", "status": 200,
    "stream": True, "outcome": "finished", "seconds": 0.512345, "texts": 1, "prompt_tokens": 120,
    "completion_tokens": 96, "drafters": ["auto"], "drafted": 210, "accepted": 61, "ttft": 0.071234, "tpot": 0.0023,
    "parameters": {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": [1234567890123456789]},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rows", type=int, default=5000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(measure(Path(folder) / "ledger.db", options.rows)))


def measure(path: Path, rows: int) -> dict[str, float]:
    """Microseconds per row: of `put`, of the writing thread's processor time, and until all is on the disk."""
    writer = Writer(Ledger(path), capacity=rows)
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(rows):
        writer.put(Event("request", time.time(), BODY))
    put, putting = time.perf_counter() - began, time.process_time() - busy
    writer.start()
    writer.close()
    written, busy = time.perf_counter() - began, time.process_time() - busy
    began = time.perf_counter()
    assert verify(path).intact
    return {
        "rows": rows,
        "put_us": round(1e6 * put / rows, 2),
        "write_cpu_us": round(1e6 * (busy - putting) / rows, 1),
        "until_on_disk_us": round(1e6 * (written - put) / rows, 1),
        "verify_us": round(1e6 * (time.perf_counter() - began) / rows, 1),
        "bytes_per_row": round(path.stat().st_size / rows),
    }


if __name__ == "__main__":
    main()

"""What a drafter says beforehand that it will take is what the process then grows by, on the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# One fresh process for each: what the allocator holds from earlier on would blur the figure. The target has met a long
# prompt and written over its whole cache before, so that only the drafter's share is new.
_SCRIPT = """
import ctypes, gc, json, sys
from pathlib import Path
from outrider import Engine, SamplingParams, Speculation

def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024

def write(drafter, first):
    prompt = [first + 7 * i % 40_000 for i in range(980)]
    engine.generate([prompt], SamplingParams(max_tokens=24, ignore_eos=True), speculation=Speculation(drafter=drafter))

engine = Engine("smollm2-135m", dtype="int8", threads=1, cache_tokens=1024, enable_prefix_caching=False, adapt=False)
engine.configure(sys.argv[1], {"max_draft_tokens": 4})
told = sum(engine.forecast(sys.argv[1]).values())
write("none", 100)
before = anonymous()
write(sys.argv[1], 200)
print(json.dumps({"told": told, "grown": anonymous() - before}))
"""


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read from /proc")
@pytest.mark.parametrize("drafter", ["eagle", "medusa"])
def test_a_drafter_takes_the_memory_that_it_said(drafter: str) -> None:
    """Within 5 % and 1 MB of what lies around: small buffers, libraries that are loaded late, the logits of guesses."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, drafter], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert abs(said["grown"] - said["told"]) < 0.05 * said["told"] + 1e6, said

"""A real vLLM behind the front: `pytest -m vllm`, skipped where there is none.

OUTRIDER_VLLM names its command, if it is not on the path. docs/scale.md says how to install the one for CPUs. It is not
in CI: 2.5 GB to fetch, 4.4 GB of memory per server, and minutes on two cores.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from outrider.audit.verification import verify
from outrider.bench.prompts import read_prompts
from outrider.models.export import write_hf
from outrider.models.load import open_model
from outrider.models.registry import resolve
from serving import wait_until

PROGRAM = os.environ.get("OUTRIDER_VLLM") or shutil.which("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.skipif(PROGRAM is None, reason="no vLLM here")]

PROMPTS = Path(__file__).parent.parent / "benchmarks" / "prompts.jsonl"
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(open_model(resolve("smollm2-135m")), tmp_path_factory.mktemp("vllm") / "smollm2-hf", "fp32")


@contextmanager
def front(folder: Path, ledger: Path, *options: str) -> Iterator[str]:
    """The front over one vLLM that it starts, once that one answers."""
    command = [sys.executable, "-m", "outrider", "serve", str(folder), "--backend", "vllm", "--vllm", str(PROGRAM)]
    command += ["--served-model-name", "smollm2", "--port", "0", "--ledger", str(ledger), *options, "--", *FLAGS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **ON_A_CPU}) as process:
        try:
            assert process.stderr is not None
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "it ended"
                found = re.search(r"http://127[^/]+(?=/v1)", line)
            wait_until(lambda: httpx2.get(f"{found[0]}/health").status_code == 200, seconds=240)
            yield found[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


MORE = ("Name three rivers.", "Count from 1 to 12.", "What is a lighthouse?", "List the planets.", "Say hello twice.",
        "Write a short poem about rain.")  # fmt: skip


def texts(url: str) -> list[str]:
    """Of 20 conversations, greedily."""
    asked = [prompt.content for prompt in read_prompts(PROMPTS, chat=True)]
    asked += [[{"role": "user", "content": text}] for text in MORE]
    assert len(asked) == 20
    out = []
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        for messages in asked:
            stream = client.chat.completions.create(
                model="smollm2",
                messages=messages,  # type: ignore[arg-type]
                max_tokens=32,
                temperature=0,
                stream=True,
            )
            out.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    return out


def test_vllm_writes_the_same_with_and_without_guesses_in_float32(folder: Path, tmp_path: Path) -> None:
    """20 prompts through the front; acceptance comes from vLLM's counters, the weights' hash is in the ledger."""
    written = {}
    for name, options in (
        ("ngram", ("--speculative-config", NGRAM)),
        ("plain", ("--replicas", "0", "--plain-replicas", "1")),
    ):
        ledger = tmp_path / f"{name}.db"
        with front(folder, ledger, *options) as url:
            written[name] = texts(url)

            def drafted(url: str = url) -> float:
                page = httpx2.get(f"{url}/metrics").text
                return float(re.findall(r"^vllm:spec_decode_num_draft_tokens_total\{.*\} (.*)$", page, re.M)[0])

            if name == "ngram":
                wait_until(lambda: drafted() > 0)
            else:
                assert drafted() == 0
        assert not verify(ledger).findings
    assert written["ngram"] == written["plain"]
    assert all(written["plain"])

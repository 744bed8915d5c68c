"""Ready commands for a method, in the words of each engine's current release.

Looked up on 2026-11-30: vLLM 0.33.0 (vllm/config/speculative.py and docs/features/speculative_decoding), SGLang 0.5.23
(docs/advanced_features/speculative_decoding.md), TensorRT-LLM 1.2.1 (docs/source/features/speculative-decoding.md),
llama.cpp's master (docs/speculative.md, common/speculative.cpp, the built server's --help: `--spec-type`,
`--spec-draft-*`, `--spec-ngram-simple-*`). What an engine does not have is said in place of a command.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

__all__ = ["LOOKED_UP", "Names", "commands"]

LOOKED_UP = {
    "vllm": "0.33.0",
    "sglang": "0.5.23",
    "tensorrt-llm": "1.2.1",
    "llama.cpp": "master of November 2026",
}


@dataclass(frozen=True, slots=True)
class Names:
    """What to write into the commands; a part that is not known becomes a word in capitals."""

    local: str | None  # the model as this machine knows it
    hub: str | None
    draft: str | None
    eagle3: str | None
    medusa: str | None


def commands(method: str, guesses: int, names: Names, *, depth: int = 0) -> dict[str, str]:
    """By engine: a command that starts a server with the method and so many guesses per step, or why there is none.

    `depth` is given where the guesses are a tree.
    """
    return {
        "outrider": _outrider(method, names),
        "vllm": _vllm(method, depth or guesses, names),
        "sglang": _sglang(method, guesses, depth, names),
        "tensorrt-llm": _tensorrt(method, depth or guesses, names),
        "llama.cpp": _llama(method, depth or guesses),
    }


def _outrider(method: str, names: Names) -> str:
    """Its trees are cut to what pays while texts are written: no number of guesses is set."""
    if names.local is None:
        return "# not from here: outrider runs Llama-family models from GGUF files and Hugging Face folders on CPUs"
    parts = ["outrider", "serve", "--model", names.local, "--drafter", method]
    if method == "draft_model" and names.draft is not None:
        parts += ["--draft-model", names.draft]
    return shlex.join(parts)


def _vllm(method: str, guesses: int, names: Names) -> str:
    model = names.hub or "MODEL"
    config: dict[str, str | int]
    if method == "none":
        return shlex.join(["vllm", "serve", model])
    if method == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": guesses, "prompt_lookup_max": 4}
    elif method == "suffix":
        config = {"method": "suffix", "num_speculative_tokens": guesses}
    elif method == "draft_model":
        config = {"method": "draft_model", "model": names.draft or "DRAFT", "num_speculative_tokens": guesses}
    elif method == "eagle":
        config = {"method": "eagle3", "model": names.eagle3 or "EAGLE3_HEAD", "num_speculative_tokens": guesses}
    elif method == "medusa":
        config = {"method": "medusa", "model": names.medusa or "MEDUSA_HEADS", "num_speculative_tokens": guesses}
    else:
        return f"# vLLM has no {method}"
    return shlex.join(["vllm", "serve", model, "--speculative-config", json.dumps(config)])


def _sglang(method: str, guesses: int, depth: int, names: Names) -> str:
    start = ["python3", "-m", "sglang.launch_server", "--model-path", names.hub or "MODEL"]
    # SGLang counts the token that the target adds among the draft tokens
    chain = [
        "--speculative-num-steps", str(depth or guesses),
        "--speculative-eagle-topk", "4" if depth else "1",
        "--speculative-num-draft-tokens", str(guesses + 1),
    ]  # fmt: skip
    if method == "none":
        return shlex.join(start)
    if method in ("ngram", "suffix"):
        extra = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(guesses + 1)]
        return shlex.join(start + extra)
    if method == "draft_model":
        draft = ["--speculative-draft-model-path", names.draft or "DRAFT"]
        return shlex.join([*start, "--speculative-algorithm", "STANDALONE", *draft, *chain])
    if method == "eagle":
        draft = ["--speculative-draft-model-path", names.eagle3 or "EAGLE3_HEAD"]
        return shlex.join([*start, "--speculative-algorithm", "EAGLE3", *draft, *chain])
    return f"# SGLang has no {method}"


def _tensorrt(method: str, guesses: int, names: Names) -> str:
    serve = ["trtllm-serve", names.hub or "MODEL"]
    if method == "none":
        return shlex.join(serve)
    kinds = {"ngram": "NGram", "suffix": "NGram", "draft_model": "DraftTarget", "eagle": "Eagle3"}
    if method not in kinds:
        return f"# TensorRT-LLM's PyTorch backend has no {method}"
    # only heads run without it, says the page on speculative decoding
    lines = [] if method == "eagle" else ["disable_overlap_scheduler: true"]
    lines += ["speculative_config:", f"  decoding_type: {kinds[method]}", f"  max_draft_len: {guesses}"]
    if method in ("ngram", "suffix"):
        lines.append("  max_matching_ngram_size: 4")
    else:
        head = names.eagle3 or "EAGLE3_HEAD" if method == "eagle" else names.draft or "DRAFT"
        lines.append(f"  speculative_model_dir: {head}")
    text = "\\n".join(lines)
    return f"printf '{text}\\n' > speculation.yaml && {shlex.join([*serve, '--config', 'speculation.yaml'])}"


def _llama(method: str, guesses: int) -> str:
    start = ["llama-server", "-m", "MODEL.gguf"]
    if method == "none":
        return shlex.join(start)
    if method in ("ngram", "suffix"):
        # the length of a look-up's draft is its own option: --spec-draft-n-max is of draft models
        sizes = ["--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", str(guesses)]
        return shlex.join([*start, "--spec-type", "ngram-simple", *sizes])
    if method == "draft_model":
        extra = ["--spec-type", "draft-simple", "--spec-draft-model", "DRAFT.gguf"]
        return shlex.join([*start, *extra, "--spec-draft-n-max", str(guesses)])
    if method == "eagle":
        extra = ["--spec-type", "draft-eagle3", "--spec-draft-model", "EAGLE3.gguf"]
        return shlex.join([*start, *extra, "--spec-draft-n-max", str(guesses)])
    return f"# llama.cpp has no {method}"

"""The EAGLE-3 head in torch is the head that will draft: the same rows, keys and guesses as in numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lessons import WANTS, answers, store, target  # noqa: E402
from outrider.kernels.reference_heads import EagleForm, EagleReference  # noqa: E402
from outrider.models.heads import Eagle, EagleConfig, read_head, write_eagle  # noqa: E402
from outrider.models.rotary import rotary_table  # noqa: E402
from outrider.train.eagle import EagleModule, EaglePupil  # noqa: E402
from outrider.train.settings import EagleSettings  # noqa: E402
from outrider.train.target import Target  # noqa: E402
from outrider.train.texts import collate  # noqa: E402
from outrider.train.vocabulary import choose_tokens, draft_index  # noqa: E402


def first_states(files, texts) -> torch.Tensor:
    """The states of two texts that a head's first weights are told by. [n, W, D]"""
    kept = store(files, texts[:2]).get([0, 1])
    return torch.cat([torch.from_numpy(bits).view(torch.bfloat16)[:, :-1] for bits in kept])


def frozen(files, tokens) -> Target:
    embed = torch.from_numpy(files.tensors["embed"].float32())
    head = torch.from_numpy(files.tensors["head"].float32())
    norm = torch.from_numpy(files.tensors["norm"].float32())
    index = torch.from_numpy(draft_index(tokens, files.config.vocabulary))
    return Target(embed, head[torch.from_numpy(tokens)], norm, tokens, index)


def head(files, size: int = 40, **flags: bool) -> EagleConfig:
    return EagleConfig(3, replace(files.config, layers=1, tied_embeddings=False), size, WANTS, **flags)


@pytest.mark.parametrize("before_residual", [False, True])
@pytest.mark.parametrize("before_fc", [False, True])
def test_unrolled_steps_are_a_chain_of_drafted_rows(before_residual: bool, before_fc: bool, tmp_path: Path) -> None:
    """Step s of root t equals the s-th row of a drafted chain after t: real keys up to t, its own ones after."""
    files, texts = target(), answers(3)
    tokens = choose_tokens(texts, 97, 40, (0,))
    config = head(files, norm_before_residual=before_residual, norm_before_fc=before_fc)
    module = EagleModule(config)
    module.start(frozen(files, tokens), first_states(files, texts), seed=1)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    batch = collate(store(files, texts), [0, 1, 2])
    outputs = module.unroll(batch, torch.from_numpy(files.tensors["embed"].float32()), 3)
    logits = [module.logits(x).detach().numpy() for x in outputs]

    write_eagle(tmp_path, config, module.values(), tokens, target="tiny", kind="F32")
    read = read_head(tmp_path, files.config)
    assert isinstance(read, Eagle)
    assert read.config == config
    weights = {name: tensor.float32() for name, tensor in read.tensors.items()}
    form = EagleForm(3, 1, config.decoder.head_dim, config.decoder.norm_eps, before_residual, before_fc)
    oracle = EagleReference(form, weights, *(t.astype(np.float32) for t in rotary_table(files.config, 64)))
    embed = files.tensors["embed"].float32()
    compared = 0
    for row, answer in enumerate(texts):
        text = answer.tokens
        states = batch.states[row, : len(text), :3].float().numpy()
        entries, firsts = [], []
        for position in range(len(text) - 1):
            x, entry = oracle.row(embed[text[position + 1]], oracle.fuse(states[position]), position, list(entries))
            entries.append(entry)
            firsts.append(x)
        for column in range(len(answer.answer)):
            root = len(answer.prompt) - 1 + column
            x, seen = firsts[root], entries[: root + 1]
            for step in range(1, 4):
                if root + step > len(text) - 1:
                    break
                if step > 1:
                    x, entry = oracle.row(embed[text[root + step]], x, root + step - 1, seen)
                    seen = [*seen, entry]
                np.testing.assert_allclose(outputs[step - 1][row, column].detach(), x, atol=1e-4, rtol=1e-4)
                np.testing.assert_allclose(logits[step - 1][row, column], oracle.logits(x), atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared > 100


def test_a_root_does_not_see_what_comes_after_it() -> None:
    """Changing a text behind root t + s changes no output of step s at t, and no other text's."""
    files, texts = target(), answers(2)
    tokens = choose_tokens(texts, 97, 40, (0,))
    module = EagleModule(head(files))
    module.start(frozen(files, tokens), first_states(files, texts), seed=0)
    embed = torch.from_numpy(files.tensors["embed"].float32())
    batch = collate(store(files, texts), [0, 1])
    before = module.unroll(batch, embed, 2)
    cut = int(batch.roots[0, 4])
    batch.tokens[0, cut + 3 :] = 5
    batch.states[0, cut + 1 :] = 1.0
    after = module.unroll(batch, embed, 2)
    for step in range(2):
        assert torch.equal(before[step][0, :5], after[step][0, :5])
        assert torch.equal(before[step][1], after[step][1])
    assert not torch.allclose(before[1][0, 6], after[1][0, 6])


def test_learning_raises_acceptance() -> None:
    """Some steps of descent make the chain of guesses longer on texts that were held out."""
    files, texts = target(), answers(120)
    tokens = choose_tokens(texts, 97, 90, (0,))
    known = frozen(files, tokens)
    module = EagleModule(head(files, 90, norm_before_residual=True, norm_before_fc=True))
    module.start(known, first_states(files, texts), seed=0)
    settings = EagleSettings(draft_vocabulary=90, depth=4, loss="kl", autocast=False)
    kept = store(files, texts)
    learn, held = list(range(100)), list(range(100, 120))
    pupil = EaglePupil(module, known, kept, learn, held, settings, lambda folder, report: None)
    first = pupil.validate()
    optimizer = torch.optim.AdamW(module.parameters(), 3e-3)
    losses = []
    for step in range(40):
        loss, count = pupil.loss(list(range(step % 4 * 25, step % 4 * 25 + 25)))
        assert count > 300
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    last = pupil.validate()
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    assert last.loss < first.loss

"""Perplexity of real models over a public-domain text: within half a percent of mlx-lm's with the same weights."""

import math
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from headrace_models import export, load, load_codec

TEXT = Path(__file__).parent / "texts" / "ecclesiastes.txt"
NUM_TOKENS = 5120
WINDOW = 512
# Positions whose logits are in memory at once: Gemma's take 1 MB each.
HEAD_CHUNK = 128
TOLERANCE = 0.005


def windows_of(codec) -> list[list[int]]:
    ids = codec.encode(TEXT.read_text("utf-8"))[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    return [ids[start : start + WINDOW] for start in range(0, NUM_TOKENS, WINDOW)]


def perplexity(windows: list[list[int]], hidden_of, logits_of, *, stride: int) -> float:
    """Return e to the mean negative log-likelihood of every `stride`-th of each window's tokens after its first."""
    total, count = 0.0, 0
    for ids in windows:
        hidden = hidden_of(mx.array([ids], dtype=mx.int32))
        mx.eval(hidden)
        scored = list(range(0, len(ids) - 1, stride))
        for first in range(0, len(scored), HEAD_CHUNK):
            positions = mx.array(scored[first : first + HEAD_CHUNK])
            targets = mx.array(ids)[positions + 1]
            logits = logits_of(hidden[:, positions])[0].astype(mx.float32)
            found = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
            total += (mx.logsumexp(logits, axis=-1) - found).sum().item()
            count += targets.size
    return math.exp(total / count)


def of_headrace(folder: Path, windows: list[list[int]], stride: int) -> float:
    model = load(folder, dtype="float32").model
    return perplexity(
        windows,
        lambda ids: model.forward_hidden(ids, model.make_cache()),
        model.logits_from_hidden,
        stride=stride,
    )


def of_mlx_lm(folder: Path, windows: list[list[int]], stride: int) -> float:
    oracle, _ = load_model(folder)
    body = oracle.model
    return perplexity(
        windows,
        lambda ids: body(ids, cache=make_prompt_cache(oracle)),
        body.embed_tokens.as_linear,
        stride=stride,
    )


def check_perplexity(source, folder, *, num_windows: int, stride: int) -> None:
    """Hold float32 weights of one exported folder to mlx-lm on the first windows of the text."""
    exported = export(source, folder)
    windows = windows_of(load_codec(source))[:num_windows]
    found, expected = of_headrace(exported, windows, stride), of_mlx_lm(exported, windows, stride)
    print(f"{source.name}: perplexity {found:.4f}, mlx-lm {expected:.4f}")
    # A model that understands the text, and not two that fail alike.
    assert expected < 60
    assert found == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "num_windows", "stride"), [("smollm2", 10, 1), ("gemma3_270m", 2, 4)])
def test_perplexity_equals_mlx_lm(request, tmp_path, name, num_windows, stride):
    """SmolLM2 reads 5,120 tokens in windows of 512; Gemma 1,024, of which every fourth is scored."""
    check_perplexity(request.getfixturevalue(name), tmp_path / "model", num_windows=num_windows, stride=stride)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_perplexity_of_gemma_on_the_whole_text(gemma3_270m, tmp_path):
    """All 5,120 tokens; a vocabulary of 262,144 takes minutes."""
    check_perplexity(gemma3_270m, tmp_path / "model", num_windows=10, stride=4)

"""`headrace doctor --verify`: the laws hold on this device, and a broken model, cache or sampler makes them fail."""

import mlx.core as mx
import pytest

from headrace_chat_server import verify
from headrace_chat_server.cli import main
from headrace_chat_server.verification.checks import Check, Measured, run_checks
from headrace_chat_server.verification.row_laws import row_laws
from headrace_chat_server.verification.rows import deviation
from headrace_chat_server.verification.sampling_laws import sampling_laws
from headrace_chat_server.verification.tiny_models import TINY_VOCAB, TINY_WINDOW, tiny_model
from headrace_kvcache import ModelRowBatch


def results_of(model, window=TINY_WINDOW, tolerance=1e-4):
    laws = row_laws(model, vocab_size=TINY_VOCAB, label="x", tolerance=tolerance, window=window)
    return {result.name.removeprefix("x: "): result for result in run_checks(laws)}


@pytest.fixture(scope="module")
def healthy():
    return tiny_model(mx.float32, bits=None, on_gpu=False)


def test_every_law_holds_on_a_healthy_model(healthy):
    """Seven laws of rows, each with a finite deviation within its tolerance."""
    results = results_of(healthy)
    assert len(results) == 7
    assert all(result.passed and result.measured.deviation >= 0 for result in results.values()), results


@pytest.mark.parametrize(("dtype", "bits", "tolerance"), [(mx.bfloat16, None, 0.06), (mx.float32, 4, 1e-3)])
def test_laws_hold_in_the_representations_of_a_mac(dtype, bits, tolerance):
    """bfloat16, and 4-bit weights through quantized_matmul."""
    results = results_of(tiny_model(dtype, bits=bits, on_gpu=False), tolerance=tolerance)
    assert all(result.passed for result in results.values()), results


class Broken:
    """A model that adds something to the hidden states."""

    def __init__(self, model, spoil):
        self.model, self.spoil = model, spoil

    def make_cache(self):
        return self.model.make_cache()

    def forward_hidden(self, ids, caches):
        return self.spoil(self.model.forward_hidden(ids, caches))

    def logits_from_hidden(self, hidden):
        return self.model.logits_from_hidden(hidden)


def test_a_model_that_mixes_rows_fails(healthy):
    """A row that sees its neighbours is found by the law of batches, and only by such laws."""
    results = results_of(Broken(healthy, lambda hidden: hidden + hidden.mean(axis=0, keepdims=True)))
    assert not results["a row in a batch equals the row alone"].passed
    assert results["a rolled back row equals the row before"].passed


def test_nan_fails(healthy):
    """Nothing compares with NaN, so it must never pass for small."""
    results = results_of(Broken(healthy, lambda hidden: hidden * mx.nan))
    assert not any(result.passed for result in results.values())
    assert deviation(mx.array([mx.nan, 1.0]), mx.array([0.0, 1.0])) != 0


def test_a_cache_that_does_not_roll_back_fails(healthy, monkeypatch):
    """Rows that keep their rejected drafts are found."""
    monkeypatch.setattr(ModelRowBatch, "set_end", lambda *_: None)
    results = results_of(healthy)
    assert [name for name, result in results.items() if not result.passed] == [
        "a rolled back row equals the row before"
    ]


def test_a_model_without_positions_in_chunks_fails(healthy):
    """A model that forgets where a chunk begins gives other logits in chunks."""

    class Forgetful(Broken):
        def forward_hidden(self, ids, caches):
            return super().forward_hidden(ids, caches) * ids.shape[1]

    results = results_of(Forgetful(healthy, lambda hidden: hidden))
    assert not results["prefill in chunks equals prefill at once"].passed


def test_sampling_laws_hold_and_find_a_sampler_that_ignores_its_seed(monkeypatch):
    """With keys from a global state, nothing is reproducible."""
    assert all(result.passed for result in run_checks(sampling_laws()))
    monkeypatch.setattr("headrace_sampling.batch.step_key", lambda *_: mx.random.split(mx.random.key(0), 1)[0])
    assert not all(result.passed for result in run_checks(sampling_laws()))


def test_a_check_that_raises_is_a_failure_with_its_reason(capsys):
    """No traceback, and the checks after it still run."""

    def explode():
        raise RuntimeError("[metal] out of memory\nsecond line")

    checks = [
        Check(name="first", measure=explode),
        Check(name="second", measure=lambda: Measured(deviation=0.5, tolerance=1.0, detail="of something")),
        Check(name="third", measure=lambda: Measured(deviation=2.0, tolerance=1.0)),
    ]
    assert verify.show(run_checks(checks)) == 2
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "FAIL  first: RuntimeError: [metal] out of memory"
    assert second == "pass  second (0.5 of 1 allowed) of something"
    assert third == "FAIL  third (2 of 1 allowed): deviation 2 is above 1"


def test_the_command_reports_device_laws_and_speed(tiny_llama, capsys, monkeypatch):
    """The whole command on a small model: facts, every law, speed, exit code 0; 1 as soon as one law fails."""
    assert main(["doctor", "--verify", str(tiny_llama)]) == 0
    text = capsys.readouterr().out
    wanted = ("versions: ", "device: ", "BLAS: ", "model: ", "float32", "prefill: ", "tokens/s", "all laws hold")
    assert all(part in text for part in wanted), text
    assert "FAIL" not in text
    broken = Check(name="a law", measure=lambda: Measured(deviation=2.0, tolerance=1.0))
    monkeypatch.setattr("headrace_chat_server.verification.laws.laws", lambda _: [broken])
    assert main(["doctor", "--verify", str(tiny_llama)]) == 1
    assert "1 FAILED" in capsys.readouterr().out

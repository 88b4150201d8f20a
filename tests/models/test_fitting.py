"""`fit`: weights to the byte, slots to the byte, refusals with a remedy, and the machine's own limits."""

import json

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_kvcache import KVScheme, make_row_batch, make_slot_prototypes
from headrace_models import load
from headrace_models.config import read_config
from headrace_models.fitting import fit, fit_source
from headrace_models.headers import read_headers
from headrace_models.memory_plan import plan_weights
from headrace_models.sources import ModelSource
from headrace_models.usable_memory import UsableMemory, linux_memory

GIB = 1 << 30


def source_of(folder):
    return ModelSource(name="tiny", path=folder, format="folder")


def report_of(folder, *, usable=GIB, num_tokens=1000, rows=2, **more):
    source = source_of(folder)
    return fit(
        read_config(source),
        read_headers(source),
        num_tokens=num_tokens,
        rows=rows,
        device="cpu",
        usable=UsableMemory(size_bytes=usable, origin="a test"),
        memory_bytes=16 * GIB,
        **more,
    )


@pytest.fixture(scope="module")
def packed_llama(tiny_llama, tmp_path_factory):
    """The tiny model in 4 bits, groups of 32, as MLX folders have it."""
    from shutil import copytree

    folder = copytree(tiny_llama, tmp_path_factory.mktemp("packed") / "model")
    tensors = {}
    for name, tensor in mx.load(str(folder / "model.safetensors")).items():
        if tensor.ndim == 2:
            path = name.removesuffix(".weight")
            parts = mx.quantize(tensor.astype(mx.bfloat16), group_size=32, bits=4)
            tensors |= {
                f"{path}.{part}": each for part, each in zip(("weight", "scales", "biases"), parts, strict=True)
            }
        else:
            tensors[name] = tensor.astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 4, "group_size": 32}}))
    return folder


@pytest.mark.parametrize("dtype", ["auto", "checkpoint", "float32", "bfloat16"])
@pytest.mark.parametrize("fixture", ["tiny_llama", "packed_llama"])
def test_weights_are_predicted_to_the_byte(fixture, dtype, request):
    """What headers promise is what loading holds, plain and packed, in every representation."""
    source = source_of(request.getfixturevalue(fixture))
    plan = plan_weights(read_config(source), read_headers(source), dtype=dtype, device="cpu", memory_bytes=16 * GIB)
    loaded = load(source, dtype=dtype)
    assert plan.size_bytes == loaded.model.weights_bytes
    assert loaded.representation.startswith(plan.dtype) or loaded.representation.endswith(plan.dtype)
    assert plan.is_packed is (fixture == "packed_llama" and dtype == "checkpoint")


@pytest.mark.parametrize("fixture", ["smollm2", "gemma3_270m"])
def test_a_gguf_file_s_weights_are_predicted_to_the_byte(fixture, request):
    """The real files, packed types and K-quants alike, widened to float32."""
    source = request.getfixturevalue(fixture)
    report = fit_source(source, num_tokens=100, dtype="float32")
    assert report.weights_bytes == {"smollm2": 538_060_032, "gemma3_270m": 1_072_448_000}[fixture]


@given(num_tokens=st.integers(1, 1900), rows=st.integers(1, 5))
def test_slots_are_predicted_to_the_byte(tiny_llama, num_tokens, rows):
    """Slots of rows joined for N tokens and written to N take what the plan says, all slots taken."""
    model = _model(tiny_llama)
    batch = make_row_batch(make_slot_prototypes(model), max_rows=rows)
    heads, size = model.config.num_key_value_heads, model.config.head_dim
    part = mx.broadcast_to(mx.zeros(()), (1, heads, num_tokens, size))
    for _ in range(rows):
        slot = batch.join(num_tokens=num_tokens)
        queries = mx.broadcast_to(mx.zeros(()), (1, model.config.num_attention_heads, num_tokens, size))
        for view in batch.view((slot,), num_tokens):
            view.attend(queries, part, part, scale=1.0)
        batch.advance((slot,), num_tokens)
    assert report_of(tiny_llama).plan.kv_bytes(num_tokens, rows) == batch.nbytes


_LOADED = {}


def _model(folder):
    if folder not in _LOADED:
        _LOADED[folder] = load(source_of(folder)).model
    return _LOADED[folder]


@given(usable=st.integers(1, 4 * GIB), num_tokens=st.integers(1, 2048), rows=st.integers(1, 300))
def test_the_largest_context_is_the_largest(tiny_llama, usable, num_tokens, rows):
    """`max_context` fits, one more does not; what fits is no more than it; and the verdict follows the sums."""
    report = report_of(tiny_llama, usable=usable, num_tokens=num_tokens, rows=rows)
    plan = report.plan
    if report.max_context:
        assert plan.total_bytes(report.max_context, rows) <= usable
    if report.max_context < plan.max_positions:
        assert plan.total_bytes(report.max_context + 1, rows) > usable
    assert report.fits is (num_tokens <= report.max_context)
    assert bool(report.advice) is not report.fits
    assert 0 <= report.kv_budget_bytes <= usable


def test_what_does_not_fit_says_what_to_change(tiny_llama):
    """Fewer rows, a smaller context, fewer bits of keys and values; each remedy is true."""
    plan = report_of(tiny_llama).plan
    report = report_of(tiny_llama, usable=plan.total_bytes(500, 200), num_tokens=1500, rows=200)
    assert not report.fits
    assert f"at most {report.max_context} tokens" in report.verdict
    fewer = plan.most_rows(report.usable.size_bytes, 1500, 199)
    assert f"at most {fewer} row" in report.verdict
    assert report_of(tiny_llama, usable=report.usable.size_bytes, num_tokens=1500, rows=fewer).fits
    assert not report_of(tiny_llama, usable=report.usable.size_bytes, num_tokens=1500, rows=fewer + 1).fits


def test_nothing_fits_names_the_weights(tiny_llama):
    """Without room for the weights there is no context, and the advice says so."""
    report = report_of(tiny_llama, usable=1000)
    assert report.max_context == report.kv_budget_bytes == 0
    assert "smaller model" in report.verdict


def test_a_context_beyond_the_model_s_own_is_refused(tiny_llama):
    """Memory is not the only limit."""
    assert "at most 2048 tokens" in report_of(tiny_llama, num_tokens=3000).verdict


@pytest.mark.parametrize(("name", "value"), [("num_tokens", 0), ("rows", 0), ("chunk", -1)])
def test_counts_below_one_are_refused(tiny_llama, name, value):
    """The message names the field and the value."""
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        report_of(tiny_llama, **{name: value})


def test_a_scheme_that_a_layer_cannot_take_is_refused(tiny_llama):
    """Heads of 8 have no groups of 64: refused by name before any arithmetic."""
    folder = tiny_llama
    source = source_of(folder)
    config = read_config(source)
    assert config.head_dim == 8
    with pytest.raises(Exception, match="group"):
        report_of(folder, scheme=KVScheme.uniform(8))


def test_headers_read_no_tensor(tmp_path, tiny_llama):
    """A file whose data is cut off still tells its sizes: nothing but the header was read."""
    from shutil import copytree

    folder = copytree(tiny_llama, tmp_path / "cut")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    file.write_bytes(whole[: 8 + length])
    assert read_headers(source_of(folder)) == read_headers(source_of(tiny_llama))
    file.write_bytes(np.array([2**60], np.uint64).tobytes() + b"{")
    with pytest.raises(Exception, match="fetch it again"):
        read_headers(source_of(folder))


def _write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_linux_memory_is_what_is_available(tmp_path):
    """Without a control group's limit, MemAvailable counts."""
    _write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   2000 kB\n", "proc/self/cgroup": "0::/\n"})
    found = linux_memory(tmp_path)
    assert (found.size_bytes, found.origin) == (2_048_000, "the memory that Linux has available")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_counts(tmp_path, version):
    """A container's limit, at any level above the process, less its use but for droppable cache."""
    base, names, line, cache = {
        1: (
            "sys/fs/cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "4:cpu,memory:/a/b\n",
            "total_inactive_file",
        ),
        2: ("sys/fs/cgroup", ("memory.max", "memory.current"), "0::/a/b\n", "inactive_file"),
    }[version]
    _write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 2000 kB\n",
            "proc/self/cgroup": line,
            f"{base}/a/b/{names[0]}": "max\n" if version == 2 else str(2**63 - 4096),
            f"{base}/a/b/{names[1]}": "0",
            f"{base}/a/{names[0]}": "1000000",
            f"{base}/a/{names[1]}": "400000",
            f"{base}/a/memory.stat": f"anon 1\n{cache} 50000\n",
        },
    )
    found = linux_memory(tmp_path)
    assert found.size_bytes == 650_000
    assert "control group" in found.origin

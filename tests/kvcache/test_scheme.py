"""Laws of KV schemes: what they name, whom they convert and when, and their bytes against those of real caches."""

import json

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    CacheList,
    CacheSpec,
    ChunkedKVCache,
    InvalidLength,
    InvalidScheme,
    KVCache,
    KVScheme,
    LayerSpec,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    attend,
    first_chunk_length,
    kv_bytes_at,
)

HEADS = {"num_kv_heads": 2, "key_head_dim": 64, "value_head_dim": 32}
LAYERS = (
    LayerSpec(**HEADS),
    LayerSpec.sliding(window=300, **HEADS),
    LayerSpec.recurrent(tail_elements=24, state_elements=50),
    LayerSpec.latent(latent_dim=64, rope_dim=32),
    LayerSpec.chunked(chunk_size=300, **HEADS),
    LayerSpec.shared(),
    LayerSpec.list_of(LayerSpec(**HEADS), LayerSpec.recurrent(tail_elements=3)),
)
SPEC = CacheSpec(layers=LAYERS, dtype="float32")
AFFINE = st.builds(KVScheme.uniform, st.sampled_from([2, 3, 4, 5, 6, 8]), st.just(32))
PER_LAYER = st.builds(
    lambda layers, bits: KVScheme.per_layer([(layer, bits, 32) for layer in layers]),
    st.sets(st.sampled_from([0, 1, 3]), min_size=1),
    st.sampled_from([2, 4, 8]),
)
SCHEMES = st.one_of(st.just(KVScheme.unquantized()), AFFINE, PER_LAYER)


class Shared:
    """A layer without a cache of its own."""

    nbytes = 0
    offset = 0


def make(layer):
    if layer.kind == "list":
        return CacheList(*map(make, layer.members))
    makers = {
        "full": KVCache,
        "latent": KVCache,
        "sliding": lambda: RotatingKVCache(layer.window),
        "chunked": lambda: ChunkedKVCache(layer.window),
        "recurrent": RecurrentCache,
        "shared": Shared,
    }
    return makers[layer.kind]()


def append(layer, cache, count, dtype):
    """Append to a cache as a model with that layer would, and let it come to rest."""
    if layer.kind == "list":
        for member, each in zip(layer.members, cache.caches, strict=True):
            append(member, each, count, dtype)
    elif layer.kind == "recurrent":
        cache[0] = mx.zeros((1, layer.tail_elements), dtype)
        cache[1] = mx.zeros((1, layer.state_elements))
        cache.advance(count)
    elif layer.kind != "shared":
        shape = (1, layer.num_kv_heads, count)
        keys, values = mx.ones((*shape, layer.key_head_dim), dtype), mx.ones((*shape, layer.value_head_dim), dtype)
        cache.update_and_fetch(keys, values)
    if layer.kind == "sliding":
        cache.compact()
    if layer.kind == "chunked":
        cache.maybe_trim_front()


@settings(max_examples=30, deadline=None)
@given(
    scheme=SCHEMES,
    chunks=st.lists(st.sampled_from([1, 3, 44, 256, 300]), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_bytes_foretold_are_bytes_allocated(scheme, chunks, dtype):
    """Every kind of layer, every scheme, every slab border: `bytes_at` is what real caches take at rest."""
    spec = CacheSpec(layers=LAYERS, dtype=dtype)
    caches = [make(layer) for layer in LAYERS]
    assert scheme.bytes_at(spec, 0) == sum(cache.nbytes for cache in caches) == 0
    total = 0
    for number, count in enumerate(chunks):
        for layer, cache in zip(LAYERS, caches, strict=True):
            append(layer, cache, count, getattr(mx, dtype))
        total += count
        if number == 0:
            assert sum(cache.nbytes for cache in caches) == kv_bytes_at(spec, total)
            scheme.convert(caches)
        assert sum(cache.nbytes for cache in caches) == scheme.bytes_at(spec, total)


@settings(max_examples=30, deadline=None)
@given(num_tokens=st.integers(0, 3000), more=st.integers(0, 500), scheme=SCHEMES)
def test_more_tokens_never_cost_less(num_tokens, more, scheme):
    """Bytes grow with the tokens, chunked layers aside, and a quantized cache is never larger than a plain one."""
    spec = CacheSpec(layers=[layer for layer in LAYERS if layer.kind != "chunked"], dtype="float32")
    scheme = scheme if scheme.kind != "per-layer" else KVScheme.uniform(4, 32)
    assert scheme.bytes_at(spec, num_tokens) <= scheme.bytes_at(spec, num_tokens + more)
    assert scheme.bytes_at(spec, num_tokens) <= kv_bytes_at(spec, num_tokens)


def filled(count=4):
    caches = [make(layer) for layer in LAYERS]
    for layer, cache in zip(LAYERS, caches, strict=True):
        append(layer, cache, count, mx.float32)
    return caches


def test_a_uniform_scheme_converts_plain_and_rotating_caches():
    """Recurrent, chunked and shared layers and lists stay as they are; converting again does nothing."""
    caches = filled()
    before = list(caches)
    scheme = KVScheme.uniform(4, 32)
    assert scheme.convert(caches) == 3
    assert [type(caches[index]) for index in (0, 1, 3)] == [
        QuantizedKVCache,
        RotatingQuantizedKVCache,
        QuantizedKVCache,
    ]
    assert all(caches[index] is before[index] for index in (2, 4, 5, 6))
    assert scheme.convert(caches) == 0
    assert KVScheme.unquantized().convert(before) == 0


def test_empty_caches_and_those_below_the_start_are_never_converted():
    """The first chunk is stored unquantized, or the prefill would leave the reference path (K-25)."""
    caches = [KVCache(), KVCache()]
    assert KVScheme.uniform(4, 32).convert(caches) == 0
    append(LAYERS[0], caches[1], 9, mx.float32)
    assert KVScheme.uniform(4, 32, start=10).convert(caches) == 0
    assert KVScheme.uniform(4, 32, start=9).convert(caches) == 1
    assert [type(cache) for cache in caches] == [KVCache, QuantizedKVCache]


def test_a_layer_that_does_not_fit_is_refused_before_any_is_converted():
    """All or nothing, with the index of the layer."""
    caches = [KVCache(), KVCache()]
    append(LAYERS[0], caches[0], 3, mx.float32)
    caches[1].update_and_fetch(*[mx.ones((1, 1, 3, 48))] * 2)
    with pytest.raises(InvalidScheme, match="layer 1") as refusal:
        KVScheme.uniform(4, 32).convert(caches)
    assert refusal.value.layer == 1
    assert [type(cache) for cache in caches] == [KVCache, KVCache]


def test_conversion_goes_a_layer_at_a_time():
    """Peak memory is that of the caches and one layer more, not of all sources and all results (K-25)."""
    layer = LayerSpec(num_kv_heads=2, key_head_dim=64, value_head_dim=64)
    caches = [KVCache() for _ in range(16)]
    for cache in caches:
        append(layer, cache, 2048, mx.float32)
    mx.eval([cache.state for cache in caches])
    one = caches[0].nbytes
    del cache
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    KVScheme.uniform(8, 64).convert(caches)
    assert mx.get_peak_memory() - before < 2 * one
    assert before - mx.get_active_memory() > 16 * one * 0.71


REFUSED = [
    ([(2, 4, 32)], 2, "recurrent"),
    ([(4, 4, 32)], 4, "chunked"),
    ([(5, 4, 32)], 5, "shared"),
    ([(6, 4, 32)], 6, "list"),
    ([(9, 4, 32)], 9, "0 to 6"),
    ([(0, 4, 64)], 0, "value head size 32"),
]


@pytest.mark.parametrize(("entries", "layer", "reason"), REFUSED, ids=[str(each[1]) for each in REFUSED])
def test_an_entry_that_can_never_convert_is_refused_at_start_up(entries, layer, reason):
    """The error has the layer's index and its reason, and such a scheme is not batchable."""
    scheme = KVScheme.per_layer(entries)
    with pytest.raises(InvalidScheme, match=reason) as refusal:
        scheme.check(SPEC)
    assert refusal.value.layer == layer
    assert not scheme.batchable(SPEC, lambda index: True)


def test_batchable_asks_for_every_layer_concerned():
    """A start above 0, or one layer that cannot share slots, makes a scheme serial; unquantized never is."""
    scheme = KVScheme.uniform(4, 32)
    asked = []
    assert scheme.batchable(SPEC, lambda index: asked.append(index) or True)
    assert asked == [0, 1, 3]
    assert not scheme.batchable(SPEC, lambda index: index != 3)
    assert not KVScheme.uniform(4, 32, start=1).batchable(SPEC, lambda index: True)
    assert KVScheme.per_layer([(1, 4, 32)]).batchable(SPEC, lambda index: index == 1)
    assert KVScheme.unquantized().batchable(SPEC, lambda index: False)


def test_layers_that_stay_unquantized_are_told():
    """So that a server can warn once, and never loses a quantization in silence (K-43, K-23)."""
    assert KVScheme.unquantized().passed_over(SPEC) == ()
    assert KVScheme.uniform(4, 32).passed_over(SPEC) == (4, 6)
    assert KVScheme.turbo().passed_over(SPEC) == (1, 3, 4, 6)
    assert KVScheme.per_layer([(0, 4, 32), (4, 4, 32)]).passed_over(SPEC) == (1, 3, 6)


def test_keys_tell_apart_all_that_changes_bytes_or_numbers():
    """Element type, kind, bits, group and start; the order of per-layer entries changes nothing."""
    pairs = [(0, 4, 32), (1, 8, 64)]
    schemes = [
        KVScheme.unquantized(),
        KVScheme.uniform(4),
        KVScheme.uniform(8),
        KVScheme.uniform(4, 32),
        KVScheme.uniform(4, 64, 5000),
        KVScheme.per_layer(pairs),
        KVScheme.per_layer(pairs[:1]),
        KVScheme.turbo(),
        KVScheme.turbo(8, 4),
    ]
    keys = [scheme.for_dtype(dtype).key for scheme in schemes for dtype in ("float32", "bfloat16")]
    assert len(set(keys)) == len(keys)
    assert not any("bf16" in key for key in keys)
    same = KVScheme.per_layer(pairs[::-1])
    assert same == KVScheme.per_layer(pairs)
    assert same.for_dtype("float32").key == KVScheme.per_layer(pairs).for_dtype("float32").key
    with pytest.raises(InvalidScheme, match="for_dtype"):
        _ = KVScheme.unquantized().key


def test_parse_reads_what_a_command_line_names(tmp_path):
    """off, bits, config and turbo; the server's schemes start at 0."""
    (tmp_path / "kv_config.json").write_text(json.dumps([{"layer_idx": 1, "bits": 4, "group_size": 32}]))
    assert KVScheme.parse("off") == KVScheme.unquantized()
    assert KVScheme.parse("4") == KVScheme.uniform(4, 64, 0)
    assert KVScheme.parse("8").kind == "uniform"
    assert KVScheme.parse("turbo:k8v3") == KVScheme.turbo(8, 3)
    assert KVScheme.parse("config", kv_config=tmp_path) == KVScheme.per_layer([(1, 4, 32)])
    assert KVScheme.from_kv_config(tmp_path / "kv_config.json").kind == "per-layer"
    with pytest.raises(InvalidScheme, match="no kv_config"):
        KVScheme.parse("config")


@pytest.mark.parametrize("text", ["", "on", "7", "04", " 4", "turbo", "turbo:k3v3", "turbo:k8v9", "CONFIG"])
def test_other_texts_are_refused(text):
    """The error says what there is."""
    with pytest.raises(InvalidScheme):
        KVScheme.parse(text)


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "{}",
        "[]",
        '[{"layer_idx": 0, "bits": 4}]',
        '[{"layer_idx": 0, "bits": 4, "group_size": 64, "more": 1}]',
        '[{"layer_idx": 0, "bits": true, "group_size": 64}]',
        '[{"layer_idx": 0, "bits": 7, "group_size": 64}]',
        '[{"layer_idx": -1, "bits": 4, "group_size": 64}]',
        '[{"layer_idx": "0", "bits": 4, "group_size": 64}]',
        '[{"layer_idx": 0, "bits": 4, "group_size": 64}, {"layer_idx": 0, "bits": 8, "group_size": 64}]',
        '["layer_idx"]',
    ],
)
def test_a_file_that_is_no_kv_config_is_refused(content, tmp_path):
    """Anything but a list of distinct layers with known values is an `InvalidScheme`."""
    file = tmp_path / "kv_config.json"
    file.write_text(content)
    with pytest.raises(InvalidScheme):
        KVScheme.from_kv_config(file)
    with pytest.raises(InvalidScheme):
        KVScheme.from_kv_config(tmp_path / "absent.json")


@given(st.integers(0, 5000), st.one_of(st.none(), st.integers(0, 5000)))
def test_the_first_chunk_follows_from_the_prompt(num_tokens, boundary):
    """At most 2,048 positions and never beyond the prompt or its snapshot."""
    length = first_chunk_length(num_tokens, boundary=boundary)
    assert length == min(num_tokens, 2048, boundary or num_tokens)


@pytest.mark.parametrize("value", [-1, 1.0, True])
def test_counts_are_checked(value):
    """A count is an integer of at least 0."""
    for call in (
        first_chunk_length,
        lambda count: KVScheme.uniform(4, 64, count),
        lambda count: KVScheme.uniform(4).bytes_at(SPEC, count),
    ):
        with pytest.raises(InvalidLength):
            call(value)


def test_attention_goes_on_over_what_was_converted():
    """After the conversion a step sees the first chunk through the quantizer."""
    shapes = [(1, 4, 5, 64), (1, 2, 5, 64), (1, 2, 5, 64)]
    chunk = [mx.random.normal(shape, key=mx.random.key(seed)) for seed, shape in enumerate(shapes)]
    step = [one[:, :, :1] for one in chunk]
    always, caches = QuantizedKVCache(bits=4, group_size=32), [KVCache()]
    attend(always, *chunk, scale=0.1)
    attend(caches[0], *chunk, scale=0.1)
    KVScheme.uniform(4, 32).convert(caches)
    assert mx.array_equal(attend(caches[0], *step, scale=0.1), attend(always, *step, scale=0.1))

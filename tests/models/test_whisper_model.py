"""Whisper's network: formats agree, caches equal the whole, rows equal themselves alone, also in 16 and 4 bits."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest
from attrs import evolve

from headrace_models.errors import ModelError, SourceError, UnsupportedFormat, WeightMismatch
from headrace_models.row_blocks import StoredTensor
from headrace_models.whisper import load_whisper, log_mel, resolve_whisper
from headrace_models.whisper.caches import DecoderState
from headrace_models.whisper.checkpoint import open_whisper_checkpoint
from headrace_models.whisper.host import attend, attend_on_host, gelu, gelu_on_host, log_sum_exp, log_sum_exp_on_host
from headrace_models.whisper.mel import mel_filters
from headrace_models.whisper.prefill import pad_ids
from headrace_models.whisper.sources import open_whisper_folder

IDS = (257, 258, 262, 267, 70, 90, 33, 270, 275)


def window(model, seed=3):
    frames = model.config.window_frames
    return np.random.default_rng(seed).standard_normal((1, frames, model.config.num_mels)).astype(np.float32)


def logits(model, ids, seed=3):
    state = DecoderState.empty(model.encode(window(model, seed)))
    return np.array(model.decoder.logits(model.decoder.forward(mx.array([ids]), state))[0])


def tensors_of(folder):
    _, checkpoint = open_whisper_checkpoint(open_whisper_folder(folder))
    return {
        name: tensor.read(mx.float32) if isinstance(tensor, StoredTensor) else tensor
        for name, tensor in checkpoint.tensors.items()
    }


def write_mlx_folder(source, folder, model, *, save, quantization=None):
    config = model.config
    settings = {
        "n_mels": config.num_mels,
        "n_audio_ctx": config.audio_context,
        "n_audio_state": config.audio_state,
        "n_audio_head": config.audio_heads,
        "n_audio_layer": config.audio_layers,
        "n_vocab": config.vocab_size,
        "n_text_ctx": config.text_context,
        "n_text_state": config.text_state,
        "n_text_head": config.text_heads,
        "n_text_layer": config.text_layers,
    }
    tensors = tensors_of(source)
    tensors["alignment_heads"] = mx.array(config.heads_to_align)
    if quantization:
        settings["quantization"] = quantization
        for name in [name for name in tensors if name.endswith(".weight") and tensors[name].ndim == 2]:
            codes, scales, biases = mx.quantize(tensors.pop(name), **quantization)
            path = name.removesuffix(".weight")
            tensors |= {f"{path}.weight": codes, f"{path}.scales": scales, f"{path}.biases": biases}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    if save == "npz":
        mx.savez(str(folder / "weights.npz"), **tensors)
    else:
        mx.save_safetensors(str(folder / "weights.safetensors"), tensors)
    return folder


def write_ctranslate2_folder(source, folder, model, *, int8=False):  # noqa: C901
    """Write the layout of CTranslate2's files, as `docs/transcription.md` tells it."""
    tensors = {name: np.array(tensor) for name, tensor in tensors_of(source).items()}
    variables = {"encoder/num_heads": np.int16(model.config.audio_heads)}
    variables["decoder/num_heads"] = np.int16(model.config.text_heads)

    def put(name, array):
        if int8 and name.endswith("linear_0/weight"):
            scale = 127 / np.abs(array).max(axis=1)
            variables[name] = np.round(array * scale[:, None]).astype(np.int8)
            variables[f"{name}_scale"] = scale.astype(np.float32)
        else:
            variables[name] = array

    for side in ("encoder", "decoder"):
        last = "ln_post" if side == "encoder" else "ln"
        for ours, theirs in (("weight", "gamma"), ("bias", "beta")):
            put(f"{side}/layer_norm/{theirs}", tensors[f"{side}.{last}.{ours}"])
        for index in range(2):
            old, new = f"{side}.blocks.{index}.", f"{side}/layer_{index}/"
            zeros = np.zeros(32, np.float32)
            for kind, attention in (("attn", "self_attention"), ("cross_attn", "attention")):
                if f"{old}{kind}.query.weight" not in tensors:
                    continue
                part = {
                    f"{name}.{what}": tensors.get(f"{old}{kind}.{name}.{what}", zeros)
                    for name in ("query", "key", "value", "out")
                    for what in ("weight", "bias")
                }
                joined = [("query", "key", "value"), ("out",)]
                if kind == "cross_attn":
                    joined = [("query",), ("key", "value"), ("out",)]
                for number, names in enumerate(joined):
                    for what in ("weight", "bias"):
                        array = np.concatenate([part[f"{name}.{what}"] for name in names])
                        put(f"{new}{attention}/linear_{number}/{what}", array)
                put(f"{new}{attention}/layer_norm/gamma", tensors[f"{old}{kind}_ln.weight"])
                put(f"{new}{attention}/layer_norm/beta", tensors[f"{old}{kind}_ln.bias"])
            for number in (0, 1):
                for what in ("weight", "bias"):
                    put(f"{new}ffn/linear_{number}/{what}", tensors[f"{old}mlp{number + 1}.{what}"])
            put(f"{new}ffn/layer_norm/gamma", tensors[f"{old}mlp_ln.weight"])
            put(f"{new}ffn/layer_norm/beta", tensors[f"{old}mlp_ln.bias"])
    for number in (1, 2):
        put(f"encoder/conv{number}/weight", tensors[f"encoder.conv{number}.weight"].swapaxes(1, 2))
        put(f"encoder/conv{number}/bias", tensors[f"encoder.conv{number}.bias"])
    put("encoder/position_encodings/encodings", np.zeros((model.config.audio_context, 32), np.float32))
    put("decoder/position_encodings/encodings", tensors["decoder.positional_embedding"])
    put("decoder/embeddings/weight", tensors["decoder.token_embedding.weight"])
    (folder / "model.bin").write_bytes(packed(variables))
    heads = [list(pair) for pair in model.config.heads_to_align]
    (folder / "config.json").write_text(json.dumps({"alignment_heads": heads, "suppress_ids": []}))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return folder


def packed(variables):
    def text(value):
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    kinds = {"float32": 0, "int8": 1, "int16": 2}
    data = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, value in variables.items():
        array = np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value)
        data += text(name) + struct.pack("<B", array.ndim) + struct.pack(f"<{array.ndim}I", *array.shape)
        data += struct.pack("<BI", kinds[str(array.dtype)], array.nbytes) + array.tobytes()
    return data + struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight")


@pytest.mark.parametrize("save", ["npz", "safetensors"])
def test_mlx_folders_give_the_logits_of_a_transformers_folder(save, tiny_whisper, tiny_whisper_folder, tmp_path):
    """The same weights under mlx-community's names are the same model, alignment heads included."""
    folder = write_mlx_folder(tiny_whisper_folder, tmp_path, tiny_whisper, save=save)
    other = load_whisper(folder, dtype="float32")
    assert np.abs(logits(other, IDS) - logits(tiny_whisper, IDS)).max() < 1e-5
    assert other.config.alignment_heads == ((0, 1), (1, 2))


def test_ctranslate2_folders_give_the_logits_of_a_transformers_folder(tiny_whisper, tiny_whisper_folder, tmp_path):
    """Joined matrices are taken apart, convolutions turned, and keys have no bias."""
    other = load_whisper(write_ctranslate2_folder(tiny_whisper_folder, tmp_path, tiny_whisper), dtype="float32")
    assert np.abs(logits(other, IDS) - logits(tiny_whisper, IDS)).max() < 1e-5
    assert other.config.alignment_heads == ((0, 1), (1, 2))


def test_eight_bit_ctranslate2_weights_are_divided_by_their_scales(tiny_whisper, tiny_whisper_folder, tmp_path):
    """Rows of 8-bit weights come back within half a step of their scale."""
    folder = write_ctranslate2_folder(tiny_whisper_folder, tmp_path, tiny_whisper, int8=True)
    found, wanted = tensors_of(folder), tensors_of(tiny_whisper_folder)
    for name in ("encoder.blocks.0.attn.value.weight", "decoder.blocks.1.mlp1.weight"):
        # A joined matrix has one scale per row, so each row's own largest number decides.
        steps = mx.abs(wanted[name]).max(axis=1, keepdims=True) / 127
        assert bool((mx.abs(found[name] - wanted[name]) <= 0.51 * steps).all())


def test_a_file_in_parts_reads_as_the_whole(tiny_whisper, tiny_whisper_folder, tmp_path):
    """Numbers that a cut runs through are put together, whatever the number of parts; an empty part changes nothing."""
    folder = write_ctranslate2_folder(tiny_whisper_folder, tmp_path, tiny_whisper)
    whole = open_whisper_folder(folder)
    data = whole.weights[0].read_bytes()
    cuts = [0, 5, len(data) // 3, len(data) // 2, len(data) // 2, len(data) - 1, len(data)]
    parts = tuple(tmp_path / f"part{number}" for number in range(len(cuts) - 1))
    for path, start, stop in zip(parts, cuts, cuts[1:], strict=False):
        path.write_bytes(data[start:stop])
    found = load_whisper(evolve(whole, weights=parts), dtype="float32")
    assert np.array_equal(logits(found, IDS), logits(load_whisper(whole, dtype="float32"), IDS))


@pytest.mark.parametrize("cut", [0, 3, 40, 5_000, -1])
def test_a_cut_ctranslate2_file_is_refused(cut, tiny_whisper, tiny_whisper_folder, tmp_path):
    """Wherever a file ends early, the error is one of ours."""
    folder = write_ctranslate2_folder(tiny_whisper_folder, tmp_path, tiny_whisper)
    path = folder / "model.bin"
    whole = path.read_bytes()
    end = len(whole) - 200_000 if cut == -1 else cut
    path.write_bytes(whole[:end])
    with pytest.raises(ModelError):
        load_whisper(folder)


def test_incomplete_folders_are_refused(tiny_whisper_folder, tmp_path):
    """A missing configuration, unknown settings and missing tensors are named."""
    with pytest.raises(SourceError, match=r"config\.json"):
        open_whisper_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedFormat, match="n_mels"):
        open_whisper_folder(tmp_path)
    settings = json.loads((tiny_whisper_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"decoder_layers": 3}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_whisper_folder / name).read_bytes())
    with pytest.raises(WeightMismatch, match="3 decoder layers"):
        load_whisper(tmp_path)
    with pytest.raises(SourceError, match=r"whisper-base"):
        resolve_whisper("no such model")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.35)])
def test_decoding_step_by_step_equals_all_at_once(dtype, tolerance, tiny_whisper_folder):
    """Cached keys and values give each position the logits of one pass over all; logits are up to 8 in size."""
    model = load_whisper(tiny_whisper_folder, dtype=dtype)
    whole = logits(model, IDS)
    state = DecoderState.empty(model.encode(window(model)))
    steps = [model.decoder.logits(model.decoder.forward(mx.array([[token]]), state))[0, 0] for token in IDS]
    assert np.abs(np.array(mx.stack(steps)) - whole).max() < tolerance
    assert np.abs(whole).max() > 1


def test_four_bit_weights_step_by_step_equal_all_at_once(tiny_whisper, tiny_whisper_folder, tmp_path):
    """Packed matrices stay packed, and are the model whose weights they decode to."""
    quantization = {"bits": 4, "group_size": 32}
    folder = write_mlx_folder(tiny_whisper_folder, tmp_path, tiny_whisper, save="st", quantization=quantization)
    packed_model, plain = load_whisper(folder, dtype="checkpoint"), load_whisper(folder, dtype="float32")
    assert packed_model.representation == "4-bit, group 32, float32"
    assert packed_model.weights_bytes < 0.5 * plain.weights_bytes
    whole = logits(packed_model, IDS)
    assert np.abs(whole - logits(plain, IDS)).max() < 1e-4
    state = DecoderState.empty(packed_model.encode(window(packed_model)))
    steps = [
        packed_model.decoder.logits(packed_model.decoder.forward(mx.array([[token]]), state))[0, 0] for token in IDS
    ]
    assert np.abs(np.array(mx.stack(steps)) - whole).max() < 1e-4


def test_rows_of_different_lengths_equal_themselves_alone(tiny_whisper):
    """Prompts of different lengths, other windows and steps beside a row change its logits by less than 1e-4."""
    rows = [IDS[:3], IDS, IDS[:5]]
    audio = tiny_whisper.encode(np.concatenate([window(tiny_whisper, seed) for seed in range(3)]))
    state = DecoderState.empty(audio)
    tiny_whisper.decoder.forward(pad_ids(rows), state, lengths=[len(row) for row in rows])
    for token in (80, 95, 101):
        hidden = tiny_whisper.decoder.forward(mx.full((3, 1), token), state)
    together = np.array(tiny_whisper.decoder.logits(hidden[:, 0]))
    for index, row in enumerate(rows):
        alone = logits(tiny_whisper, (*row, 80, 95, 101), seed=index)[-1]
        assert np.abs(together[index] - alone).max() < 1e-4
    assert state.ends == [len(row) + 3 for row in rows]


def test_candidates_share_their_window(tiny_whisper):
    """Rows of one window, reordered and thinned out, go on as if each had its own copy of the audio."""
    audio = tiny_whisper.encode(np.concatenate([window(tiny_whisper, seed) for seed in range(2)]))
    state = DecoderState.empty(audio)
    tiny_whisper.decoder.forward(mx.array([IDS[:3]] * 2), state)
    state.repeat(2)
    tiny_whisper.decoder.forward(mx.array([[70], [71], [72], [73]]), state)
    state.reorder([1, 0, 3, 3])
    state.keep([1])
    hidden = tiny_whisper.decoder.forward(mx.array([[80], [81]]), state)
    found = np.array(tiny_whisper.decoder.logits(hidden[:, 0]))
    for row, token in enumerate((80, 81)):
        assert np.abs(found[row] - logits(tiny_whisper, (*IDS[:3], 73, token), seed=1)[-1]).max() < 1e-4


@pytest.mark.parametrize("shape", [(1, 4, 200, 300), (2, 3, 1, 9000), (1, 2, 5, 7)])
def test_softmax_in_numpy_equals_mlx(shape):
    """Attention whose softmax numpy computes, in blocks, is within 5e-5 of float64, for scores up to 50."""
    rows, heads, count, reach = shape
    random = np.random.default_rng(1)
    queries, keys, values = (
        mx.array(random.standard_normal((rows, heads, length, 16)).astype(np.float32) * 3)
        for length in (count, reach, reach)
    )
    q, k, v = (np.array(array).astype(np.float64) for array in (queries, keys, values))
    weights = np.exp(q @ k.swapaxes(-1, -2) / 4)
    wanted = weights @ v / weights.sum(axis=-1, keepdims=True)
    for found, tolerance in ((attend_on_host(queries, keys, values), 5e-5), (attend(queries, keys, values), 1e-4)):
        assert np.abs(np.array(found) - wanted).max() < tolerance


def test_gelu_in_numpy_equals_mlx():
    """The formula for the error function is within 1e-6 of MLX's over all that matters, far tails included."""
    x = mx.linspace(-12, 12, 40_000)
    wanted = gelu(x)
    mx.eval(wanted)
    assert float(mx.abs(gelu_on_host(x + 0) - wanted).max()) < 1e-6


def test_gelu_in_numpy_makes_no_denormal_numbers():
    """Products with them take several times as long."""
    found = np.abs(np.array(gelu_on_host(mx.linspace(-40, 0, 40_000) + 0)))
    assert ((found == 0) | (found >= np.finfo(np.float32).tiny)).all()


@pytest.mark.parametrize(
    ("num_mels", "places"),
    [
        (80, {(0, 1): 0.024862595, (40, 43): 0.014735566, (79, 192): 0.003164712, (1, 2): 0.022871772}),
        (128, {(0, 1): 0.012373987, (64, 43): 0.018091518, (127, 195): 0.005041602, (1, 2): 0.0}),
    ],
)
def test_mel_filters_are_openais(num_mels, places):
    """Values of the filter banks that openai/whisper ships (`mel_filters.npz`), to 1e-7."""
    filters = mel_filters(num_mels)
    assert filters.shape == (num_mels, 201)
    for place, value in places.items():
        assert abs(float(filters[place]) - value) < 1e-7, (place, float(filters[place]))


def test_log_mel_equals_its_formula(whisper_noise):
    """Windows, transform, filters and range, computed one frame at a time in float64."""
    samples = whisper_noise(1.3)
    samples[15_000:] = 0
    padded = np.concatenate([samples[200:0:-1], samples, np.zeros(800)]).astype(np.float64)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = [np.abs(np.fft.rfft(padded[160 * t : 160 * t + 400] * hann)) ** 2 for t in range(132)]
    logs = np.log10(np.maximum(np.array(frames) @ mel_filters(80).T.astype(np.float64), 1e-10))
    wanted = (np.maximum(logs, logs.max() - 8)[:130] + 4) / 4
    found = log_mel(samples, 80)
    assert found.shape == (130, 80)
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() < 1e-4


def test_sums_of_powers_on_the_host_are_the_devices():
    """Also of logits far from zero, of rows where little is allowed, and of rows where nothing is."""
    logits = mx.random.normal((5, 3000), scale=20, key=mx.random.key(3))
    logits[1] += 500
    logits[2, 1:] = -mx.inf
    found, wanted = log_sum_exp_on_host(logits + 0), log_sum_exp(logits)
    assert float(mx.abs(found - wanted).max()) < 1e-3
    assert log_sum_exp_on_host(mx.full((2, 9), -mx.inf)).tolist() == [-mx.inf, -mx.inf]

"""A tiny random Whisper for the laws: one second per window, three languages, byte tokens."""

import json
from pathlib import Path

import pytest

WHISPER_TEXT = 256
WHISPER_SPECIALS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|fr|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
WHISPER_POSITIONS = 50
WHISPER_SETTINGS = {
    "model_type": "whisper",
    "d_model": 32,
    "vocab_size": WHISPER_TEXT + len(WHISPER_SPECIALS) + WHISPER_POSITIONS + 1,
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "max_source_positions": WHISPER_POSITIONS,
    "max_target_positions": 64,
}


@pytest.fixture(scope="session")
def tiny_whisper_folder(tmp_path_factory) -> Path:
    """A transformers folder with a random multilingual Whisper of two layers each side."""
    folder = tmp_path_factory.mktemp("tiny-whisper")
    (folder / "config.json").write_text(json.dumps(WHISPER_SETTINGS), "utf-8")
    generation = {"is_multilingual": True, "alignment_heads": [[0, 1], [1, 2]]}
    (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    _write_whisper_tokenizer(folder)
    _write_whisper_weights(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_whisper(tiny_whisper_folder):
    """The tiny Whisper, loaded in float32."""
    from headrace_models.whisper import load_whisper

    return load_whisper(tiny_whisper_folder, dtype="float32")


@pytest.fixture(scope="session")
def whisper_noise():
    """Returns so many seconds of seeded noise that swells and fades, as samples at 16 kHz."""
    import numpy as np

    def make(seconds: float, seed: int = 0):
        random = np.random.default_rng(seed)
        count = round(seconds * 16_000)
        swell = 0.55 + 0.45 * np.sin(np.arange(count) / 16_000 * 2 * np.pi * 1.7 + seed)
        return (random.standard_normal(count) * 0.1 * swell).astype(np.float32)

    return make


def _write_whisper_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from headrace_models.whisper.vocabulary import BYTE_SYMBOLS

    vocabulary = {symbol: index for index, symbol in enumerate(BYTE_SYMBOLS.values())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in WHISPER_SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_whisper_weights(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(11)
    state, vocab = WHISPER_SETTINGS["d_model"], WHISPER_SETTINGS["vocab_size"]
    shapes = {
        "encoder.conv1.weight": (state, WHISPER_SETTINGS["num_mel_bins"], 3),
        "encoder.conv1.bias": (state,),
        "encoder.conv2.weight": (state, state, 3),
        "encoder.conv2.bias": (state,),
        "encoder.embed_positions.weight": (WHISPER_POSITIONS, state),
        "decoder.embed_tokens.weight": (vocab, state),
        "decoder.embed_positions.weight": (WHISPER_SETTINGS["max_target_positions"], state),
    }
    norms = ["encoder.layer_norm", "decoder.layer_norm"]
    for side in ("encoder", "decoder"):
        for index in range(2):
            prefix = f"{side}.layers.{index}."
            attentions = ("self_attn", "encoder_attn") if side == "decoder" else ("self_attn",)
            for attention in attentions:
                norms.append(f"{prefix}{attention}_layer_norm")
                for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes[f"{prefix}{attention}.{name}.weight"] = (state, state)
                    if name != "k_proj":
                        shapes[f"{prefix}{attention}.{name}.bias"] = (state,)
            norms.append(f"{prefix}final_layer_norm")
            shapes |= {f"{prefix}fc1.weight": (4 * state, state), f"{prefix}fc1.bias": (4 * state,)}
            shapes |= {f"{prefix}fc2.weight": (state, 4 * state), f"{prefix}fc2.bias": (state,)}
    tensors = {}
    for name, shape in shapes.items():
        noise = random.standard_normal(shape, dtype=np.float32)
        fan_in = np.prod(shape[1:]) if len(shape) > 1 else 100
        tensors[f"model.{name}"] = noise * np.float32(1.5 * fan_in**-0.5)
    for name in norms:
        tensors[f"model.{name}.weight"] = 1 + 0.1 * random.standard_normal(state, dtype=np.float32)
        tensors[f"model.{name}.bias"] = 0.1 * random.standard_normal(state, dtype=np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

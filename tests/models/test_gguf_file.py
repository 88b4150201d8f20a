"""GGUF heads: what is written is read; damage is a typed error; tensors equal the gguf package's own reading."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_models.errors import ModelError, SourceError, UnsupportedFormat
from headrace_models.gguf_file import dequantize, read_gguf, read_metadata

INTEGERS = st.integers(-(2**31), 2**31 - 1)
VALUES = st.one_of(
    INTEGERS,
    st.booleans(),
    st.text(max_size=12),
    st.lists(INTEGERS, min_size=1, max_size=5),
    st.lists(st.text(max_size=6), min_size=1, max_size=5),
)


def write(path, metadata, tensors=()):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_int32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@settings(max_examples=40, deadline=None)
@given(metadata=st.dictionaries(st.from_regex(r"[a-z]{1,8}\.[a-z]{1,8}", fullmatch=True), VALUES, max_size=5))
def test_metadata_written_by_the_gguf_package_reads_back(tmp_path_factory, metadata):
    """Reading gives every key and value that the gguf package wrote."""
    # The package does not write empty strings; a missing one is no finding about the reader.
    metadata = {key: value for key, value in metadata.items() if value != ""}
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf", metadata)
    assert dict(read_metadata(path)) == {"general.architecture": "llama", **metadata}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_dequantized_tensors_equal_the_gguf_packages(tmp_path, kind):
    """Any element type gives the gguf package's values in the row-major shape, also past the first tensor."""
    generator = np.random.default_rng(3)
    kind = gguf.GGMLQuantizationType[kind]
    first, second = (generator.standard_normal((6, 64)).astype(np.float32) for _ in range(2))
    packed = [gguf.quants.quantize(array, kind) for array in (first, second)]
    path = write(tmp_path / "m.gguf", {}, [("a", packed[0], kind), ("b", packed[1], kind)])
    file = read_gguf(path)
    assert list(file.tensors) == ["a", "b"]
    for name, data in zip("ab", packed, strict=True):
        tensor = file.tensors[name]
        assert (tensor.shape, tensor.type) == ((6, 64), kind.name)
        values = dequantize(file, tensor)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, gguf.quants.dequantize(data, kind).reshape(6, 64))


def test_every_truncation_is_a_model_error(tmp_path):
    """A file cut anywhere inside its head raises a ModelError and nothing else."""
    path = write(tmp_path / "m.gguf", {"a.b": ["x", "yy"], "c.d": 5}, [("t", np.zeros((2, 32), np.float32), None)])
    whole = path.read_bytes()
    head = read_gguf(path).tensors["t"].offset
    cut = tmp_path / "cut.gguf"
    for size in range(head - 32):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_gguf(cut)


def test_a_tensor_past_the_end_is_a_source_error(tmp_path):
    """A file cut inside its tensors is readable, but those tensors are not."""
    path = write(tmp_path / "m.gguf", {}, [("t", np.zeros((64, 32), np.float32), None)])
    path.write_bytes(path.read_bytes()[:-4096])
    file = read_gguf(path)
    with pytest.raises(SourceError, match="ends inside tensor 't'"):
        dequantize(file, file.tensors["t"])


def test_other_files_and_versions_are_refused_by_what_they_are(tmp_path):
    """No magic and an unknown version are UnsupportedFormat; a missing file is a SourceError that names it."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(UnsupportedFormat, match="no GGUF file"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(UnsupportedFormat, match="version 9"):
        read_gguf(path)
    with pytest.raises(SourceError, match="absent"):
        read_gguf(tmp_path / "absent.gguf")

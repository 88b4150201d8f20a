"""Laws of cache files: what is loaded is what was saved, and nothing else is ever loaded."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvcache import (
    BatchCache,
    CacheFileError,
    CacheList,
    ChunkedKVCache,
    KVCache,
    KVScheme,
    QuantizedKVCache,
    RecurrentCache,
    RotatingKVCache,
    RotatingQuantizedKVCache,
    TurboQuantKVCache,
    UnsupportedCache,
    load_caches,
    make_prompt_cache,
    save_caches,
)
from headrace_kvcache.cache_file import read_manifest
from headrace_kvcache.durable_files import LocalFiles

SIZE = 32
KINDS = {
    "plain": KVCache,
    "quantized": lambda: QuantizedKVCache(bits=4, group_size=32),
    "ring": lambda: RotatingKVCache(6),
    "keeping ring": lambda: RotatingKVCache(6, 2),
    "quantized ring": lambda: RotatingQuantizedKVCache(6, 1, bits=8, group_size=32),
    "chunked": lambda: ChunkedKVCache(4),
    "turbo": lambda: TurboQuantKVCache(key_bits=8, value_bits=4),
    "list": lambda: CacheList(KVCache(), RotatingKVCache(4)),
}
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def arrays(num_tokens, dtype, *, seed, size):
    key = mx.random.key(seed)
    return [mx.random.normal((1, 2, num_tokens, size), key=each).astype(dtype) for each in mx.random.split(key)]


def feed(cache, num_tokens, dtype, seed=0, size=SIZE):
    """Append random positions and return what a query at each of them sees."""
    if isinstance(cache, CacheList):
        return [feed(part, num_tokens, dtype, seed, size) for part in cache.caches]
    keys, values = arrays(num_tokens, dtype, seed=seed, size=size)
    return cache.attend(keys, keys, values, scale=0.1)


def same(one, other):
    if isinstance(one, list):
        return all(map(same, one, other))
    return one.dtype == other.dtype and mx.array_equal(one, other).item()


def recurrent(num_tokens=5, dtype=mx.float32):
    cache = RecurrentCache(3)
    cache[0] = mx.random.normal((1, 3, 8)).astype(dtype)
    cache[2] = mx.random.normal((1, 2, 4, 4))
    cache.advance(num_tokens)
    return cache


def example():
    """A hybrid of every kind that mlx-lm has, of five positions."""
    caches = [KINDS[kind]() for kind in ("plain", "quantized", "ring", "keeping ring", "chunked", "list")]
    for cache in caches:
        feed(cache, 5, mx.float32)
    return [*caches, recurrent(5)]


@pytest.mark.parametrize("kind", KINDS)
@given(
    chunks=st.lists(st.integers(1, 9), max_size=3),
    dtype=st.sampled_from(sorted(DTYPES)),
    later=st.lists(st.integers(1, 4), min_size=1, max_size=2),
)
@settings(max_examples=6, deadline=None)
def test_a_loaded_cache_goes_on_as_the_saved_one(kind, chunks, dtype, later, tmp_path_factory):
    """Law: whatever was appended, load(save(cache)) gives the same attention for all that comes, bit for bit."""
    path = tmp_path_factory.mktemp("law") / "c.safetensors"
    size = 64 if kind == "turbo" else SIZE
    cache = KINDS[kind]()
    for seed, num_tokens in enumerate(chunks):
        feed(cache, num_tokens, DTYPES[dtype], seed, size)
    save_caches(path, [cache])
    (loaded,) = load_caches(path).caches
    assert type(loaded) is type(cache)
    assert loaded.empty() == (not chunks)
    if not isinstance(cache, CacheList):
        assert loaded.offset == cache.offset
        assert loaded.is_trimmable() == cache.is_trimmable()
    for seed, num_tokens in enumerate(later, 10):
        seen = [feed(each, num_tokens, DTYPES[dtype], seed, size) for each in (cache, loaded)]
        assert same(*seen)


def test_recurrent_states_keep_their_arrays_and_positions(tmp_path):
    """Law: arrays that are there and those that are not, the positions summed up and the lengths come back."""
    cache = recurrent(5)
    cache.lengths = mx.array([4])
    save_caches(tmp_path / "c", [cache])
    (loaded,) = load_caches(tmp_path / "c").caches
    assert loaded.offset == 5
    assert loaded[1] is None
    assert all(mx.array_equal(loaded[index], cache[index]) for index in (0, 2))
    assert loaded.lengths.tolist() == [4]


def test_tensors_are_as_long_as_the_tokens_held(tmp_path):
    """Law: no room of a buffer is written: a file grows by each token's own bytes, a full ring's not at all."""
    sizes = {}
    for kind in ("plain", "quantized", "ring"):
        for num_tokens in (300, 301):
            cache = KINDS[kind]()
            feed(cache, num_tokens, mx.float32)
            path = tmp_path / f"{kind}{num_tokens}"
            assert save_caches(path, [cache]) == path.stat().st_size
            sizes[kind, num_tokens] = sum(each.nbytes for each in mx.load(str(path), format="safetensors").values())
    assert sizes["plain", 301] - sizes["plain", 300] == 2 * 2 * SIZE * 4
    assert sizes["quantized", 301] - sizes["quantized", 300] == 2 * 2 * (SIZE // 2 + 8)
    assert sizes["ring", 301] == sizes["ring", 300] == 2 * 2 * 6 * SIZE * 4 + 16


def test_metadata_comes_back(tmp_path):
    """Law: the caller's texts come back as they were, whatever is in them, and can be read without the tensors."""
    metadata = {"model": 'a "b" \\ \n\0 é 🌊', "empty": "", "key-2": "0"}
    save_caches(tmp_path / "c", example(), metadata=metadata)
    assert load_caches(tmp_path / "c").metadata == metadata
    assert read_manifest(tmp_path / "c").metadata == metadata
    for key in ("a.b", "", "7", "headrace_sha256"):
        with pytest.raises(CacheFileError, match="metadata"):
            save_caches(tmp_path / "d", example(), metadata={key: "x"})
    assert not (tmp_path / "d").exists()


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    """Law: caches that would come back as something else are refused by their kind."""

    class Model:
        layers = (0,)

    (converting,) = make_prompt_cache(Model(), scheme=KVScheme.uniform(8, 32))
    feed(converting, 3, mx.float32)
    for caches in ([converting], [object()], [KVCache.merge([example()[0]])]):
        with pytest.raises(UnsupportedCache):
            save_caches(tmp_path / "c", caches)
    assert isinstance(KVCache.merge([example()[0]]), BatchCache)
    with pytest.raises(CacheFileError, match="empty"):
        save_caches(tmp_path / "c", [])
    assert list(tmp_path.iterdir()) == []
    feed(converting, 1, mx.float32)
    save_caches(tmp_path / "c", [converting])
    assert type(load_caches(tmp_path / "c").caches[0]) is QuantizedKVCache


# ---- foreign and damaged files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "foreign"),
        (b"\x05", "foreign"),
        (b"%PDF-1.7 and so on, for more than eight bytes", "foreign"),
        ((2).to_bytes(8, "little") + b"{}", "foreign"),
        ((2).to_bytes(8, "little") + b"[]", "foreign"),
        ((9000).to_bytes(8, "little") + b"{}", "damaged"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "foreign"),
        ((20).to_bytes(8, "little") + b'{"a": NaN, "b": 1}  ', "foreign"),
    ],
)
def test_other_files_are_refused_by_reason(tmp_path, content, reason):
    """Law: what is no cache file is refused as what it is, by the file's name."""
    (tmp_path / "other.bin").write_bytes(content)
    with pytest.raises(CacheFileError, match=r"'other\.bin' cannot be used") as caught:
        load_caches(tmp_path / "other.bin", allow_unchecked=True)
    assert caught.value.reason == reason
    assert pickle.loads(pickle.dumps(caught.value)).reason == reason


def test_weights_folders_and_pipes_are_no_cache_files(tmp_path):
    """Law: a file of weights is foreign, a pipe does not block, what is not there is an OSError."""
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {"a": mx.ones(3)}, {"format": "mlx"})
    os.mkfifo(tmp_path / "pipe")
    for name in ("w.safetensors", "pipe"):
        with pytest.raises(CacheFileError) as caught:
            load_caches(tmp_path / name)
        assert caught.value.reason == "foreign"
    for name in ("nothing", "."):
        with pytest.raises(OSError, match=r"."):
            load_caches(tmp_path / name)


def remade(raw, change):
    """A file with another header, padded as writers do."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def test_other_versions_and_files_without_checksum_are_named(tmp_path):
    """Law: a later format and a file that lost its checksum are refused, and say so."""
    path = tmp_path / "c"
    save_caches(path, example())
    raw = path.read_bytes()
    path.write_bytes(remade(raw, lambda header: header["__metadata__"].update({"0.headrace_format": "2"})))
    with pytest.raises(CacheFileError, match="format '2'") as caught:
        load_caches(path)
    assert caught.value.reason == "version"

    def strip(header):
        for key in [key for key in header["__metadata__"] if key.startswith("0.headrace")]:
            del header["__metadata__"][key]

    path.write_bytes(remade(raw, strip))
    with pytest.raises(CacheFileError, match="allow_unchecked") as caught:
        load_caches(path)
    assert caught.value.reason == "unchecked"
    assert not load_caches(path, allow_unchecked=True).is_checked


def mutated(raw, draw):
    """One change of a file's bytes, of the kinds that disks, transfers and hands make."""
    at, other = sorted(draw.sample(range(len(raw)), 2))
    # Half of them hit the header, which is a small part of the file.
    if draw.random() < 0.5:
        at, other = sorted(draw.sample(range(8 + int.from_bytes(raw[:8], "little")), 2))
    match draw.randrange(8):
        case 0:
            return raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]
        case 1:
            return raw[:at]
        case 2:
            return raw[:at] + raw[other:]
        case 3:
            return raw[:other] + raw[at:]
        case 4:
            return raw[:at] + bytes(other - at) + raw[other:]
        case 5:
            return raw + draw.randbytes(draw.randrange(1, 64))
        case 6:
            return raw[:at] + draw.randbytes(other - at) + raw[other:]
        case _:
            return remade(raw, lambda header: change_header(header, draw))


def change_header(header, draw):
    """One change of what a header says that leaves it JSON."""
    odd = [0, -1, 1, 2, 7, 255, 2**31, 2**63, 10**30, 1.5, None, True, "", "I64", "F32", [], {}, [0, 0], [[]]]
    name = draw.choice(list(header))
    if name == "__metadata__":
        entries = header[name]
        key = draw.choice(list(entries))
        texts = ["", "0", "scalar", "string", "none", "KVCache", "CacheList", "ArraysCache", "NoCache", "1", "3.0.1"]
        if draw.random() < 0.3:
            del entries[key]
        else:
            entries[key] = draw.choice([*texts, *odd[:12]])
    elif draw.random() < 0.2:
        header[draw.choice(["0.0", "9.9", "2.0.0"])] = header.pop(name)
    else:
        field = draw.choice(list(header[name]))
        value = header[name][field]
        if isinstance(value, list) and value and draw.random() < 0.7:
            value[draw.randrange(len(value))] = draw.choice(odd)
        else:
            header[name][field] = draw.choice(odd)


def hold_mutated_files_to_the_law(path, count, seed):
    save_caches(path, example(), metadata={"model": "m"})
    raw, draw, num_unchecked = path.read_bytes(), random.Random(seed), 0
    for _ in range(count):
        changed = mutated(raw, draw)
        if changed == raw:
            continue
        path.write_bytes(changed)
        with pytest.raises(CacheFileError):
            load_caches(path)
        # Without the checksum as a guard what is taken must still be caches: they can be appended to and evaluated.
        try:
            saved = load_caches(path, allow_unchecked=True)
        except CacheFileError:
            continue
        num_unchecked += 1
        assert not saved.is_checked
        for cache in saved.caches:
            mx.eval(cache.state if not isinstance(cache, CacheList) else [part.state for part in cache.caches])
    return num_unchecked


def unchecked_copy(raw):
    def strip(header):
        for key in [key for key in header["__metadata__"] if key.startswith("0.headrace")]:
            del header["__metadata__"][key]

    return remade(raw, strip)


def hold_unchecked_files_to_the_law(path, count, seed):
    """Files whose form alone is checked: whatever they say, they are refused or give caches that work."""
    save_caches(path, example())
    raw, draw, num_taken = unchecked_copy(path.read_bytes()), random.Random(seed), 0
    for _ in range(count):
        path.write_bytes(remade(raw, lambda header: change_header(header, draw)))
        try:
            saved = load_caches(path, allow_unchecked=True)
        except CacheFileError:
            continue
        num_taken += 1
        for cache in saved.caches:
            if not isinstance(cache, RecurrentCache):
                mx.eval(feed(cache, 2, mx.float32))
    return num_taken


def test_a_changed_file_is_never_taken(tmp_path):
    """Law: any change of any byte is refused with a CacheFileError, never a crash, never a wrong tensor."""
    hold_mutated_files_to_the_law(tmp_path / "c", 60, seed=1)
    hold_unchecked_files_to_the_law(tmp_path / "c", 40, seed=2)


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_five_thousand_changed_files_are_never_taken(tmp_path):
    """Law: as above, 5,000 times each."""
    hold_mutated_files_to_the_law(tmp_path / "c", 5_000, seed=3)
    assert hold_unchecked_files_to_the_law(tmp_path / "c", 5_000, seed=4) > 50


def test_every_single_bit_of_the_header_counts(tmp_path):
    """Law: a flipped bit anywhere in a small file's length, header or first tensor is refused."""
    path = tmp_path / "c"
    cache = KVCache()
    feed(cache, 1, mx.float16)
    save_caches(path, [cache])
    raw = path.read_bytes()
    for at in range(0, min(len(raw), 1500), 7):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        with pytest.raises(CacheFileError):
            load_caches(path)


# ---- crashes ---------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The program ends here."""


class DyingFiles(LocalFiles):
    """The operating system under a program that ends before or after its n-th call, and with it the power."""

    def __init__(self, at, when):
        self.at, self.when = at, when
        self.calls, self.is_dead, self.unsynced, self.file = 0, False, set(), None

    def _step(self, call):
        if self.is_dead:
            raise Killed
        self.calls += 1
        dies = self.calls == self.at
        if dies and self.when == "before":
            self.is_dead = True
            raise Killed
        result = call()
        if dies:
            self.is_dead = True
            raise Killed
        return result

    def create(self, path, mode):
        def call():
            self.path, self.file = path, super(DyingFiles, self).create(path, mode)
            self.unsynced.add(path)

        self._step(call)
        return self.file

    def write(self, file, data):
        self.unsynced.add(self.path)
        self._step(lambda: (super(DyingFiles, self).write(file, data), file.flush()))

    def sync(self, file):
        def call():
            super(DyingFiles, self).sync(file)
            self.unsynced.discard(self.path)

        self._step(call)

    def replace(self, source, target):
        def call():
            super(DyingFiles, self).replace(source, target)
            if source in self.unsynced:
                self.unsynced.add(target)

        self._step(call)

    def sync_folder(self, path):
        self._step(lambda: super(DyingFiles, self).sync_folder(path))

    def remove(self, path):
        self._step(lambda: super(DyingFiles, self).remove(path))

    def lose_power(self):
        """What no sync has brought to the device is lost."""
        if self.file is not None:
            self.file.close()
        for path in self.unsynced:
            if path.exists():
                path.write_bytes(b"")


def test_a_writer_killed_at_any_call_leaves_the_old_file_or_the_new_one(tmp_path):
    """Law: before and after each call, with the power lost too, the path holds one of the two as a whole."""
    path, caches, seen = tmp_path / "c", example()[:1], set()
    for is_first in (True, False):
        at, num_killed = 0, 0
        while True:
            at += 1
            outcomes = set()
            for when in ("before", "after"):
                path.unlink(missing_ok=True)
                if not is_first:
                    save_caches(path, caches, metadata={"which": "old"})
                files = DyingFiles(at, when)
                try:
                    save_caches(path, caches, metadata={"which": "new"}, files=files)
                except Killed:
                    num_killed += 1
                files.lose_power()
                outcomes.add(load_caches(path).metadata["which"] if path.exists() else "none")
            assert outcomes <= {"none" if is_first else "old", "new"}
            seen |= outcomes
            if not files.is_dead:
                break
        # create, header, keys, values, offset, sync, rename and the sync of the folder, before and after each.
        assert num_killed == 2 * 8
    assert seen == {"none", "old", "new"}


def test_a_writer_that_fails_leaves_nothing_behind(tmp_path):
    """Law: an error of any call leaves the old file, and no draft."""

    class FailingFiles(DyingFiles):
        def _step(self, call):
            self.calls += 1
            if self.calls == self.at:
                raise OSError(28, "No space left on device")
            return call()

    path = tmp_path / "c"
    cache = KVCache()
    feed(cache, 3, mx.float32)
    save_caches(path, [cache], metadata={"which": "old"})
    # create, header, keys, values, offset, sync, rename; the folder's sync comes when the new file is there.
    for at in range(1, 8):
        with pytest.raises(OSError, match="No space"):
            save_caches(path, [cache], metadata={"which": "new"}, files=FailingFiles(at, "before"))
        assert load_caches(path).metadata == {"which": "old"}
        assert [each.name for each in tmp_path.iterdir()] == ["c"]


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_killed_process_leaves_the_old_file_or_the_new_one(tmp_path):
    """Law: as above, with a process that is really killed before each of its calls."""
    program = textwrap.dedent("""
        import os, signal, sys
        import mlx.core as mx
        from headrace_kvcache import KVCache, save_caches
        from headrace_kvcache.durable_files import LocalFiles

        class Files(LocalFiles):
            calls = 0
            def __getattribute__(self, name):
                if not name.startswith("_") and name != "calls":
                    Files.calls += 1
                    if Files.calls == int(sys.argv[2]):
                        os.kill(os.getpid(), signal.SIGKILL)
                return super().__getattribute__(name)

        cache = KVCache()
        cache.update_and_fetch(mx.ones((1, 2, 9, 32)), mx.ones((1, 2, 9, 32)))
        save_caches(sys.argv[1], [cache], metadata={"which": "new"}, files=Files())
    """)
    path = tmp_path / "c"
    cache = KVCache()
    feed(cache, 9, mx.float32)
    found = []
    for at in range(1, 12):
        save_caches(path, [cache], metadata={"which": "old"})
        done = subprocess.run([sys.executable, "-c", program, str(path), str(at)], check=False)
        found.append(load_caches(path).metadata["which"])
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert found == ["old"] * 7 + ["new"] * 2

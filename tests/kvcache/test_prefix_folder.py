"""Laws of stored prefixes in a folder: a restart finds what was there, and no file can hurt."""

import os
import stat
from contextlib import suppress

import mlx.core as mx
import pytest

from headrace_kvcache import KVCache, PrefixCache, PrefixFolder, PrefixNamespace, RecurrentCache, load_caches
from headrace_kvcache.durable_files import LOCAL_FILES, LocalFiles

NAMESPACE = PrefixNamespace("unquantized", adapters=(("digest", 0.5),), tenant='a "tenant"')
IDENTITY = "weights, codec, float32"
SIZE = 32
TOKEN_BYTES = 2 * SIZE * 4
MANY = 1 << 20


def plain(tokens):
    cache = KVCache()
    keys = mx.broadcast_to(mx.array(list(tokens), mx.float32)[None, None, :, None], (1, 1, len(tokens), SIZE))
    cache.update_and_fetch(keys, -keys)
    return [cache]


def hybrid(tokens):
    state = RecurrentCache(1)
    state[0] = mx.full((1, 4), float(sum(tokens)))
    state.advance(len(tokens))
    return [*plain(tokens), state]


def cache_of(*prompts, max_bytes=MANY, make=plain):
    cache = PrefixCache(max_bytes, min_tokens=4)
    for number, tokens in enumerate(prompts):
        cache.put(tokens, make(tokens), namespace=NAMESPACE, session_id=f"session {number}")
    return cache


def folder_at(path, *, identity=IDENTITY, max_bytes=MANY, files=LOCAL_FILES):
    return PrefixFolder(path, identity=identity, max_bytes=max_bytes, files=files)


def loaded(path, *, max_bytes=MANY, **about):
    """What another program finds."""
    cache = PrefixCache(max_bytes, min_tokens=4)
    report = folder_at(path, max_bytes=max_bytes, **about).load(cache)
    cache.check_integrity()
    return cache, report


def prompt(start, length=8):
    return tuple(range(start, start + length))


def keys(cache):
    return [view.tokens for view in cache.views()]


@pytest.mark.parametrize("make", [plain, hybrid])
def test_a_restart_finds_every_entry_in_its_order(tmp_path, make):
    """Law: tokens, namespace, session, values and the order of use come back."""
    cache = cache_of(prompt(10), prompt(20), prompt(30), make=make)
    cache.take([*prompt(10), 1], namespace=NAMESPACE)
    report = folder_at(tmp_path).save(cache)
    assert (report.num_entries, report.num_written, report.num_damaged) == (3, 3, 0)
    again, report = loaded(tmp_path)
    assert (report.num_entries, report.num_bytes) == (3, cache.nbytes)
    assert keys(again) == [prompt(20), prompt(30), prompt(10)]
    for before, after in zip(cache.views(), again.views(), strict=True):
        assert after.namespace == before.namespace
        assert after.session_id == before.session_id
    hit = again.take([*prompt(20), 1], namespace=NAMESPACE)
    assert hit.num_tokens == 8
    assert hit.caches[0].keys[0, 0, :8, 0].tolist() == list(prompt(20))
    assert hit.caches[0].values[0, 0, :8, 0].tolist() == [-token for token in prompt(20)]
    assert again.take([*prompt(20), 1], namespace=PrefixNamespace("unquantized")) is None
    if make is hybrid:
        assert hit.caches[1][0].tolist() == [[float(sum(prompt(20)))] * 4]
        assert again.take([*prompt(20)[:7], 1], namespace=NAMESPACE) is None


def test_what_is_there_is_not_written_again(tmp_path):
    """Law: a second save writes new entries alone, and keeps the order of use."""
    cache = cache_of(prompt(10), prompt(20))
    folder = folder_at(tmp_path)
    folder.save(cache)
    cache.put(prompt(30), plain(prompt(30)), namespace=NAMESPACE)
    assert folder.save(cache).num_written == 1
    assert folder.save(cache).num_written == 0
    again, _ = loaded(tmp_path)
    assert keys(again) == [prompt(10), prompt(20), prompt(30)]


def test_another_identity_finds_nothing(tmp_path):
    """Law: other weights, another codec or scheme see no entry, and remove none."""
    folder_at(tmp_path).save(cache_of(prompt(10)))
    other, report = loaded(tmp_path, identity="other weights")
    assert len(other) == report.num_entries == report.num_damaged == 0
    folder_at(tmp_path, identity="other weights").save(cache_of(prompt(20)))
    assert keys(loaded(tmp_path)[0]) == [prompt(10)]


def test_damaged_and_foreign_files_are_reported_and_skipped(tmp_path, caplog):
    """Law: a damaged entry costs itself, without its tokens in the log; files of other names are left alone."""
    folder = folder_at(tmp_path)
    folder.save(cache_of(prompt(10), prompt(20), prompt(1030)))
    paths = {load_caches(path).metadata["tokens"]: path for path in folder.folder.iterdir()}
    cut, renamed, _ = (paths[" ".join(map(str, prompt(start)))] for start in (10, 20, 1030))
    cut.write_bytes(cut.read_bytes()[:-1])
    # A good file under the name of another entry is no entry.
    renamed.rename(renamed.with_name("0" * 40 + ".safetensors"))
    foreign = folder.folder / "notes.txt"
    foreign.write_text("mine")
    (folder.folder / ("1" * 40 + ".safetensors")).mkdir()
    again, report = loaded(tmp_path)
    assert keys(again) == [prompt(1030)]
    assert report.num_damaged == 2
    assert len(caplog.records) == 2
    assert "1031" not in caplog.text
    assert " 11 12" not in caplog.text
    assert foreign.read_text() == "mine"
    assert not cut.exists()


def test_memory_and_files_stay_within_their_bytes(tmp_path):
    """Law: the most recently used are loaded until the cap is reached, and older files give way to new ones."""
    prompts = [prompt(start) for start in range(100, 200, 10)]
    folder_at(tmp_path).save(cache_of(*prompts))
    size = max(path.stat().st_size for path in folder_at(tmp_path).folder.iterdir())
    again, report = loaded(tmp_path, max_bytes=3 * size)
    assert keys(again) == prompts[-3:]
    assert report.num_skipped == 7
    small = folder_at(tmp_path, max_bytes=4 * size)
    again.put(prompt(900), plain(prompt(900)), namespace=NAMESPACE)
    small.save(again)
    assert keys(loaded(tmp_path)[0])[-4:] == [*prompts[-3:], prompt(900)]
    assert sum(path.stat().st_size for path in small.folder.iterdir()) <= 6 * size


def test_nobody_else_may_read_the_files(tmp_path):
    """Law: folders and files are for their owner alone, because prompts can be read off them."""
    folder = folder_at(tmp_path / "new" / "folder")
    folder.save(cache_of(prompt(10)))
    (file,) = folder.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.folder.stat().st_mode) == 0o700


def test_a_full_disk_ends_saving_and_nothing_else(tmp_path, caplog):
    """Law: what cannot be written is counted and logged once, and what was there stays."""

    class FullDisk(LocalFiles):
        def write(self, file, data):
            raise OSError(28, "No space left on device")

    folder_at(tmp_path).save(cache_of(prompt(10)))
    report = folder_at(tmp_path, files=FullDisk()).save(cache_of(prompt(20), prompt(30)))
    assert (report.num_entries, report.num_damaged) == (0, 2)
    assert len(caplog.records) == 1
    assert keys(loaded(tmp_path)[0]) == [prompt(10)]
    (tmp_path / "file").write_text("in the way")
    assert folder_at(tmp_path / "file").save(cache_of(prompt(20))).num_damaged == 1
    assert loaded(tmp_path / "file")[1].num_entries == 0


class FailingFiles(LocalFiles):
    """A file system on which the first `num_good` files can be written, and no other."""

    def __init__(self, error, num_good):
        self.error, self.num_good = error, num_good

    def write(self, file, data):
        if self.num_good < 0:
            raise self.error
        super().write(file, data)

    def create(self, path, mode):
        self.num_good -= 1
        return super().create(path, mode)


@pytest.mark.parametrize("num_good", [0, 1])
@pytest.mark.parametrize("error", [OSError(5, "I/O error"), OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_failed_save_takes_no_room(tmp_path, error, num_good):
    """Law: of a full folder only as much gives way as was written, whatever stops the rest."""
    prompts = [prompt(start) for start in (110, 120, 130, 140)]
    folder = folder_at(tmp_path)
    num_bytes = folder.save(cache_of(*prompts)).num_bytes
    full = folder_at(tmp_path, max_bytes=num_bytes, files=FailingFiles(error, num_good))
    new = cache_of(*(prompt(start) for start in (210, 220, 230)))
    with suppress(KeyboardInterrupt):
        assert full.save(new).num_damaged == 3 - num_good
    assert set(keys(loaded(tmp_path)[0])) == {*prompts[num_good:], *[prompt(230)][:num_good]}


def test_old_drafts_of_killed_programs_are_removed(tmp_path):
    """Law: a draft that nobody has written to for an hour goes with the next save; a young one may be in use."""
    folder = folder_at(tmp_path)
    folder.save(cache_of(prompt(10)))
    old, young = folder.folder / ".a.tmp", folder.folder / ".b.tmp"
    for draft in (old, young):
        draft.write_bytes(b"half")
    os.utime(old, (0, 0))
    folder.save(cache_of(prompt(10)))
    assert young.exists()
    assert not old.exists()


def test_a_cap_of_nothing_loads_and_saves_nothing(tmp_path):
    """Law: without a prefix cache the folder stays as it is."""
    folder_at(tmp_path).save(cache_of(prompt(10)))
    again, report = loaded(tmp_path, max_bytes=0)
    assert len(again) == 0
    assert report.num_skipped == 1

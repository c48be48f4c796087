"""Tests of records that are replaced atomically: if one is torn, the one before it is read."""

from pathlib import Path

import pytest

from offload_trainer.offloading.pages.manifest import Record, read_record


def written(path: Path, *contents: bytes) -> Record:
    record = Record(path, most=5000)
    for content in contents:
        record.write(content)
    return record


def test_the_newest_record_is_read_and_the_next_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "record"
    written(path).close()
    with pytest.raises(ValueError, match="neither of its two slots is whole"):
        read_record(path, most=5000)
    for count in range(1, 6):
        written(path, b"%d" % count * 700).close()
        assert read_record(path, most=5000) == b"%d" % count * 700
    assert path.stat().st_size == 2 * 8192
    written(path, b"short", b"", b"5000 bytes".ljust(5000)).close()
    assert read_record(path, most=5000) == b"5000 bytes".ljust(5000)


def test_a_record_that_is_torn_is_the_one_before(tmp_path: Path) -> None:
    path, old, new = tmp_path / "record", b"the step before", b"the step now"
    written(path, b"long ago", old).close()
    before = path.read_bytes()
    written(path, new).close()
    after = path.read_bytes()
    changed = [place for place in range(len(after)) if before[place] != after[place]]
    # a power cut may destroy a block that is being written, and no other: the slots share none
    assert 8192 <= changed[0] <= changed[-1] < 16384 == len(after)
    assert read_record(path, most=5000) == new
    for place in changed[1:]:  # bytes before `place` were written
        path.write_bytes(after[:place] + before[place:])
        assert read_record(path, most=5000) == old, place
    path.write_bytes(after)
    for place in range(8192, 8192 + 20 + len(new)):  # the slot of the third record
        path.write_bytes(after[:place] + bytes([after[place] ^ 0x55]) + after[place + 1 :])
        assert read_record(path, most=5000) == old, place
    path.write_bytes(after[8192:] + after[:8192])  # the slots exchanged
    with pytest.raises(ValueError, match=r"neither of its two slots is whole$"):
        read_record(path, most=5000)


@pytest.mark.parametrize("size", [1, 4096, 3 * 8192])
def test_a_file_of_another_size_is_refused(size: int, tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(b"x" * size)
    with pytest.raises(ValueError, match="bytes"):
        read_record(tmp_path / "record", most=5000)

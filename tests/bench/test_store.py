"""The store on real files, whole, damaged and locked. Run: pytest tests/bench/test_store.py"""

import json
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from small_bench import CPU, attention_case, layers_case, measured

from memcore.bench.measurement import Status, dump_measurement
from memcore.bench.store import FORMAT, Store
from memcore.errors import UserError

CASE = attention_case()
_DATA = dump_measurement(measured(CASE))
WITHOUT_A_NUMBER = {**_DATA, "figures": {**_DATA["figures"], "peak_bytes": "much"}}
WITHOUT_A_DEVICE = {**_DATA, "device": {**_DATA["device"], "name": ["a", "list"]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "measurements.sqlite"


@pytest.fixture
def store(path: Path) -> Store:
    return Store(path, lock_s=0.2)


class TestKeeping:
    def test_nothing_is_made_before_something_is_kept(self, store: Store, path: Path):
        assert store.by_device([CASE]) == {}
        assert store.everything() == []
        store.add([])
        assert not path.exists()

    def test_a_measurement_comes_back_whole(self, store: Store):
        kept = [
            measured(CASE),
            measured(layers_case(checkpointing="segments(2)")),
            measured(attention_case(seq_len=512), status=Status.OUT_OF_MEMORY, reason="out of memory at 512 tokens"),
        ]
        store.add(kept)
        assert store.everything() == kept

    def test_the_newest_of_a_case_is_offered_with_its_date(self, store: Store):
        old, new = measured(CASE, 1000), measured(CASE, 2000, measured_at="2026-05-06T07:08:09Z")
        store.add([new])
        store.add([old])
        assert store.by_device([CASE, attention_case(seq_len=512)]) == {CPU: {CASE.key: new}}

    def test_another_program_reads_what_was_written(self, store: Store, path: Path):
        store.add([measured(CASE)])
        with sqlite3.connect(path) as connection:
            row = connection.execute("select device, torch, case_key, measured_at from measurements").fetchone()
        assert row == (CPU.name, CPU.torch, CASE.key, "2026-01-02T03:04:05Z")

    def test_many_threads_lose_nothing(self, path: Path):
        store = Store(path)

        def keep(number: int) -> None:
            for index in range(5):
                store.add([measured(attention_case(seq_len=1 + number * 100 + index))])

        threads = [threading.Thread(target=keep, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.everything()) == 30


class TestExchange:
    def test_what_one_exports_another_takes_in_once(self, store: Store, tmp_path: Path):
        store.add([measured(CASE), measured(layers_case())])
        other = Store(tmp_path / "other.sqlite")
        other.add([measured(CASE)])
        text = json.dumps(store.export())
        assert other.take_in(json.loads(text)) == 1
        assert other.take_in(json.loads(text)) == 0
        assert other.export()["measurements"] == store.export()["measurements"]

    @pytest.mark.parametrize(
        "data",
        [
            [],
            {},
            {"format": "something else", "measurements": []},
            {"format": FORMAT},
            {"format": FORMAT, "measurements": [{}]},
            {"format": FORMAT, "measurements": [1]},
            {"format": FORMAT, "measurements": None},
            {"format": FORMAT, "measurements": [WITHOUT_A_NUMBER]},
            {"format": FORMAT, "measurements": [WITHOUT_A_DEVICE]},
        ],
    )
    def test_anything_else_is_refused_with_a_sentence(self, store: Store, data: object):
        with pytest.raises(UserError, match="export"):
            store.take_in(data)
        assert store.everything() == []

    def test_half_a_file_is_not_taken_in(self, store: Store, tmp_path: Path):
        store.add([measured(CASE), measured(layers_case())])
        data = store.export()
        del data["measurements"][1]["case"]["part"]
        other = Store(tmp_path / "other.sqlite")
        with pytest.raises(UserError):
            other.take_in(data)
        assert other.everything() == []


class TestTrouble:
    def test_a_file_that_is_no_database_is_one_sentence(self, store: Store, path: Path):
        path.parent.mkdir()
        path.write_bytes(b"not a database" * 1000)
        for use in (store.everything, lambda: store.add([measured(CASE)]), lambda: store.by_device([CASE])):
            with pytest.raises(UserError, match=r"measurements\.sqlite cannot be used .*move it away") as raised:
                use()
            assert "\n" not in str(raised.value)
        assert path.read_bytes().startswith(b"not a database")

    def test_a_damaged_database_is_one_sentence(self, store: Store, path: Path):
        store.add([measured(attention_case(seq_len=each)) for each in range(1, 200)])
        content = bytearray(path.read_bytes())
        content[100 : len(content) // 2] = b"\xff" * (len(content) // 2 - 100)
        path.write_bytes(content)
        with pytest.raises(UserError, match="cannot be used"):
            store.everything()

    def test_a_row_of_another_form_is_one_sentence(self, store: Store, path: Path):
        store.add([measured(CASE)])
        with sqlite3.connect(path) as connection:
            connection.execute("update measurements set measurement = '{}'")
        with pytest.raises(UserError, match="of another form"):
            store.by_device([CASE])

    def test_a_locked_file_is_one_sentence_and_works_again_after(self, store: Store, path: Path):
        store.add([measured(CASE)])
        with sqlite3.connect(path, isolation_level=None) as other:
            other.execute("begin exclusive")
            with pytest.raises(UserError, match="in use by another program"):
                store.add([measured(layers_case())])
            with pytest.raises(UserError, match="in use by another program"):
                store.by_device([CASE])
            other.execute("rollback")
        store.add([measured(layers_case())])
        assert len(store.everything()) == 2

    def test_a_folder_in_its_place_is_one_sentence(self, tmp_path: Path):
        with pytest.raises(UserError, match="cannot be used"):
            Store(tmp_path).add([measured(CASE)])

    def test_a_folder_that_cannot_be_made_is_one_sentence(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match="cannot be used"):
            Store(tmp_path / "file" / "measurements.sqlite").add([measured(CASE)])

    def test_devices_are_told_apart_and_the_last_to_measure_comes_first(self, store: Store):
        other = replace(CPU, name="another CPU")
        store.add([measured(CASE, 1), measured(CASE, 2, device=other, measured_at="2027-01-01T00:00:00Z")])
        found = store.by_device([CASE])
        assert list(found) == [other, CPU]
        assert [each[CASE.key].figures.peak_bytes for each in found.values()] == [2, 1]

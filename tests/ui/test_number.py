"""A field that is emptied is no other scenario: the last number comes back, with a sentence at the field.

Run: pytest tests/ui/test_number.py
"""

import pytest
from streamlit.testing.v1 import AppTest

KEYS = ["w_seq", "w_micro", "w_gpus", "w_node", "w_bucket"]


@pytest.fixture(scope="module")
def app() -> AppTest:
    return AppTest.from_file("../../app.py", default_timeout=60).run()


@pytest.mark.parametrize("key", KEYS)
def test_what_was_there_comes_back(key: str, app: AppTest):
    box = app.number_input(key=key)
    assert box.value is not None
    before, step = int(box.value), 3
    answer = [metric.value for metric in app.metric]
    box.set_value(None).run()
    assert app.number_input(key=key).value == before
    assert [metric.value for metric in app.metric] == answer
    assert f"{before:,}" in app.sidebar.warning[0].value
    app.number_input(key=key).set_value(before + step).run()
    assert not app.sidebar.warning
    app.number_input(key=key).set_value(before).run()
    assert not app.exception

"""Token sequences as bytes."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedscope.engine import tokens


@given(st.lists(st.integers(0, tokens.MAX_TOKEN_ID)))
def test_wide_arrays_are_packed_as_lists_are(ids: list[int]) -> None:
    assert tokens.encode(array("q", ids)) == tokens.encode(ids)
    assert tokens.decode(tokens.encode(array("q", ids))) == ids


@pytest.mark.parametrize("large", [2**31, 2**32, 2**40, 2**62])
def test_ids_that_are_too_large_are_refused(large: int) -> None:
    for ids in ([5, large, 7], array("q", [5, large, 7])):
        with pytest.raises(OverflowError):
            tokens.encode(ids)

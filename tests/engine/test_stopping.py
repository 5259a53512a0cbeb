from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from assay.engine.stopping import completes_stop

PIECES = ["", "a", "b", "ab", "ba\n", "</", "x>", "é", "", "bbbb"]


def decode(ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=60),
    st.lists(st.text("ab\n</x>é", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_found_at_the_token_that_completes_it(ids: list[int], stops: list[str]) -> None:
    for end in range(1, len(ids) + 1):
        found = completes_stop(ids[:end], stops, decode)
        assert found == any(stop in decode(ids[:end]) for stop in stops)
        if found:
            break

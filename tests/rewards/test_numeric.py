from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from assay.rewards.numeric import Unreadable, read_quantity, tidy


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**15), 10**15), st.integers(0, 4))
def test_all_spellings_of_a_number_have_its_value(units: int, places: int) -> None:
    value = Fraction(units, 10**places)
    digits = f"{abs(units):0{places + 1}d}"
    whole, decimals = digits[: len(digits) - places], digits[len(digits) - places :]
    sign = "-" if units < 0 else ""
    tail = f".{decimals}" if places else ""
    for text in (
        f"{sign}{int(whole):,}{tail}",
        f"{sign}${whole}{tail}",
        f"{sign}{whole}{tail} apples",
        f"${units}/{10**places}$",
    ):
        quantity = read_quantity(tidy(text))
        assert quantity is not None and quantity.value == value, text


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789.,-+$%/\\frac{}^ e\u2212½\ud800xm", max_size=25))
def test_any_text_is_a_number_or_none_or_unreadable(text: str) -> None:
    try:
        quantity = read_quantity(tidy(text))
    except Unreadable:
        return
    if quantity is not None:
        value = quantity.value
        again = read_quantity(f"{value.numerator}/{value.denominator}")
        assert again is not None and again.value == value

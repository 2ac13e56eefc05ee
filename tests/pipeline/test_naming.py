"""Names that are not in use yet."""

from __future__ import annotations

from ul2q.pipeline.naming import unused_name


def test_the_first_free_number_is_appended() -> None:
    taken = {"conv", "conv_2", "fc", "fc__3"}
    assert unused_name("pool", taken) == "pool"
    assert unused_name("conv", taken) == "conv_3"
    assert unused_name("fc", taken, "__") == "fc__2"
    assert len(taken) == 4
